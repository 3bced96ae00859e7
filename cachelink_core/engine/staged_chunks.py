"""Chunks of a cache that lies on a device: gathered, encoded and downloaded, or uploaded and decoded.

The counterparts of ``chunks.py`` for a ``Staging``. What the host can check it checks on the host's
bytes, before they are used; everything else is queued.

Axes: H KV heads, T tokens, D head dim, B bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cachelink_core.codecs.base import TensorCodec
from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.base import Engine
from cachelink_core.engine.staging import Download, Staging
from cachelink_core.errors import CorruptChunk, InvalidRequest
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.layout import TensorSlice
from cachelink_core.manifest import Header


@dataclass(frozen=True, slots=True)
class _Begun:
    """A chunk whose download has begun."""

    block: int
    run: int
    download: Download


class StagedEncoder:
    """Raw payloads of one handoff's chunks, downloaded a few ahead of the one that is asked for.

    Never into the next block: that may not be prefilled. So a block's download overlaps the
    prefill of the block behind it, and the copy of a chunk the encoding of the next.
    """

    def __init__(
        self,
        engine: Engine,
        header: Header,
        cache: PrefixCache,
        codec: TensorCodec,
        staging: Staging,
    ) -> None:
        """Binds one handoff.

        Args:
            engine: of the sender's model.
            header: decides layout and space.
            cache: on the staging's device.
            codec: of the header.
            staging: for this handoff alone.
        """
        self._engine = engine
        self._header = header
        self._cache = cache
        self._codec = codec
        self._staging = staging
        self._begun: deque[_Begun] = deque()
        staging.keep(cache_tensors(cache))

    def payload(self, block: int, run: int) -> memoryview:
        """The payload of one chunk before packing; valid until the next call.

        Raises:
            InvalidRequest: the codec cannot carry what the cache holds.
        """
        if not self._begun or (self._begun[0].block, self._begun[0].run) != (block, run):
            self._begun.clear()  # a stream that went on elsewhere
        self._begin_from(block, run)
        raw = self._begun.popleft().download.wait()
        self._check(self._header.layout.slices(block, run), raw)
        return raw.data

    def _begin_from(self, block: int, run: int) -> None:
        """Begins downloads from one chunk to the end of its block, as many as may be under way."""
        chunks = self._header.layout.block_chunks(block)
        first = chunks.index((block, run)) + len(self._begun)
        last = first + self._staging.chunks_ahead - len(self._begun)
        for index in chunks[first:last]:
            slices = self._header.layout.slices(*index)
            nbytes = slices[-1].offset + slices[-1].length
            download = self._staging.download(nbytes, lambda made=slices: self._made(made))  # type: ignore[misc]
            self._begun.append(_Begun(*index, download))

    @torch.no_grad()
    def _made(self, slices: Sequence[TensorSlice]) -> list[Tensor]:
        parts: list[Tensor] = []
        for piece in slices:
            tensor = self._cache.tensor(piece.layer, piece.kind, piece.start, piece.stop)
            if piece.kind == "K" and self._header.space == "content":
                tensor = self._engine.to_content(piece.layer, tensor, piece.start)
            parts += self._codec.encode_parts(tensor, piece.kind, piece.start)
        return parts

    def _check(self, slices: Sequence[TensorSlice], raw: Bytes) -> None:
        for piece in slices:
            layer = self._header.identity.layers[piece.layer]
            shape = layer.kv_heads, piece.stop - piece.start, layer.head_dim
            part = raw[piece.offset : piece.offset + piece.length].data
            if fault := self._codec.fault(part, piece.kind, piece.start, shape):
                raise InvalidRequest(
                    f"codec {self._header.codec.id} cannot carry layer {piece.layer} {piece.kind} "
                    f"at position {piece.start}: {fault}; codec native can"
                )


class StagedDecoder:
    """Decodes the payloads of one handoff's chunks on the device, into tensors that a caller names."""

    def __init__(self, header: Header, codec: TensorCodec, staging: Staging) -> None:
        """Binds one handoff.

        Args:
            header: as admitted.
            codec: of the header.
            staging: for this handoff alone.
        """
        self._header = header
        self._codec = codec
        self._staging = staging

    def begin(self, slices: Sequence[TensorSlice], raw: memoryview) -> Arrived:
        """Checks a payload and begins its upload; ``raw`` may change as soon as this returns.

        Raises:
            CorruptChunk: it cannot be what it claims.
        """
        data: Bytes = np.frombuffer(raw, np.uint8)
        for piece in slices:
            layer = self._header.identity.layers[piece.layer]
            shape = layer.kv_heads, piece.stop - piece.start, layer.head_dim
            part = data[piece.offset : piece.offset + piece.length].data
            if fault := self._codec.fault(part, piece.kind, piece.start, shape):
                raise CorruptChunk(
                    f"layer {piece.layer}, {piece.kind} slice at position {piece.start}: {fault}"
                )
        upload = self._staging.upload(data)
        return Arrived(tuple(slices), upload.tensor, self._codec)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A checked payload on its way to the device."""

    slices: tuple[TensorSlice, ...]
    whole: Callable[[], Tensor]
    codec: TensorCodec

    def pieces(self) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Each slice with its bytes ``[B]``; inside work that ``Staging.run`` was given."""
        whole = self.whole()
        for piece in self.slices:
            yield piece, whole[piece.offset : piece.offset + piece.length]


def cache_tensors(cache: PrefixCache) -> Iterator[Tensor]:
    """Every buffer of a cache."""
    for buffer in cache.buffers:
        yield buffer.keys
        yield buffer.values
