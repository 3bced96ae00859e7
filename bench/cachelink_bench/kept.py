"""Where benchmarks keep what is dear to make again: captured caches, models of random weights."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def bench_folder() -> Path:
    """In the user's cache folder."""
    return Path(platformdirs.user_cache_dir("cachelink")) / "bench"
