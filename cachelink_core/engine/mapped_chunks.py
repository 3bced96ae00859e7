"""Another model's chunks → this model's cache: collect a block, map it, rotate it, write it.

The mapped counterpart of ``chunks.ChunkInstaller``. A mapper needs all source layers of a token at
once, so chunks are decoded into one block of scratch memory, and the block is translated when its
last chunk is there. Nothing larger than that block and one receiver layer is ever held; on a device
with streams two blocks, since the next one is collected while the host waits for the last one's check.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachelink_core.codec_spec import item_bytes
from cachelink_core.codecs.registry import packing, tensor_codec
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import InstallTimes
from cachelink_core.engine.staged_chunks import Arrived, StagedDecoder, cache_tensors
from cachelink_core.engine.staging import Download, Staging
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
    start: int
    stop: int
    missing: set[int]
    source: SourceBlock | None = None
    finite: Tensor | None = None


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
        self._staging = engine.staging()
        self._staged: StagedDecoder | None = None
        if self._staging is not None:
            self._staging.keep(cache_tensors(cache))
            self._staged = StagedDecoder(header, self._codec, self._staging)
        self._unchecked: deque[tuple[_OpenBlock, Download]] = deque()
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
        read = [piece for piece in layout.slices(block, run) if piece.layer in self._read]
        if self._staging is None or self._staged is None:
            for piece in read:
                self._decode(piece, raw[piece.offset : piece.offset + piece.length], opened)
        elif read:
            arrived = self._staged.begin(read, raw)
            self._staging.run(lambda: self._collect(arrived, opened))
        opened.missing.remove(run)
        self.times.decode_s += time.monotonic() - began
        if not opened.missing:
            self._open = None
            if self._staging is None:
                self._source(opened).check_finite()
                opened.finite = torch.ones((), dtype=torch.bool, device=self._mapper.device)
                self._translate(opened)
                self._check(opened, finite=bool(opened.finite))
            else:
                self._queue(self._staging, opened)

    def place(self, _block: int, _run: int) -> Sequence[memoryview]:
        """None: what travels is another model's, and is never the cache's own bytes."""
        return ()

    def finish(self) -> None:
        """Waits for what is queued and makes the installed tokens the cache's length.

        Raises:
            CorruptChunk: a block is not complete, or holds NaN or infinity.
        """
        self._check_all_but(0)
        if self._open is not None:
            raise CorruptChunk(f"block {self._open.index} lacks runs {sorted(self._open.missing)}")
        self._cache.set_length(self._header.tokens)

    def _block(self, block: int) -> _OpenBlock:
        if self._open is None:
            start, stop = self._header.layout.block_range(block)
            runs = {run for _, run in self._header.layout.block_chunks(block)}
            self._open = _OpenBlock(block, start, stop, runs)
        if self._open.index != block:
            raise UnexpectedChunk(
                f"a chunk of block {block} came while block {self._open.index} "
                f"lacks {len(self._open.missing)}; a translated cache comes block by block"
            )
        return self._open

    def _source(self, opened: _OpenBlock) -> SourceBlock:
        """The block's memory, allocated when its first chunk is decoded, and where that happens."""
        if opened.source is None:
            opened.source = self._mapper.open_block(opened.start, opened.stop - opened.start)
        return opened.source

    def _decode(self, piece: TensorSlice, payload: memoryview, opened: _OpenBlock) -> None:
        tensor = self._empty(piece)
        self._codec.decode(payload, piece.kind, piece.start, tensor)
        self._source(opened).write(piece.layer, piece.kind, piece.start, tensor)

    @torch.no_grad()
    def _collect(self, arrived: Arrived, opened: _OpenBlock) -> None:
        """What ``_decode`` does, from bytes on the device, in work that is queued there."""
        for piece, raw in arrived.pieces():
            tensor = self._empty(piece)
            self._codec.decode_from(raw, piece.kind, piece.start, tensor)
            self._source(opened).write(piece.layer, piece.kind, piece.start, tensor)

    def _empty(self, piece: TensorSlice) -> Tensor:
        geometry = self._header.identity.layers[piece.layer]
        shape = geometry.kv_heads, piece.stop - piece.start, geometry.head_dim
        return torch.empty(shape, dtype=torch.float32, device=self._mapper.device)

    def _queue(self, staging: Staging, opened: _OpenBlock) -> None:
        """Has a complete block translated, and checks the one before it meanwhile."""
        staging.run(lambda: self._translate(opened))
        verdict = staging.download(1, lambda: [_flag(opened.finite)])
        self._unchecked.append((opened, verdict))
        self._check_all_but(staging.blocks_ahead)

    def _check_all_but(self, blocks: int) -> None:
        while len(self._unchecked) > blocks:
            opened, verdict = self._unchecked.popleft()
            self._check(opened, finite=bool(verdict.wait()[0]))

    def _check(self, opened: _OpenBlock, *, finite: bool) -> None:
        if not finite:
            self._source(opened).check_finite()
            raise CorruptChunk(f"block {opened.index}: its translation holds NaN or infinity")
        opened.source = None

    @torch.no_grad()
    def _translate(self, opened: _OpenBlock) -> None:
        """Maps, rotates and writes, one receiver layer after the other."""
        source = self._source(opened)
        first_id = self._header.ids[source.start] if source.start == 0 else None
        finite = source.finite() if opened.finite is None else opened.finite
        for layer in range(len(self._cache.layers)):
            began = time.monotonic()
            keys, values = self._mapper.map_layer(layer, source, first_id)
            mapped = time.monotonic()
            for tensor in (keys, values):
                finite &= torch.isfinite(tensor).all()
            self._write(layer, keys, values, source.start)
            self.times.map_s += mapped - began
            self.times.transform_s += time.monotonic() - mapped
        opened.finite = finite

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


def _flag(finite: Tensor | None) -> Tensor:
    assert finite is not None, "the block was translated before"
    return finite.view(1).view(torch.uint8)
