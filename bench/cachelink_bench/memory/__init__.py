"""``cachelink-bench memory``: what a handoff takes beside the caches, as the operating system sees it.

Two daemons as processes of their own, fresh for each run; the wide-KV model, so that a cache of half a
gigabyte is made in seconds. ``bench/README.md`` describes the method.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``, which is imported only now because it loads torch."""
    from cachelink_bench.memory.command import main as run

    return run(argv)
