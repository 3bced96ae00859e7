"""Packing ``zstd``: byte planes for floating-point payloads, plain zstd for codes.

Wire bytes: one escape byte, then

- 0, stored: the payload;
- 1, whole: one zstd frame of the payload;
- 2, planes: for each plane a u32, the bytes of its zstd frame or 0 for a plane that is stored;
  then the planes in order (``planes.py``).

Every frame states its content size, which must be what the plan says before anything is
decompressed. A payload that does not shrink is stored, so the wire is at most one byte longer.

Exponents of a KV cache are a skewed alphabet without repetitions worth the name. zstd's defaults
spend most of their time on short matches that cost more bits than the literals they replace, and
share one literal table over 128 KiB, that is over several tensors. At level 1 we therefore make
matches rare and end a block every 16 KiB: smaller (0.673 instead of 0.687 of a bf16 cache of
SmolLM2) and twice as fast. The frames are standard zstd.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard

from cachelink_core.codec_spec import PackingSpec
from cachelink_core.codecs.base import Packing
from cachelink_core.codecs.native import Bytes
from cachelink_core.codecs.planes import ITEM_TYPES, join_planes, split_planes
from cachelink_core.errors import CorruptChunk, DecompressionBomb
from cachelink_core.limits import KIB

STORED, WHOLE, PLANES = b"\x00", b"\x01", b"\x02"
"""Escape bytes."""

BLOCK_BYTES: Final = 16 * KIB
"""Bytes that share one table of literals: small enough to fit one head of one tensor."""

PROBE_BYTES: Final = 16 * KIB
"""Sample that decides whether a plane or payload is worth packing."""

WORTHWHILE: Final = 0.98
"""A sample that does not shrink below this share is noise: not worth the time at both ends."""


class ZstdPacking(Packing):
    """Packs with zstd. A compressor is made for each call: they may not be shared by threads."""

    def __init__(self, spec: PackingSpec) -> None:
        super().__init__(spec)
        level = max(1, spec.level)
        if level == 1:
            self._parameters = zstandard.ZstdCompressionParameters.from_level(
                1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7
            )
        else:
            self._parameters = zstandard.ZstdCompressionParameters.from_level(level)

    def pack(self, parts: Sequence[memoryview], item_bytes: int) -> list[memoryview]:
        """Packs the parts as one payload; where that saves nothing, they are sent as they are."""
        total = sum(part.nbytes for part in parts)
        if not total:
            return [memoryview(STORED)]
        raw = np.frombuffer(b"".join(parts), np.uint8)
        if item_bytes in ITEM_TYPES and total % item_bytes == 0:
            packed = self._pack_planes(split_planes(raw, item_bytes))
        else:
            frame = self._compress(raw)
            packed = [memoryview(WHOLE), memoryview(frame)] if frame else []
        if packed and sum(part.nbytes for part in packed) <= total:
            return packed
        return [memoryview(STORED), *parts]

    def unpack(self, wire: memoryview, raw_bytes: int, item_bytes: int) -> memoryview:
        """Unpacks; sizes are compared with the plan before memory is taken."""
        if not wire.nbytes:
            raise CorruptChunk("a chunk packed with zstd has no escape byte")
        form, body = bytes(wire[:1]), wire[1:]
        if form == STORED:
            if body.nbytes != raw_bytes:
                raise _wrong_size("stored payload", body.nbytes, raw_bytes)
            return body
        if form == WHOLE:
            return memoryview(_decompress(body, raw_bytes))
        if form == PLANES and item_bytes in ITEM_TYPES and raw_bytes % item_bytes == 0:
            return _unpack_planes(body, raw_bytes, item_bytes).data
        raise CorruptChunk(
            f"escape byte {form[0]} does not fit a payload of {raw_bytes} bytes in items of "
            f"{item_bytes}"
        )

    def _pack_planes(self, planes: Sequence[Bytes]) -> list[memoryview]:
        frames = [self._compress(plane) for plane in planes]
        if not any(frames):
            return []
        sizes = struct.pack(f"<{len(planes)}I", *(len(frame) for frame in frames))
        bodies = [
            memoryview(frame) if frame else plane.data
            for frame, plane in zip(frames, planes, strict=True)
        ]
        return [memoryview(PLANES), memoryview(sizes), *bodies]

    def _compress(self, raw: Bytes) -> bytes:
        """One frame with its content size, or nothing if the bytes are not worth packing."""
        if raw.nbytes >= 4 * PROBE_BYTES:
            middle = raw.nbytes // 2
            probe = raw[middle : middle + PROBE_BYTES]
            if len(self._frame(probe)) > WORTHWHILE * probe.nbytes:
                return b""
        frame = self._frame(raw)
        return frame if len(frame) < raw.nbytes else b""

    def _frame(self, raw: Bytes) -> bytes:
        compressor = zstandard.ZstdCompressor(compression_params=self._parameters)
        if self.spec.level > 1:
            return compressor.compress(raw.data)
        stream = compressor.compressobj(size=raw.nbytes)
        pieces: list[bytes] = []
        for at in range(0, raw.nbytes, BLOCK_BYTES):
            pieces.append(stream.compress(raw[at : at + BLOCK_BYTES].data))
            if at + BLOCK_BYTES < raw.nbytes:
                pieces.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        pieces.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        return b"".join(pieces)


def _unpack_planes(body: memoryview, raw_bytes: int, item_bytes: int) -> Bytes:
    head = 4 * item_bytes
    if body.nbytes < head:
        raise CorruptChunk(f"the plane sizes need {head} bytes; {body.nbytes} are there")
    sizes = struct.unpack(f"<{item_bytes}I", body[:head])
    plane_bytes = raw_bytes // item_bytes
    lengths = [size or plane_bytes for size in sizes]
    if head + sum(lengths) != body.nbytes:
        raise CorruptChunk(
            f"the planes take {head + sum(lengths)} bytes; the chunk has {body.nbytes}"
        )
    planes: list[Bytes] = []
    at = head
    for size, length in zip(sizes, lengths, strict=True):
        piece = body[at : at + length]
        planes.append(np.frombuffer(_decompress(piece, plane_bytes) if size else piece, np.uint8))
        at += length
    return join_planes(planes, item_bytes)


def _decompress(frame: memoryview, expected: int) -> bytes:
    """Decompresses one frame that must hold exactly ``expected`` bytes.

    Raises:
        DecompressionBomb: it claims or holds more.
        CorruptChunk: it claims or holds less, says nothing, or is no frame.
    """
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        if claimed == zstandard.CONTENTSIZE_UNKNOWN:
            raise CorruptChunk("a zstd frame does not state its content size")
        if claimed != expected:
            raise _wrong_size("zstd frame", claimed, expected)
        # The output buffer has the claimed size, and zstd fails rather than go beyond it.
        plain = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptChunk(f"a zstd frame of {frame.nbytes} bytes is malformed: {error}") from error
    if len(plain) != expected:
        raise _wrong_size("zstd frame", len(plain), expected)
    return plain


def _wrong_size(what: str, found: int, expected: int) -> CorruptChunk | DecompressionBomb:
    kind = DecompressionBomb if found > expected else CorruptChunk
    return kind(f"{what} has {found} bytes; the chunk holds {expected}")
