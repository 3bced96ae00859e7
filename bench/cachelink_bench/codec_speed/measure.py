"""Times of every codec over the same blocks, in rounds in which the arms take turns.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cachelink_core.codec_spec import parse_codec
from cachelink_core.codecs.affine import AffineCodec
from cachelink_core.codecs.kernels import PLAIN, Kernels
from cachelink_core.codecs.registry import tensor_codec
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.offer import make_header
from cachelink_core.engine.spill import Spilled
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.layout import TensorSlice
from cachelink_core.manifest import Header

CODECS: Final = ("native", "native+zstd", "int8", "int4", "int4+zstd")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to encode and decode.

    Attributes:
        codec: with its packing.
        backend: eager or compiled; ``-`` where nothing is quantized.
        rope: whether removing and applying RoPE is part of it, as in a handoff.
    """

    codec: str
    backend: str
    rope: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one arm: seconds of this thread's processor time."""

    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Subject:
    """What is encoded.

    Attributes:
        name: of the subject.
        engine: of the model.
        held: its captured cache.
        block_tokens: the prefill schedule.
        blocks: that are timed; the block of the sinks is not among them.
    """

    name: str
    engine: TransformersEngine
    held: Spilled
    block_tokens: int
    blocks: range

    @property
    def native_bytes(self) -> int:
        """Of the timed blocks, in the model's dtype."""
        tokens = len(self.blocks) * self.block_tokens
        return tokens * sum(g.token_bytes(self.held.cache.dtype) for g in self.held.cache.layers)

    def header(self, codec: str) -> Header:
        """A fresh offer of the cache."""
        spec, packing = parse_codec(codec)
        ids = self.held.header.ids
        return make_header(
            self.engine, ids, spec, packing, sender_epoch="bench", block_tokens=self.block_tokens
        )


@dataclass(frozen=True)
class Work:
    """An arm made ready.

    Attributes:
        encode: encodes all timed blocks.
        decode: decodes what was encoded last.
        wire_bytes: of the timed blocks.
    """

    encode: Callable[[], None]
    decode: Callable[[], None]
    wire_bytes: int

    def run(self) -> Sample:
        """One round."""
        encode_s = _thread_s(self.encode)
        return Sample(encode_s, _thread_s(self.decode))


def arms(*, compiled: bool) -> tuple[Arm, ...]:
    """Every arm, in the order of the table."""
    backends = ("eager", "compiled") if compiled else ("eager",)
    found: list[Arm] = []
    for codec in CODECS:
        if not parse_codec(codec)[0].quantized:
            found.append(Arm(codec, "-", rope=True))
            continue
        found += [Arm(codec, backend, rope=True) for backend in backends]
        if "+" not in codec:
            found += [Arm(codec, backend, rope=False) for backend in backends]
    return tuple(found)


def prepare(subject: Subject, arm: Arm, kernels: Kernels) -> Work:
    """Makes an arm ready and runs it once.

    Args:
        subject: what is encoded.
        arm: how.
        kernels: of the compiled arms.
    """
    chosen = kernels if arm.backend == "compiled" else PLAIN
    header = subject.header(arm.codec)
    work = _handoff(subject, header, chosen) if arm.rope else _codec(subject, header, chosen)
    work.decode()
    return work


def memcpy_s(nbytes: int) -> float:
    """Seconds to copy that many bytes once, from one buffer to another that was touched before."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return _thread_s(lambda: target.copy_(source))


def _handoff(subject: Subject, header: Header, kernels: Kernels) -> Work:
    engine = subject.engine
    cache = engine.open_cache(header.tokens, 0, whole=False)
    engine.kernels = kernels
    encoder = ChunkEncoder(engine, header, subject.held.cache)
    installer = ChunkInstaller(engine, header, cache)
    engine.kernels = PLAIN
    chunks = [index for block in subject.blocks for index in header.layout.block_chunks(block)]

    # Joined outside the clock: the join is the frame's, and the views are the encoder's until then.
    wires = [memoryview(b"".join(encoder.encode(*index))) for index in chunks]

    def encode() -> None:
        for index in chunks:
            encoder.encode(*index)

    def decode() -> None:
        for index, wire in zip(chunks, wires, strict=True):
            installer.install(*index, wire)

    return Work(encode, decode, sum(wire.nbytes for wire in wires))


@dataclass(frozen=True, slots=True)
class _Piece:
    place: TensorSlice
    source: Tensor
    out: Tensor
    payload: memoryview


def _codec(subject: Subject, header: Header, kernels: Kernels) -> Work:
    """The codec alone: content-space keys are ready in memory, and decoded keys stay there."""
    codec = tensor_codec(header.codec, header.identity.dtype, kernels)
    assert isinstance(codec, AffineCodec), "only quantized codecs have arms without RoPE"
    pieces = _pieces(subject, header, codec)

    def encode() -> None:
        for piece in pieces:
            codec.encode(piece.source, piece.place.kind, piece.place.start)

    def decode() -> None:
        for piece in pieces:
            codec.decode(piece.payload, piece.place.kind, piece.place.start, piece.out)

    return Work(encode, decode, sum(piece.payload.nbytes for piece in pieces))


def _pieces(subject: Subject, header: Header, codec: AffineCodec) -> Sequence[_Piece]:
    found: list[_Piece] = []
    for block in subject.blocks:
        for index in header.layout.block_chunks(block):
            for place in header.layout.slices(*index):
                at = place.layer, place.kind, place.start, place.stop
                source = subject.held.cache.tensor(*at)
                if place.kind == "K":
                    source = subject.engine.to_content(place.layer, source, place.start)
                payload = b"".join(codec.encode(source, place.kind, place.start))
                out = torch.zeros_like(source)
                found.append(_Piece(place, source, out, memoryview(payload)))
    return found


def _thread_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
