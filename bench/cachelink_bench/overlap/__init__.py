"""``cachelink-bench overlap``: is a streaming handoff as fast as the slowest of its stages alone?

A prefix is handed over while it is being prefilled, over links slower than the prefill, about as
fast, and faster. In the same round the prefill runs alone, the link runs alone, and two nodes do
one stage after another.

The part that measures loads neither torch nor transformers; it runs within the sender's namespace.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``, which is imported only now because it loads torch."""
    from cachelink_bench.overlap.command import main as run

    return run(argv)
