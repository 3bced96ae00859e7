"""``python -m cachelink_bench.serial sender|receiver [OPTION]...``: a serial node as a daemon.

The options are those of ``cachelink-sender`` and ``cachelink-receiver``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cachelink_bench.serial.nodes import serial_receiver_daemon, serial_sender_daemon
from cachelink_core.node.entry import run_daemon
from cachelink_receiver.config import ReceiverConfig
from cachelink_sender.config import SenderConfig

_USAGE = "usage: python -m cachelink_bench.serial sender|receiver [OPTION]...\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one daemon.

    Args:
        argv: arguments, those of the process by default.

    Returns:
        Its exit status; 2 for wrong arguments.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    role, options = (given[0], given[1:]) if given else ("", [])
    if role == "sender":
        return run_daemon(SenderConfig, serial_sender_daemon, options)
    if role == "receiver":
        return run_daemon(ReceiverConfig, serial_receiver_daemon, options)
    sys.stderr.write(_USAGE)
    return 0 if role in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
