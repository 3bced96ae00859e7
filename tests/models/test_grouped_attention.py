"""Attention without copies of shared heads: equal to transformers' own, or as close to the truth."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cachelink_core.engine.base import Sampling
from cachelink_core.kv import grouped_attention
from cachelink_core.kv.grouped_attention import GROUPED_SDPA, grouped_sdpa_forward, prefer_grouped
from cachelink_core.testing.tiny_engines import tiny_engine

KEY_HEADS, DIM = 3, 64
DTYPES = [torch.float32, torch.bfloat16]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "ministral3"]


class Layer(torch.nn.Module):
    """What an attention layer tells its implementation."""

    is_causal = True

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group


def inputs(group: int, tokens: int, keys: int, dtype: torch.dtype, batch: int = 1):
    generator = torch.Generator().manual_seed(tokens + keys)
    rows = KEY_HEADS * group

    def draw(heads: int, length: int) -> torch.Tensor:
        shape = batch, heads, length, DIM
        return torch.randn(shape, generator=generator).to(dtype)

    # Views of a longer buffer, as a prefix cache gives them.
    query, key, value = draw(rows, tokens), *(draw(KEY_HEADS, keys + 100) for _ in range(2))
    seen = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)[None, None]
    mask = None if tokens == 1 else seen
    return query, key[:, :, :keys], value[:, :, :keys], mask


@torch.inference_mode()
def both(group: int, query, key, value, mask, **kwargs):
    layer = Layer(group)
    return [
        forward(layer, query, key, value, mask, scaling=DIM**-0.5, **kwargs)[0]
        for forward in (grouped_sdpa_forward, sdpa_attention_forward)
    ]


@pytest.mark.parametrize("keys", [70, 1030, 2500])
@pytest.mark.parametrize("tokens", [2, 16, 64])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_tokens_give_every_bit_of_sdpa(dtype, group, tokens, keys):
    ours, theirs = both(group, *inputs(group, tokens, keys, dtype))
    assert ours.shape == theirs.shape == (1, tokens, KEY_HEADS * group, DIM)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("keys", [70, 1030, 2500])
@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_is_as_exact_as_sdpa(dtype, group, keys):
    """Its rows go through another matrix product than single rows would: rounding, no more."""
    query, key, value, mask = inputs(group, 1, keys, dtype)
    ours, theirs = both(group, query, key, value, mask)
    truth, _ = both(group, *(each.double() for each in (query, key, value)), mask)
    errors = [float((each.double() - truth).abs().max()) for each in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] + 4 * torch.finfo(dtype).eps * float(truth.abs().max())


@pytest.mark.parametrize("tokens", [1, 16])
def test_shared_heads_are_not_copied(tokens, monkeypatch):
    """torch's kernel is given views of the cache itself, and its fused form applies."""
    query, key, value, mask = inputs(3, tokens, 500, torch.bfloat16)
    real, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watching(rows, keys, values, **kwargs):
        seen.append((rows.shape, keys.shape, keys.data_ptr(), values.data_ptr()))
        return real(rows, keys, values, **kwargs)

    monkeypatch.setattr(
        grouped_attention.torch.nn.functional, "scaled_dot_product_attention", watching
    )
    with torch.inference_mode():
        grouped_sdpa_forward(Layer(3), query, key, value, mask)
    ((rows, keys, key_at, value_at),) = seen
    assert rows[:2] == keys[:2]
    assert (key_at, value_at) == (key.data_ptr(), value.data_ptr())


@pytest.mark.parametrize(
    ("changes", "kwargs"),
    [
        ({"batch": 2}, {}),
        ({}, {"position_bias": 0.5}),
        ({"unmasked": True}, {}),
    ],
    ids=["batch", "position_bias", "unmasked"],
)
def test_what_it_does_not_know_is_left_to_sdpa(changes, kwargs):
    query, key, value, mask = inputs(3, 16, 16, torch.float32, batch=changes.get("batch", 1))
    if changes.get("unmasked"):
        mask = None  # a causal forward into an empty cache
    if "position_bias" in kwargs:
        kwargs = {"position_bias": torch.full((1, 9, 16, 16), kwargs["position_bias"])}
    ours, theirs = both(3, query, key, value, mask, **kwargs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_reads_as_with_sdpa(family, dtype):
    """Blocks and query bit for bit; a further token up to rounding."""
    answers = []
    for attention, name in (("auto", GROUPED_SDPA), ("sdpa", "sdpa")):
        engine = tiny_engine(family, dtype=dtype, attention=attention)
        assert engine.model.config._attn_implementation == name
        cache = engine.open_cache(70, 40, whole=True)
        ids = [4 + 7 * i % 300 for i in range(70)]
        engine.prefill(cache, ids, 16)
        sampling = Sampling(max_new_tokens=2, ignore_eos=True)
        answers.append(list(engine.generate_steps(cache, ids, (40, 51, 62), sampling)))
    first, second = zip(*answers, strict=True)
    assert torch.equal(first[0].logits, first[1].logits)
    ours, theirs = (step.logits for step in second)
    bound = 1e-5 if dtype == torch.float32 else 0.03
    assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())


def test_another_choice_is_kept():
    model = tiny_engine("llama", attention="eager").model
    prefer_grouped(model)
    assert model.config._attn_implementation == "eager"
