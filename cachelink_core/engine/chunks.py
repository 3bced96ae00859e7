"""Cache ↔ chunks: where capture, content space, codec and packing meet.

The sender's ``ChunkEncoder`` and the receiver's ``ChunkInstaller`` are mirror images. Both work on
one chunk at a time and never hold more than one chunk's worth of scratch memory, or, for a cache on a
device, the ring of ``staging.py``.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from cachelink_core.codec_spec import item_bytes
from cachelink_core.codecs.native import Bytes
from cachelink_core.codecs.registry import packing, tensor_codec
from cachelink_core.engine import one_pass
from cachelink_core.engine.base import Engine
from cachelink_core.engine.native_rows import NativeRows
from cachelink_core.engine.staged_chunks import (
    Arrived,
    StagedDecoder,
    StagedEncoder,
    cache_tensors,
)
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.layout import TensorSlice
from cachelink_core.manifest import Header

MOST_VIEWS: Final = 128
"""Views of one chunk above which a copy is cheaper than handling each: blocks of few tokens."""


def _in_place(rows: NativeRows | None, header: Header, block: int, run: int) -> list[memoryview]:
    """The cache's own bytes, if they are a chunk's wire bytes and not too many pieces; else none."""
    if rows is None or header.packing.id != "none":
        return []
    views = rows.views(header.layout.slices(block, run))
    return views if len(views) <= MOST_VIEWS else []


class ChunkEncoder:
    """Encodes the chunks of one handoff from the sender's cache."""

    def __init__(self, engine: Engine, header: Header, cache: PrefixCache) -> None:
        """Binds one handoff.

        Args:
            engine: of the sender's model.
            header: decides layout, space, codec and packing.
            cache: filled at least up to the blocks that are encoded.
        """
        self._engine = engine
        self._header = header
        self._cache = cache
        self._codec = tensor_codec(header.codec, header.identity.dtype, engine.kernels)
        self._packing = packing(header.packing)
        staging = engine.staging()
        self._staged = (
            None if staging is None else StagedEncoder(engine, header, cache, self._codec, staging)
        )
        self._rows = NativeRows.of(header, cache) if self._staged is None else None
        self._gathered: Bytes = np.empty(0, np.uint8)

    def place(self, block: int, run: int) -> list[memoryview]:
        """Where the wire bytes of a chunk lie, if they are the cache's own; none if not.

        The views are valid for as long as nobody writes to the cache.
        """
        return _in_place(self._rows, self._header, block, run)

    def encode(self, block: int, run: int) -> list[memoryview]:
        """Wire bytes of one chunk, as views to be joined once.

        They are valid until the next call: they may lie in a buffer that it uses again.
        """
        slices = self._header.layout.slices(block, run)
        if self._staged is not None:
            parts = [self._staged.payload(block, run)]
        elif self._rows is not None:
            parts = self._gather(self._rows, slices)
        else:
            parts = self._encoded(slices)
        return self._packing.pack(
            parts, item_bytes(self._header.codec, self._header.identity.dtype)
        )

    def _encoded(self, slices: Sequence[TensorSlice]) -> list[memoryview]:
        parts: list[memoryview] = []
        for piece in slices:
            tensor = self._cache.tensor(piece.layer, piece.kind, piece.start, piece.stop)
            if piece.kind == "K" and self._header.space == "content":
                if found := one_pass.encode_keys(self._engine, self._codec, piece, tensor):
                    parts += found
                    continue
                tensor = self._engine.to_content(piece.layer, tensor, piece.start)
            parts += self._codec.encode(tensor, piece.kind, piece.start)
        return parts

    def _gather(self, rows: NativeRows, slices: Sequence[TensorSlice]) -> list[memoryview]:
        """One part for all rows, in a buffer that stays in the processor's cache.

        Thirty views of the cache itself would save this copy, and cost more: each is hashed and
        joined by a call of its own.
        """
        raw_bytes = slices[-1].offset + slices[-1].length
        if self._gathered.nbytes < raw_bytes:
            self._gathered = np.empty(raw_bytes, np.uint8)
        payload = self._gathered[:raw_bytes]
        rows.gather(slices, payload)
        return [payload.data]


