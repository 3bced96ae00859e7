"""``cachelink-bench two-node``: moving a cache to another node, beside sending the text.

The sender reads a document once and hands its cache over in every representation; the receiver
answers a question from each, and from the text that it reads itself. Two daemons on two hosts are
measured, or two that ``--emulate`` starts on this machine with a shaped link between them.

The parts that measure load neither torch nor transformers, so they may run within a network
namespace beside the daemons without a model of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``, which is imported only now because it loads torch."""
    # gRPC reads this when it is loaded, and would write to the terminal that a daemon has gone.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from cachelink_bench.two_node.command import main as run

    return run(argv)
