"""The exact map between a model's cache and its twin's."""

import pytest
import torch
from transformers import DynamicCache

from cachelink_core.engine.identify import identify
from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.planted_pair import Twin, analytic_state, plant, strip_rope
from cachelink_core.testing.tiny_models import tiny_model
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer
from cachelink_core.transport.mapper import Mapper

PREFIX, QUERY = 48, 16
FAMILIES = ("llama", "qwen2", "qwen3")


def ids(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 270, (1, count), generator=generator)


def read(model, tokens, cache):
    positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + tokens.shape[1])
    with torch.no_grad():
        output = model(
            input_ids=tokens,
            position_ids=positions[None],
            use_cache=True,
            **{cache_argument(model): cache},
        )
    return output.logits[0]


def identity(model):
    return identify(model, tiny_tokenizer(), KeyRope.probe(model))


def float64_pair(family):
    original = tiny_model(family)
    twin = plant(original, seed=1)
    names = identity(original), identity(twin.model)
    original = original.double()
    exact = plant(original, seed=1)
    return original, exact, analytic_state(exact, *names)


def mapped_cache(original, twin, state, cache):
    mapper = Mapper.place(state, dtype=torch.float64)
    keys = [strip_rope(original, layer.keys[0]) for layer in cache.layers]
    values = [layer.values[0] for layer in cache.layers]
    pairs = [
        (strip_rope(twin.model, k.contiguous(), back=True)[None], v.contiguous()[None])
        for _, k, v in mapper.map_block(keys, values, 0)
    ]
    return DynamicCache(ddp_cache_data=pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_computes_the_same_from_another_cache(family):
    original, twin, _ = float64_pair(family)
    first, second = DynamicCache(), DynamicCache()
    tokens = ids(PREFIX)
    ours, theirs = read(original, tokens, first), read(twin.model, tokens, second)
    assert (ours - theirs).abs().max() < 1e-9
    for layer in range(len(first.layers)):
        for name in ("keys", "values"):
            a, b = getattr(first.layers[layer], name), getattr(second.layers[layer], name)
            assert (a - b).norm() > 0.3 * a.norm(), "the twin's cache is not another one"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_analytic_map_gives_the_twins_logits(family):
    original, twin, state = float64_pair(family)
    tokens, query = ids(PREFIX), ids(QUERY, seed=1)
    source, native = DynamicCache(), DynamicCache()
    read(original, tokens, source)
    read(twin.model, tokens, native)
    carried = mapped_cache(original, twin, state, source)
    untranslated = read(twin.model, query, source)
    expected = read(twin.model, query, native)
    assert (read(twin.model, query, carried) - expected).abs().max() < 1e-9
    assert (untranslated - expected).abs().max() > 0.1


def test_twins_of_one_seed_are_equal_and_of_another_are_not():
    first, second, third = (plant(tiny_model("llama"), seed=s) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.keys, second.keys, strict=True))
    assert not torch.equal(first.keys[0], third.keys[0])
    assert isinstance(first, Twin)
