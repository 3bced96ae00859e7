"""``cachelink-bench codec-speed``: do the codecs keep up with the link, eager and compiled?

Whole chunks of a captured cache are encoded and installed as in a handoff, one core, one thread:
``ChunkEncoder`` and ``ChunkInstaller`` with digests and wire left out. ``bench/README.md`` has the
method.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see ``command.py``, which is imported only now because it loads torch."""
    from cachelink_bench.codec_speed.command import main as run

    return run(argv)