@dataclass
class InstallTimes:
    """Seconds spent so far; on a device with streams, what the host took to queue the work.

    Attributes:
        decode_s: unpacking and decoding, and the rotation where it is part of that pass.
        transform_s: putting keys back into rotated space, and the write.
        map_s: translating; 0 for a cache of the same model.
    """

    decode_s: float = 0.0
    transform_s: float = 0.0
    map_s: float = 0.0


class ChunkInstaller:
    """Decodes the chunks of one handoff into the receiver's cache."""

    def __init__(self, engine: Engine, header: Header, cache: PrefixCache) -> None:
        """Binds one handoff.

        Args:
            engine: of the receiver's model.
            header: as admitted.
            cache: allocated for the handoff's layout.
        """
        self._engine = engine
        self._header = header
        self._cache = cache
        self._codec = tensor_codec(header.codec, header.identity.dtype, engine.kernels)
        self._packing = packing(header.packing)
        self._staging = engine.staging()
        self._staged: StagedDecoder | None = None
        if self._staging is not None:
            self._staging.keep(cache_tensors(cache))
            self._staged = StagedDecoder(header, self._codec, self._staging)
        self._rows = NativeRows.of(header, cache) if self._staged is None else None
        self.times = InstallTimes()

    def install(self, block: int, run: int, payload: memoryview) -> None:
        """Decodes one verified chunk in place.

        Raises:
            CorruptChunk: the payload does not decode to what the plan declares.
            DecompressionBomb: it would decompress to more.
        """
        layout = self._header.layout
        began = time.monotonic()
        raw = self._packing.unpack(
            payload,
            layout.raw_bytes(block, run),
            item_bytes(self._header.codec, self._header.identity.dtype),
        )
        if self._rows is not None:
            self._rows.scatter(layout.slices(block, run), np.frombuffer(raw, np.uint8))
            self.times.decode_s += time.monotonic() - began
            return
        self.times.decode_s += time.monotonic() - began
        if self._staging is not None and self._staged is not None:
            arrived = self._staged.begin(layout.slices(block, run), raw)
            self._staging.run(lambda: self._write(arrived))
            self.times.decode_s += time.monotonic() - began
            return
        self._decode(layout.slices(block, run), raw)

    @torch.no_grad()
    def _write(self, arrived: Arrived) -> None:
        """What ``_decode`` does, from bytes on the device, in work that is queued there."""
        for piece, raw in arrived.pieces():
            out = self._cache.tensor(piece.layer, piece.kind, piece.start, piece.stop)
            if piece.kind == "V" or self._header.space == "rotated":
                arrived.codec.decode_from(raw, piece.kind, piece.start, out)
                continue
            content = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            arrived.codec.decode_from(raw, piece.kind, piece.start, content)
            self._engine.rotate_into(piece.layer, content, piece.start, out)

    def _decode(self, slices: Sequence[TensorSlice], raw: memoryview) -> None:
        for piece in slices:
            part = raw[piece.offset : piece.offset + piece.length]
            out = self._cache.tensor(piece.layer, piece.kind, piece.start, piece.stop)
            began = time.monotonic()
            if piece.kind == "V" or self._header.space == "rotated":
                self._codec.decode(part, piece.kind, piece.start, out)
                self.times.decode_s += time.monotonic() - began
                continue
            if one_pass.decode_keys(self._engine, self._codec, piece, part, out):
                self.times.decode_s += time.monotonic() - began
                continue
            content = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self._codec.decode(part, piece.kind, piece.start, content)
            decoded = time.monotonic()
            self._engine.rotate_into(piece.layer, content, piece.start, out)
            self.times.decode_s += decoded - began
            self.times.transform_s += time.monotonic() - decoded

    def place(self, block: int, run: int) -> Sequence[memoryview]:
        """Where the wire bytes of a chunk belong, if they are the cache's own; none if not."""
        return _in_place(self._rows, self._header, block, run)

    def finish(self) -> None:
        """Waits for what is queued and makes the installed tokens the cache's length."""
        if self._staging is not None:
            self._staging.mark().wait()
        self._cache.set_length(self._header.tokens)
