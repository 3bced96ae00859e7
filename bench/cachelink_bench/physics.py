"""What one core of this machine can do at best: the ceiling that every other number stands under."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from xxhash import xxh3_128

ROUNDS: Final = 7
_PIECE_BYTES: Final = 1 << 20
_PIECES: Final = 64


def best_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of this thread that ``work`` takes, best of some rounds after a warm-up.

    Thread time, so that other processes do not count; the best, because everything that disturbs
    a run makes it slower.
    """
    work()
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best


def physics() -> dict[str, float]:
    """GB/s on one core: a copy between buffers that lie in memory already, and a digest.

    Both run over 64 MiB in pieces of 1 MiB, the size of a chunk. The copy reads and writes main
    memory; the digest reads it.
    """
    source = np.ones(_PIECES * _PIECE_BYTES, np.uint8)
    target = np.zeros_like(source)
    pieces = range(0, source.nbytes, _PIECE_BYTES)

    def copy() -> None:
        for at in pieces:
            target[at : at + _PIECE_BYTES] = source[at : at + _PIECE_BYTES]

    def hash_all() -> None:
        for at in pieces:
            xxh3_128(source[at : at + _PIECE_BYTES].data).digest()

    return {
        "memcpy_gb_per_s": source.nbytes / best_s(copy) / 1e9,
        "xxh3_128_gb_per_s": source.nbytes / best_s(hash_all) / 1e9,
    }
