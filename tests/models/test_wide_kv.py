"""The wide-KV model: as wide as it says, as hard to pack as a trained model's cache, and linear."""

from __future__ import annotations

import pytest
import torch

from cachelink_core.codec_spec import parse_codec
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.bytes_only import ATTENDED, MARK, is_bytes_only
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.errors import UnsupportedModel
from cachelink_core.testing.tiny_engines import tiny_engine
from cachelink_core.testing.wide_kv import WIDE, WideShape, wide_kv_folder, wide_model

TOKENS = 300
SMALL = WideShape(layers=3, kv_heads=2, head_dim=32, hidden=64, attended=20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    return load_engine(str(wide_kv_folder(folder, WIDE)), device="cpu", cache_dir=folder / "cache")


@pytest.fixture(scope="module")
def cache(engine):
    return filled(engine, ids_of(TOKENS))


def ids_of(tokens: int) -> list[int]:
    return [4 + (17 * i * i + 5 * i) % 250 for i in range(tokens)]


def filled(engine, ids, block_tokens: int = 256):
    cache = engine.open_cache(len(ids), 8, whole=True)
    engine.prefill(cache, ids, block_tokens)
    return cache


def rows(cache, layer: int, kind: str, start: int = 0) -> torch.Tensor:
    return cache.tensor(layer, kind, start, cache.length).float()


def test_a_token_has_the_bytes_of_a_large_model(engine):
    assert engine.identity.token_bytes() == WIDE.token_bytes == 131_072
    assert engine.identity.max_positions == 32_768
    assert engine.bytes_only
    assert not tiny_engine("llama").bytes_only


def test_the_same_shape_is_the_same_model_and_another_seed_is_not(tmp_path):
    def identity(root, shape):
        return load_engine(
            str(wide_kv_folder(tmp_path / root, shape)),
            device="cpu",
            cache_dir=tmp_path / "cache",
        ).identity

    assert identity("a", SMALL) == identity("b", SMALL)
    other = WideShape(layers=3, kv_heads=2, head_dim=32, hidden=64, attended=20, seed=1)
    assert identity("a", other).weights_digest != identity("a", SMALL).weights_digest


def test_what_is_attended_to_is_part_of_the_identity(tmp_path):
    digests = set()
    for attended in (20, 21):
        shape = WideShape(layers=1, kv_heads=1, head_dim=16, hidden=32, attended=attended)
        folder = wide_kv_folder(tmp_path, shape)
        engine = load_engine(str(folder), device="cpu", cache_dir=tmp_path / "cache")
        digests.add(engine.identity.config_digest)
    assert len(digests) == 2


def test_channels_differ_in_mean_and_scale_and_tokens_differ(engine, cache):
    for layer in (0, 15, 31):
        keys = engine.to_content(layer, cache.tensor(layer, "K", 0, TOKENS), 0)
        means, scales = keys.mean(1), keys.std(1)
        assert scales.max() > 8 * scales.median()
        assert means.abs().max() > 8 * means.abs().median()
        values = rows(cache, layer, "V")
        assert values.std(1).max() > 3 * values.std(1).median()
        assert scales.min() > 0  # no channel is constant
        again = [i for i, token in enumerate(ids_of(TOKENS)) if token == ids_of(TOKENS)[9]][1:]
        assert again  # an equal token further on has other keys, but in the first layer
        assert layer == 0 or not torch.equal(keys[:, 9], keys[:, again[0]])


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [("native+zstd", 0.6, 0.8), ("int8", 0.5, 0.56), ("int4", 0.25, 0.32)],
)
def test_it_packs_and_quantizes_like_a_real_cache(engine, cache, codec, least, most):
    spec, packing = parse_codec(codec)
    header = make_header(engine, ids_of(TOKENS), spec, packing, sender_epoch=mint_id())
    encoder = ChunkEncoder(engine, header, cache)
    arrived = engine.open_cache(TOKENS, 0, whole=False)
    installer = ChunkInstaller(engine, header, arrived)
    wire_bytes = 0
    for block, run in header.layout.chunks():
        wire = b"".join(encoder.encode(block, run))
        wire_bytes += len(wire)
        installer.install(block, run, memoryview(wire))
    installer.finish()
    arrived.set_length(TOKENS)
    assert least < wire_bytes / header.layout.native_bytes < most
    steps = {"int8": 255, "int4": 15}.get(codec, 0)
    for layer in (0, 31):
        content, theirs = (
            engine.to_content(layer, c.tensor(layer, "K", 0, TOKENS), 0) for c in (cache, arrived)
        )
        for sent, got in ((content, theirs), (rows(cache, layer, "V"), rows(arrived, layer, "V"))):
            assert bool(((sent - got).abs() <= bound(sent, steps)).all())


def bound(sent: torch.Tensor, steps: int) -> torch.Tensor:
    """Half a step of the largest range that a group can have, and bfloat16's rounding."""
    if not steps:
        return torch.zeros_like(sent)
    low, high = sent.amin((1, 2), keepdim=True), sent.amax((1, 2), keepdim=True)
    return (high - low) / (2 * steps) + 2**-6 * sent.abs() + 2**-7 * (high - low)


def test_a_token_sees_the_last_ones_only_and_every_layer_keeps_all(tmp_path):
    folder = wide_kv_folder(tmp_path, SMALL)
    engine = load_engine(str(folder), device="cpu", cache_dir=tmp_path / "cache")
    ids = ids_of(120)
    whole = filled(engine, ids)
    other = filled(engine, [9, *ids[1:]])
    far = 3 * (SMALL.attended - 1) + 1  # three layers reach so far back
    assert not torch.equal(rows(whole, 2, "K")[:, :far], rows(other, 2, "K")[:, :far])
    for kind in ("K", "V"):
        assert torch.equal(rows(whole, 2, kind, far), rows(other, 2, kind, far))
        assert whole.first_token(2) == 0
        in_blocks = rows(filled(engine, ids, block_tokens=16), 2, kind)
        torch.testing.assert_close(in_blocks, rows(whole, 2, kind), rtol=0.05, atol=0.1)


def test_a_continuation_equals_a_longer_prefill(tmp_path):
    folder = wide_kv_folder(tmp_path, SMALL)
    engine = load_engine(str(folder), device="cpu", cache_dir=tmp_path / "cache")
    ids = ids_of(64)
    whole, parts = filled(engine, ids, 16), filled(engine, ids[:32], 16).copy(32, 40)
    engine.prefill(parts, ids, 16)
    assert torch.equal(rows(whole, 2, "K"), rows(parts, 2, "K"))
    sampling = Sampling(max_new_tokens=3, ignore_eos=True)
    first, second = (
        list(engine.answer(cache, ids, ids[:4], sampling))[-1] for cache in (whole, parts)
    )
    assert first.generated_ids == second.generated_ids


def test_a_mark_without_a_number_of_attended_tokens_is_refused():
    model = wide_model(SMALL)
    assert is_bytes_only(model.config)
    setattr(model.config, ATTENDED, 0)
    with pytest.raises(UnsupportedModel, match=f"{ATTENDED} is 0"):
        is_bytes_only(model.config)
    setattr(model.config, MARK, False)
    assert not is_bytes_only(model.config)
