"""Sampling equals transformers' own ``generate`` on the same cache, token for token."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from cachelink_core.engine.base import Sampling
from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.errors import InvalidRequest
from cachelink_core.testing.tiny_engines import tiny_engine

PREFIX, QUERY = 50, 5


@cache
def _engine():
    return tiny_engine("qwen3")


def _ids() -> list[int]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(4, 270, (PREFIX + QUERY,), generator=generator).tolist()


def _generate(sampling: Sampling, source) -> list[int]:
    """``generate`` of transformers, on its own cache with the same tensors."""
    model, ids = _engine()._runner._model, _ids()
    dynamic = DynamicCache(config=model.config)
    for layer in range(len(source.layers)):
        keys, values = (source.tensor(layer, kind, 0, PREFIX).unsqueeze(0) for kind in ("K", "V"))
        dynamic.update(keys.clone(), values.clone(), layer)
    options = {"do_sample": False}
    if sampling.temperature:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    torch.manual_seed(sampling.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # generate's advice about pad tokens and masks
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.max_new_tokens if sampling.ignore_eos else None,
            repetition_penalty=sampling.repetition_penalty,
            pad_token_id=0,
            **options,
            **{cache_argument(model): dynamic},
        )
    return out[0, len(ids) :].tolist()


def _ours(sampling: Sampling):
    engine, ids = _engine(), _ids()
    filled = engine.open_cache(PREFIX, 64, whole=True)
    engine.prefill(filled, ids[:PREFIX], 16)
    source = filled.copy(PREFIX, 0)
    steps = list(engine.generate_steps(filled, ids[:PREFIX], ids[PREFIX:], sampling))
    return [step.token_id for step in steps], source


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=24),
        Sampling(max_new_tokens=24, repetition_penalty=1.5),
        Sampling(max_new_tokens=24, temperature=1.0, seed=11),
        Sampling(max_new_tokens=24, temperature=0.7, seed=12),
        Sampling(max_new_tokens=24, temperature=1.3, top_k=20, seed=13),
        Sampling(max_new_tokens=24, temperature=1.3, top_p=0.8, seed=14),
        Sampling(
            max_new_tokens=24, temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.2, seed=15
        ),
    ],
    ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}-r{s.repetition_penalty}",
)
def test_tokens_equal_those_of_generate(sampling):
    ours, source = _ours(sampling)
    assert ours == _generate(sampling, source)
    assert len(set(ours)) > 4


def test_each_setting_changes_the_answer():
    """The control of the test above: no setting is ignored."""
    settings = [
        Sampling(max_new_tokens=24, ignore_eos=True),
        Sampling(max_new_tokens=24, ignore_eos=True, repetition_penalty=1.5),
        Sampling(max_new_tokens=24, ignore_eos=True, temperature=1.5, seed=1),
        Sampling(max_new_tokens=24, ignore_eos=True, temperature=1.5, seed=2),
        Sampling(max_new_tokens=24, ignore_eos=True, temperature=1.5, seed=1, top_k=3),
        Sampling(max_new_tokens=24, ignore_eos=True, temperature=1.5, seed=1, top_p=0.3),
    ]
    assert len({tuple(_ours(sampling)[0]) for sampling in settings}) == len(settings)


def test_one_seed_gives_one_answer_whatever_the_global_generator_does():
    sampling = Sampling(max_new_tokens=16, temperature=1.5, seed=3, ignore_eos=True)
    torch.manual_seed(0)
    first, _ = _ours(sampling)
    torch.rand(10)
    state = torch.get_rng_state()
    second, _ = _ours(sampling)
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


def test_the_largest_cut_keeps_every_token():
    plain = Sampling(max_new_tokens=8, temperature=1.0, seed=6, ignore_eos=True)
    cut = Sampling(max_new_tokens=8, temperature=1.0, seed=6, ignore_eos=True, top_k=10**6)
    assert _ours(plain)[0] == _ours(cut)[0]


def test_the_penalty_sees_the_prefix():
    engine, ids = _engine(), _ids()
    sampling = Sampling(max_new_tokens=24, repetition_penalty=1.5, ignore_eos=True)
    with_prefix, source = _ours(sampling)
    steps = engine.generate_steps(source.copy(PREFIX, 64), (), ids[PREFIX:], sampling)
    assert [step.token_id for step in steps] != with_prefix
    with pytest.raises(InvalidRequest, match="prefix id 5000"):
        engine.generate_steps(source.copy(PREFIX, 64), [5000], ids[PREFIX:], sampling)
