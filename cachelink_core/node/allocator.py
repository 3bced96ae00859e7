"""How a daemon's process keeps memory that was freed.

glibc gives nearly every thread a pool of its own and keeps what is freed in it. A handoff works in
threads that come and go, so that a few megabytes of scratch memory end up in each of many pools: a
receiver that translates took 73 MB beside its caches for a working set of 40 MB (``cachelink-bench
memory``).
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

ARENAS: Final = 2
"""Pools of one process: Python's main thread, and everybody else."""

_M_ARENA_MAX: Final = -8
"""Of ``malloc.h``."""


def limit_arenas() -> bool:
    """Limits glibc to ``ARENAS`` pools; to be called before threads start.

    Does nothing where the operator set ``MALLOC_ARENA_MAX``, or where the C library has no such option.

    Returns:
        Whether the limit holds now.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, ARENAS))


__all__ = ["ARENAS", "limit_arenas"]
