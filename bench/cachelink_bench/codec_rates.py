"""How fast codecs and packings run on one subject's cache, beside a copy of the same bytes.

All rates are GB of the cache in the model's own dtype a second, best of several rounds in process
time of this thread. Content-space keys are ready in memory: removing and applying RoPE is the
engine's work, not the codec's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cachelink_bench.codec_quality import Subject
from cachelink_bench.codec_treatments import Handover
from cachelink_core.codec_spec import ITEM_BYTES, item_bytes
from cachelink_core.codecs.registry import packing, tensor_codec
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.layout import TensorSlice
from cachelink_core.manifest import Header

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Speed:
    """GB/s of the cache's own bytes."""

    encode: float
    decode: float
    pack: float
    unpack: float


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice of a chunk, its source, and a place to decode into."""

    place: TensorSlice
    source: Tensor
    out: Tensor


Chunk = tuple[Piece, ...]


def measure_speed(
    engine: TransformersEngine, subject: Subject, handover: Handover, blocks: tuple[int, ...]
) -> Speed:
    """Times one codec and packing, chunk by chunk, over the given blocks."""
    header = handover.header(engine, subject)
    chunks = _chunks(engine, subject, header, blocks)
    native = ITEM_BYTES[subject.native.dtype] * sum(p.source.numel() for c in chunks for p in c)
    coder = tensor_codec(header.codec, subject.native.dtype)
    wrapper = packing(header.packing)
    width = item_bytes(header.codec, subject.native.dtype)

    def encode(chunk: Chunk) -> list[memoryview]:
        return [part for p in chunk for part in coder.encode(p.source, p.place.kind, p.place.start)]

    def decode() -> None:
        for chunk, payload in zip(chunks, raw, strict=True):
            for p in chunk:
                own = payload[p.place.offset : p.place.offset + p.place.length]
                coder.decode(own, p.place.kind, p.place.start, p.out)

    encoded = [encode(chunk) for chunk in chunks]
    raw = [memoryview(b"".join(parts)) for parts in encoded]
    wire = [memoryview(b"".join(wrapper.pack(parts, width))) for parts in encoded]
    seconds = (
        _best_s(lambda: [b"".join(encode(chunk)) for chunk in chunks]),
        _best_s(decode),
        _best_s(lambda: [b"".join(wrapper.pack(parts, width)) for parts in encoded]),
        _best_s(
            lambda: [
                wrapper.unpack(packed, payload.nbytes, width)
                for packed, payload in zip(wire, raw, strict=True)
            ]
        ),
    )
    return Speed(*(native / value / 1e9 for value in seconds))


def memcpy_rate() -> float:
    """GB/s of copying 64 MiB, in pieces of a chunk's size into memory that is mapped already."""
    piece = 1 << 20
    source = np.ones(piece, np.uint8)
    target = np.ones(64 * piece, np.uint8)

    def copy() -> None:
        for at in range(0, target.nbytes, piece):
            target[at : at + piece] = source

    return target.nbytes / _best_s(copy) / 1e9


def _chunks(
    engine: TransformersEngine, subject: Subject, header: Header, blocks: tuple[int, ...]
) -> list[Chunk]:
    found: list[Chunk] = []
    for block in blocks:
        for index in header.layout.block_chunks(block):
            pieces: list[Piece] = []
            for place in header.layout.slices(*index):
                source = subject.native.tensor(place.layer, place.kind, place.start, place.stop)
                if place.kind == "K" and header.space == "content":
                    source = engine.to_content(place.layer, source, place.start)
                pieces.append(Piece(place, source, torch.zeros_like(source)))
            found.append(tuple(pieces))
    return found


def _best_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best
