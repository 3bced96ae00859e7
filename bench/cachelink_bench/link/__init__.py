"""``cachelink-bench link``: how much of a link a handoff fills, beside iperf3 in the same run.

Two daemons in two network namespaces hand one cache over again and again, and iperf3 takes its turn
between them. The cases are a gigabit, ten gigabits, and a gigabit that is 50 ms long. Needs root.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``, which is imported only now because it loads torch."""
    from cachelink_bench.link.command import main as run

    return run(argv)
