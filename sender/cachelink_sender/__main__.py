"""``cachelink-sender``: resolves the configuration and lives one life."""

from __future__ import annotations

import sys

from cachelink_core.node.entry import run_daemon
from cachelink_sender.config import SenderConfig
from cachelink_sender.daemon import sender_daemon


def main() -> int:
    """Runs the daemon; returns the exit status, see ``run_daemon``."""
    return run_daemon(SenderConfig, sender_daemon)


if __name__ == "__main__":
    sys.exit(main())
