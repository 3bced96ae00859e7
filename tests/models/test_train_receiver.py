"""The frozen receiver over caches that gradients reach, and the traps around it."""

import pytest
import torch
from transformers import DynamicCache

from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.fit.gate_arms import own_cache, scored
from cachelink_core.fit.receiver_forward import ReceiverForward, RowCache
from cachelink_core.fit.train import native_cache
from cachelink_core.testing.tiny_engines import tiny_engine

LAYOUTS = ("qwen3", "phi", "glm4", "smollm3", "gemma3")
WINDOWED = ("gemma3", "mistral")


def ids(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, 270, (count,), generator=generator).tolist())


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", *WINDOWED])
def test_logits_behind_a_cache_are_the_engine_s(family):
    engine = tiny_engine(family)
    prefix, read = ids(40), ids(7, seed=1)
    expected = scored(engine, own_cache(engine, prefix, 8), read)
    found = ReceiverForward(engine).logits([native_cache(engine, prefix)], [read])[0]
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["qwen3", *WINDOWED])
def test_a_row_does_not_see_the_rows_beside_it(family):
    engine = tiny_engine(family)
    forward = ReceiverForward(engine)
    prefixes = [ids(n, seed=n) for n in (50, 33, 64)]
    reads = [ids(n, seed=n) for n in (3, 6, 5)]
    caches = [native_cache(engine, prefix) for prefix in prefixes]
    together = forward.logits(caches, reads)
    for row, (cache, read) in enumerate(zip(caches, reads, strict=True)):
        alone = forward.logits([cache], [read])[0]
        assert torch.allclose(together[row, : len(read)], alone, atol=2e-4, rtol=1e-4)


def test_a_cache_is_never_appended_to():
    engine = tiny_engine("qwen3")
    forward, cache = ReceiverForward(engine), native_cache(engine, ids(20))
    first, second = (forward.logits([cache], [ids(4)]) for _ in range(2))
    assert torch.equal(first, second)
    assert cache.tokens == 20


def test_the_trap_transformers_appends_even_without_use_cache():
    engine = tiny_engine("qwen3")
    cache = native_cache(engine, ids(20))
    pairs = [(k[None], v[None]) for k, v in zip(cache.keys, cache.values, strict=True)]
    given = DynamicCache(ddp_cache_data=pairs)
    with torch.no_grad():
        engine.model(
            input_ids=torch.tensor([ids(4)]),
            use_cache=False,
            **{cache_argument(engine.model): given},
        )
    assert given.get_seq_length() == 24, "the reason for a cache that keeps nothing is gone"


def test_the_receiver_is_frozen_in_eval_and_never_checkpointed():
    plain = tiny_engine("qwen3")
    trapped = tiny_engine("qwen3")
    model = trapped.model  # renamed between the versions of transformers that are supported
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    model.train()
    gradients = []
    for engine in (plain, trapped):
        forward = ReceiverForward(engine)
        assert not engine.model.training
        assert not any(p.requires_grad for p in engine.model.parameters())
        cache = native_cache(plain, ids(20))
        keys = tuple(k.requires_grad_() for k in cache.keys)
        leaves = RowCache(tuple(k * 1.0 for k in keys), cache.values)
        forward.logits([leaves], [ids(4)]).square().mean().backward()
        gradients.append([key.grad for key in keys])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(bool(grad.any()) for grad in gradients[0])


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_rotation_is_the_served_one_and_its_gradient_the_transposed(family):
    engine = tiny_engine(family)
    forward = ReceiverForward(engine)
    generator = torch.Generator().manual_seed(0)
    for layer, geometry in enumerate(engine.identity.layers):
        shape = geometry.kv_heads, 9, geometry.head_dim
        content, weights = torch.randn(2, *shape, generator=generator)
        served = torch.empty(shape)
        engine.rotate_into(layer, content, 5, served)
        content.requires_grad_()
        turned = forward.rotated(layer, content, 5)
        assert torch.equal(turned, served)
        (turned * weights).sum().backward()
        # The rotation is linear: <w, R x> = <Rᵀ w, x>.
        expected = float((weights.double() * served.double()).sum())
        found = float((content.grad.double() * content.detach().double()).sum())
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_gradient_of_a_scaled_rotation_is_not_its_inverse():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    engine = tiny_engine("llama", rope_scaling=scaling)
    content = torch.ones(2, 6, engine.identity.layers[0].head_dim, requires_grad=True)
    turned = ReceiverForward(engine).rotated(0, content)
    turned.backward(turned.detach())
    scale = content.grad / content.detach()
    assert torch.allclose(scale, scale.flatten()[0].expand_as(scale), rtol=1e-5)
    assert float(scale.flatten()[0]) > 1.2
