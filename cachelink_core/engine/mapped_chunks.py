"""Another model's chunks → this model's cache: collect a block, map it, rotate it, write it.

The mapped counterpart of ``chunks.ChunkInstaller``. A mapper needs all source layers of a token at
once, so chunks are decoded into one block of scratch memory, and the block is translated when its
last chunk is there. Nothing larger than that block and one receiver layer is ever held.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachelink_core.codec_spec import item_bytes
from cachelink_core.codecs.registry import packing, tensor_codec
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import InstallTimes
from cachelink_core.errors import CorruptChunk, ManifestError, UnexpectedChunk
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.layout import TensorSlice
from cachelink_core.manifest import Header
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.pairing import check_pair
from cachelink_core.transport.source_block import SourceBlock


@dataclass(slots=True)
class _OpenBlock:
    index: int
    source: SourceBlock
    missing: set[int]


class MappedInstaller:
    """Translates the chunks of one handoff into the receiver's cache.

    It outlives a broken stream: the chunks of a block that is not complete are held here alone, so
    a resumed stream must go on with the same installer.
    """

    def __init__(self, engine: Engine, header: Header, cache: PrefixCache, mapper: Mapper) -> None:
        """Binds one handoff.

        Args:
            engine: of the receiver's model.
            header: as admitted.
            cache: allocated with the receiver's geometry for the header's tokens.
            mapper: from the header's model to the receiver's.

        Raises:
            IdentityMismatch: the mapper is of other models.
            ManifestError: the keys travel rotated by the sender's RoPE, which nobody here knows.
        """
        check_pair(mapper.card, header.identity, engine.identity)
        if header.space != "content":
            raise ManifestError(f"space is {header.space!r}; a mapper reads 'content'")
        self._engine = engine
        self._header = header
        self._cache = cache
        self._mapper = mapper
        self._read = frozenset(j for fit in mapper.card.layers for j in fit.sources)
        self._codec = tensor_codec(header.codec, header.identity.dtype)
        self._packing = packing(header.packing)
        self._open: _OpenBlock | None = None
        self.times = InstallTimes()

    def install(self, block: int, run: int, payload: memoryview) -> None:
        """Decodes one verified chunk; if it completes its block, translates the block.

        Raises:
            CorruptChunk: the payload does not decode to what the plan declares, or the block or its
                translation holds NaN or infinity; the caller re-reads the prefix then.
            DecompressionBomb: it would decompress to more.
            UnexpectedChunk: another block has begun and is not complete, or the chunk is here twice.
        """
        opened = self._block(block)
        if run not in opened.missing:
            raise UnexpectedChunk(f"chunk ({block}, {run}) is in the open block already")
        began = time.monotonic()
        layout = self._header.layout
        raw = self._packing.unpack(
            payload,
            layout.raw_bytes(block, run),
            item_bytes(self._header.codec, self._header.identity.dtype),
        )
        for piece in layout.slices(block, run):
            if piece.layer in self._read:
                self._decode(piece, raw[piece.offset : piece.offset + piece.length], opened.source)
        opened.missing.remove(run)
        self.times.decode_s += time.monotonic() - began
        if not opened.missing:
            self._open = None
            self._translate(opened)

    def place(self, _block: int, _run: int) -> Sequence[memoryview]:
        """None: what travels is another model's, and is never the cache's own bytes."""
        return ()

    def finish(self) -> None:
        """Makes the installed tokens the cache's length.

        Raises:
            CorruptChunk: a block is not complete.
        """
        if self._open is not None:
            raise CorruptChunk(f"block {self._open.index} lacks runs {sorted(self._open.missing)}")
        self._cache.set_length(self._header.tokens)

    def _block(self, block: int) -> _OpenBlock:
        if self._open is None:
            start, stop = self._header.layout.block_range(block)
            runs = {run for _, run in self._header.layout.block_chunks(block)}
            self._open = _OpenBlock(block, self._mapper.open_block(start, stop - start), runs)
        if self._open.index != block:
            raise UnexpectedChunk(
                f"a chunk of block {block} came while block {self._open.index} "
                f"lacks {len(self._open.missing)}; a translated cache comes block by block"
            )
        return self._open

    def _decode(self, piece: TensorSlice, payload: memoryview, source: SourceBlock) -> None:
        geometry = self._header.identity.layers[piece.layer]
        shape = geometry.kv_heads, piece.stop - piece.start, geometry.head_dim
        tensor = torch.empty(shape, dtype=torch.float32, device=self._mapper.device)
        self._codec.decode(payload, piece.kind, piece.start, tensor)
        source.write(piece.layer, piece.kind, piece.start, tensor)

    @torch.no_grad()
    def _translate(self, opened: _OpenBlock) -> None:
        """Maps, rotates and writes, one receiver layer after the other."""
        source = opened.source
        source.check_finite()
        first_id = self._header.ids[source.start] if source.start == 0 else None
        finite = torch.ones((), dtype=torch.bool, device=self._mapper.device)
        for layer in range(len(self._cache.layers)):
            began = time.monotonic()
            keys, values = self._mapper.map_layer(layer, source, first_id)
            mapped = time.monotonic()
            for tensor in (keys, values):
                finite &= torch.isfinite(tensor).all()
            self._write(layer, keys, values, source.start)
            self.times.map_s += mapped - began
            self.times.transform_s += time.monotonic() - mapped
        if not bool(finite):
            raise CorruptChunk(f"block {opened.index}: its translation holds NaN or infinity")

    def _write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Puts one layer's content where the layer still holds those tokens."""
        stop = start + keys.shape[1]
        first = max(start, self._cache.first_token(layer))
        if first >= stop:
            return
        kept = slice(first - start, None)
        out = self._cache.tensor(layer, "K", first, stop)
        self._engine.rotate_into(layer, keys[:, kept], first, out)
        self._cache.tensor(layer, "V", first, stop).copy_(values[:, kept])
