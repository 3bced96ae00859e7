"""``cachelink-bench answer``: how fast is an answer from a cache that lies ready, alone and in company?

Alone: time to the first token beside the bare forward of the same query, and tokens a second beside
transformers' own ``generate`` over caches of its own. In company: several questions to one cache, in
order, on copies, sharing it by turns as a receiver does, and in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``, which is imported only now because it loads torch."""
    from cachelink_bench.answer.command import main as run

    return run(argv)
