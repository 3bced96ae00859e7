"""``cachelink-bench peers``: the same cache bytes by CacheLink and by what else moves bytes.

One pair of processes for each way; ``bench/README.md`` describes the method and what each row holds.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``."""
    from cachelink_bench.peers.command import main as run

    return run(argv)


__all__ = ["main"]
