"""Caches on disk: the same bits back, and no changed byte goes unnoticed."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from cachelink_core import limits
from cachelink_core.codec_spec import NATIVE, NO_PACKING
from cachelink_core.engine.spill import (
    FORMAT,
    load_cache,
    read_header,
    restore_cache,
    save_cache,
    verify_cache,
)
from cachelink_core.errors import ChecksumMismatch, CorruptChunk, DataLoss, ManifestError
from cachelink_core.identity import LayerGeometry, ModelIdentity
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.layout import plan_runs
from cachelink_core.manifest import Header, decode_header, encode_header, pack_ids

FULL = LayerGeometry(kv_heads=2, head_dim=8, rotary_dim=8)
SLIDING = LayerGeometry(kv_heads=2, head_dim=8, attention="sliding", window=5, rotary_dim=8)


def header_of(layers, dtype, tokens) -> bytes:
    identity = ModelIdentity("M", "0" * 64, "1" * 64, dtype, "2" * 64, "3" * 64, {}, layers, 999)
    header = Header(
        schema_version=1,
        min_reader_version=1,
        handoff_id="h",
        sender_epoch="e",
        identity=identity,
        token_ids=pack_ids(range(tokens)),
        space="rotated",
        block_tokens=limits.MIN_BLOCK_TOKENS,
        runs=plan_runs(layers, dtype, limits.MIN_BLOCK_TOKENS),
        codec=NATIVE,
        packing=NO_PACKING,
        trust="exact",
    )
    return encode_header(header)


def filled(layers, dtype, tokens, *, whole=True, headroom=3) -> PrefixCache:
    cache = PrefixCache.allocate(layers, dtype, tokens, headroom, whole=whole)
    random = torch.Generator().manual_seed(7)
    for buffer in cache.buffers:
        for tensor in (buffer.keys, buffer.values):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
    cache.set_length(tokens)
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("whole", [True, False])
def test_the_same_bits_come_back(tmp_path, dtype, tokens, whole):
    layers = (FULL, SLIDING)
    cache = filled(layers, dtype, tokens, whole=whole)
    header = header_of(layers, dtype, tokens)
    save_cache(tmp_path / "x.cache", header, cache, seal=b"seal")
    back = load_cache(tmp_path / "x.cache", headroom=9)
    assert encode_header(back.header) == header
    assert back.seal == b"seal"
    assert back.cache.length == tokens
    assert back.cache.capacity == tokens + 9
    for layer in range(2):
        first = cache.first_token(layer)
        assert back.cache.first_token(layer) == first
        for kind in "KV":
            ours = cache.tensor(layer, kind, first, tokens)
            assert torch.equal(ours, back.cache.tensor(layer, kind, first, tokens))
    assert read_header(tmp_path / "x.cache") == back.header


def test_an_answer_behind_the_prefix_is_not_written(tmp_path):
    cache = filled((FULL,), "float32", 10)
    save_cache(tmp_path / "x.cache", header_of((FULL,), "float32", 6), cache)
    back = load_cache(tmp_path / "x.cache", headroom=0)
    assert back.cache.length == 6
    assert torch.equal(back.cache.tensor(0, "K", 0, 6), cache.tensor(0, "K", 0, 6))
    assert back.seal == b""


def test_verify_lists_every_tensor(tmp_path):
    path = tmp_path / "x.cache"
    save_cache(
        path, header_of((FULL, SLIDING), "bfloat16", 8), filled((FULL, SLIDING), "bfloat16", 8)
    )
    header, tensors = verify_cache(path)
    assert header.tokens == 8
    by_name = {tensor.name: tensor for tensor in tensors}
    assert set(by_name) == {"manifest.header", *(f"layer.{i}.{k}" for i in (0, 1) for k in "KV")}
    assert by_name["layer.1.V"].shape == (2, 8, 8)
    assert by_name["layer.1.V"].dtype == "bfloat16"
    assert by_name["layer.1.V"].nbytes == 2 * 8 * 8 * 2


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.cache"
    save_cache(path, header_of((FULL,), "float32", 6), filled((FULL,), "float32", 6), b"seal")
    return path


def test_no_flipped_bit_goes_unnoticed(path):
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises((DataLoss, ManifestError)):
            verify_cache(path)
        with pytest.raises((DataLoss, ManifestError)):
            load_cache(path, headroom=0)


def test_a_flipped_bit_of_a_tensor_is_named(path):
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ChecksumMismatch, match=r"tensor '.*': digest is [0-9a-f]{64}, written was"):
        load_cache(path, headroom=0)


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1])
def test_a_file_cut_short_is_corrupt(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptChunk, match=r"x\.cache"):
        load_cache(path, headroom=0)


def rewrite(path, change, metadata=None):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as reader:
        stated = reader.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, stated | (metadata or {}))


def test_a_missing_tensor_is_named(path):
    rewrite(path, lambda tensors: tensors.pop("layer.0.V"))
    for read in (verify_cache, lambda p: load_cache(p, headroom=0)):
        with pytest.raises(CorruptChunk, match=r"'layer\.0\.V' is missing"):
            read(path)


def test_a_tensor_of_another_shape_is_refused_before_it_is_read(path):
    rewrite(path, lambda tensors: tensors.update({"layer.0.V": torch.zeros(2, 5, 8)}))
    with pytest.raises(
        CorruptChunk, match=r"'layer\.0\.V' is \('F32', \[2, 5, 8\]\); .*\[2, 6, 8\]"
    ):
        load_cache(path, headroom=0)


def test_a_tensor_of_another_dtype_is_refused(path):
    rewrite(path, lambda t: t.update({"layer.0.K": t["layer.0.K"].to(torch.bfloat16)}))
    with pytest.raises(CorruptChunk, match=r"'BF16'.*'F32'"):
        verify_cache(path)


def test_a_tensor_without_a_digest_is_refused(path):
    rewrite(path, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(CorruptChunk, match="'extra' is missing, or has no digest"):
        load_cache(path, headroom=0)


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_is_read_into_a_cache_that_is_there(tmp_path, whole):
    layers = (FULL, SLIDING)
    saved = filled(layers, "bfloat16", 38, whole=whole)
    header = header_of(layers, "bfloat16", 38)
    save_cache(tmp_path / "x.cache", header, saved)
    cache = PrefixCache.allocate(layers, "bfloat16", 38, 9, whole=True)
    restore_cache(tmp_path / "x.cache", decode_header(header), cache)
    assert (cache.length, cache.capacity) == (38, 47)
    for layer, geometry in enumerate(layers):
        for kind in "KV":
            place = layer, kind, geometry.first_token(38), 38
            assert torch.equal(cache.tensor(*place), saved.tensor(*place))


def test_a_file_of_another_prefix_or_with_a_changed_byte_leaves_the_cache_empty(path):
    cache = PrefixCache.allocate((FULL,), "float32", 6, 0, whole=True)
    held = read_header(path)
    for field, value in (("token_ids", pack_ids(range(1, 7))), ("block_tokens", 64)):
        with pytest.raises(CorruptChunk, match=f"its {field} is .*; wanted is"):
            restore_cache(path, msgspec.structs.replace(held, **{field: value}), cache)
    data = path.read_bytes()
    path.write_bytes(data.replace(rows_of(path), bytes(len(rows_of(path)))))
    with pytest.raises(ChecksumMismatch, match=r"layer\.0\.V"):
        restore_cache(path, held, cache)
    assert cache.length == 0


def rows_of(path) -> bytes:
    """The bytes of the last tensor of the cache."""
    values = load_file(path)["layer.0.V"]
    return values.numpy().tobytes()


def test_saving_takes_memory_for_one_tensor_not_for_a_second_cache(tmp_path):
    layers = (FULL,) * 40
    cache = filled(layers, "float32", 1000)
    header = header_of(layers, "float32", 1000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        save_cache(tmp_path / "x.cache", header, cache)
    held, most = 0, 0
    for event in taken.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    one = cache.tensor(0, "K", 0, 1000).nbytes
    assert 0 < most <= 2 * one


def test_another_file_is_not_a_cache(path):
    rewrite(path, lambda tensors: None, {"format": "other"})
    with pytest.raises(CorruptChunk, match=f"'other'; this version reads '{FORMAT}'"):
        load_cache(path, headroom=0)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.cache"):
        load_cache(tmp_path / "none.cache", headroom=0)


def test_a_header_of_another_cache_is_refused(tmp_path):
    cache = filled((FULL,), "float32", 6)
    for header, field in [
        (header_of((FULL,), "bfloat16", 6), "dtype"),
        (header_of((SLIDING,), "float32", 6), "layers"),
        (header_of((FULL,), "float32", 7), "token_ids has 7; the cache holds 6"),
    ]:
        with pytest.raises(ManifestError, match=field):
            save_cache(tmp_path / "x.cache", header, cache)
    assert list(tmp_path.iterdir()) == []


def test_a_window_of_other_tokens_is_refused(tmp_path):
    cache = filled((SLIDING,), "float32", 40, whole=False)
    with pytest.raises(ManifestError, match=r"positions from \[36\]"):
        save_cache(tmp_path / "x.cache", header_of((SLIDING,), "float32", 38), cache)


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()
    written = []

    def raw(tensor):
        written.append(tensor)
        if len(written) > 4:  # three tensors are digested, one of them is written
            raise OSError(28, "no space left on device")
        return bytes(tensor.reshape(-1).view(torch.uint8).tolist())

    monkeypatch.setattr("cachelink_core.engine.spill._raw", raw)
    with pytest.raises(OSError, match="no space"):
        save_cache(path, header_of((FULL,), "float32", 6), filled((FULL,), "float32", 6))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
