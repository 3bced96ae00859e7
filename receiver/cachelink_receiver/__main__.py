"""``cachelink-receiver``: resolves the configuration and lives one life."""

from __future__ import annotations

import sys

from cachelink_core.node.entry import run_daemon
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.daemon import receiver_daemon


def main() -> int:
    """Runs the daemon; returns the exit status, see ``run_daemon``."""
    return run_daemon(ReceiverConfig, receiver_daemon)


if __name__ == "__main__":
    sys.exit(main())
