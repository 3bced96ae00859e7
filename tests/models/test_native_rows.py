"""Native chunks as copies: the same bytes as through the codec, and only where that is allowed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cachelink_core.codec_spec import parse_codec
from cachelink_core.codecs.registry import tensor_codec
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.native_rows import NativeRows
from cachelink_core.engine.offer import make_header
from cachelink_core.layout import TensorSlice
from cachelink_core.testing.tiny_engines import tiny_engine

TOKENS, BLOCK = 41, 16


@pytest.fixture(scope="module", params=["llama", "mistral"])
def engine(request):
    return tiny_engine(request.param, dtype=torch.bfloat16)


@pytest.fixture
def cache(engine):
    filled = engine.open_cache(TOKENS, 7, whole=False)
    for layer in range(len(filled.layers)):
        for kind in ("K", "V"):
            rows = filled.tensor(layer, kind, filled.first_token(layer), filled.capacity)
            rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(layer)))
    filled.set_length(TOKENS)
    return filled


def header_of(engine, codec):
    ids = [1 + i % 90 for i in range(TOKENS)]
    return make_header(engine, ids, *parse_codec(codec), sender_epoch="e", block_tokens=BLOCK)


@pytest.mark.parametrize("codec", ["native", "native+zstd"])
def test_chunks_are_what_the_codec_makes_of_each_slice(engine, cache, codec):
    header = header_of(engine, "native")
    own = tensor_codec(header.codec, header.identity.dtype)
    target = engine.open_cache(TOKENS, 3, whole=False)
    packed = header_of(engine, codec)
    encoder, installer = ChunkEncoder(engine, packed, cache), ChunkInstaller(engine, packed, target)
    for block, run in header.layout.chunks():
        expected = b"".join(
            part
            for p in header.layout.slices(block, run)
            for part in own.encode(cache.tensor(p.layer, p.kind, p.start, p.stop), p.kind, p.start)
        )
        wire = b"".join(encoder.encode(block, run))
        assert (wire == expected) == (codec == "native")
        installer.install(block, run, memoryview(wire))
    for layer in range(len(cache.layers)):
        first = target.first_token(layer)
        for kind in ("K", "V"):
            sent, arrived = (c.tensor(layer, kind, first, TOKENS) for c in (cache, target))
            assert torch.equal(sent, arrived)


def test_rows_are_taken_only_where_the_payload_is_the_cache(engine, cache):
    assert NativeRows.of(header_of(engine, "native"), cache) is not None
    assert NativeRows.of(header_of(engine, "bf16"), cache) is not None
    assert NativeRows.of(header_of(engine, "int8"), cache) is None
    wide = tiny_engine("llama", dtype=torch.float32)
    floats = wide.open_cache(TOKENS, 0, whole=False)
    assert NativeRows.of(header_of(wide, "native"), floats) is not None
    assert NativeRows.of(header_of(wide, "bf16"), floats) is None, "it casts"


def test_positions_that_are_not_held_are_refused_and_not_cut_short(cache):
    rows = NativeRows(cache, TOKENS)
    first, end = cache.first_token(0), cache.capacity
    length = 2 * cache.layers[0].kv_heads * cache.layers[0].head_dim
    payload = np.zeros(2 * length, np.uint8)
    rows.gather((TensorSlice(0, "K", end - 1, end, 0, length),), payload)
    for start, stop in ((end - 1, end + 1), (first - 1, first + 1)):
        piece = TensorSlice(0, "K", start, stop, 0, 2 * length)
        with pytest.raises(IndexError, match="layer 0 holds positions"):
            rows.gather((piece,), payload)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_views_are_the_bytes_of_the_payload(family):
    engine = tiny_engine(family, dtype=torch.bfloat16)
    source = engine.open_cache(TOKENS, 7, whole=True)
    for layer in range(len(source.layers)):
        for kind in ("K", "V"):
            rows = source.tensor(layer, kind, 0, source.capacity)
            rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(layer)))
    header = header_of(engine, "native")
    target = engine.open_cache(TOKENS, 3, whole=False)
    encoder, installer = (
        ChunkEncoder(engine, header, source),
        ChunkInstaller(engine, header, target),
    )
    # Views that were taken while the prefill ran stay good when it ends and hides what slid past.
    source.set_length(TOKENS)
    source.use_window()
    for block, run in header.layout.chunks():
        copied = b"".join(encoder.encode(block, run))
        views = encoder.place(block, run)
        assert len(views) > 1
        assert b"".join(views) == copied
        at = 0
        for place in installer.place(block, run):
            place[:] = copied[at : at + place.nbytes]
            at += place.nbytes
        assert at == len(copied)
    for layer in range(len(source.layers)):
        first = target.first_token(layer)
        for kind in ("K", "V"):
            sent, arrived = (c.tensor(layer, kind, first, TOKENS) for c in (source, target))
            assert torch.equal(sent, arrived)
