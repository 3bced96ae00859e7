"""Prefix caches: what is allocated, what a model is shown, what a copy keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.identity import LayerGeometry
from cachelink_core.kv.prefix_cache import PrefixCache, cache_bytes
from cachelink_core.testing.tiny_models import tiny_model

WINDOW = 24
FULL = LayerGeometry(2, 16)
SLIDING = LayerGeometry(2, 16, attention="sliding", window=WINDOW)
BLOCK = 16
AROUND_WINDOW = [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5]


def _sliding_model(family: str):
    """Every layer slides (Mistral), or two of three (Gemma 3)."""
    if family == "mistral":
        return tiny_model("mistral", sliding_window=WINDOW), (SLIDING,) * 3
    return tiny_model("gemma3", sliding_window=WINDOW), (SLIDING, SLIDING, FULL)


def _forward(model, cache, ids):
    with torch.inference_mode():
        named = {cache_argument(model): cache}
        return model(input_ids=torch.tensor([ids]), use_cache=True, **named).logits[0]


def _prefill(model, cache: PrefixCache, ids) -> None:
    for start in range(0, len(ids), BLOCK):
        _forward(model, cache.for_model(), ids[start : start + BLOCK])


def _window_of(source: PrefixCache, headroom: int) -> PrefixCache:
    """What a receiver is given: a cache of windows, filled tensor by tensor."""
    n = source.length
    target = PrefixCache.allocate(source.layers, source.dtype, n, headroom, whole=False)
    for index, layer in enumerate(source.layers):
        first = layer.first_token(n)
        for kind in ("K", "V"):
            target.tensor(index, kind, first, n).copy_(source.tensor(index, kind, first, n))
    target.set_length(n)
    return target


def _ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 320, (count,), generator=generator).tolist()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tokens", [0, *AROUND_WINDOW])
def test_a_cache_takes_the_bytes_that_were_announced(tokens, whole):
    layers = (SLIDING, FULL)
    cache = PrefixCache.allocate(layers, "bfloat16", tokens, 10, whole=whole)
    kept = tokens if whole else min(tokens, WINDOW - 1)
    assert cache.nbytes == cache_bytes(layers, "bfloat16", tokens, 10, whole=whole)
    assert cache.nbytes == 2 * 2 * 16 * 2 * (kept + tokens + 20)
    assert [cache.first_token(0), cache.first_token(1)] == [tokens - kept, 0]
    assert (cache.length, cache.capacity) == (0, tokens + 10)


ALLOCATE = """
import psutil
from cachelink_core.identity import LayerGeometry
from cachelink_core.kv.prefix_cache import PrefixCache

before = psutil.Process().memory_info().rss
cache = PrefixCache.allocate((LayerGeometry(8, 128),) * 2, "float32", 4096, 0, whole=True)
print(psutil.Process().memory_info().rss - before, cache.nbytes)
"""


def test_pages_are_touched_when_a_cache_is_allocated():
    """In a process of its own: here freed memory of other tests could be given out again."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    grown, nbytes = map(int, done.stdout.split())
    assert nbytes == 64 * 2**20
    assert grown >= 0.95 * nbytes


def test_tensors_are_views_by_absolute_position():
    cache = PrefixCache.allocate((SLIDING,), "float32", 100, 8, whole=False)
    view = cache.tensor(0, "K", 80, 90)
    assert view.shape == (2, 10, 16)
    view.fill_(3.0)
    around = cache.tensor(0, "K", 79, 91)
    assert torch.equal(around[:, 1:11], view)
    assert not around[:, [0, 11]].any()
    assert not cache.tensor(0, "V", 80, 90).any()


@pytest.mark.parametrize(("start", "stop"), [(76, 90), (100, 109), (90, 89), (-1, 5)])
def test_positions_that_are_not_held_are_refused(start, stop):
    cache = PrefixCache.allocate((SLIDING,), "float32", 100, 8, whole=False)
    with pytest.raises(IndexError):
        cache.tensor(0, "K", start, stop)


@pytest.mark.parametrize("length", [-1, 109])
def test_a_length_beyond_the_capacity_is_refused(length):
    cache = PrefixCache.allocate((FULL,), "float32", 100, 8, whole=True)
    with pytest.raises(IndexError, match=r"\[0, 108\]"):
        cache.set_length(length)


def test_a_forward_writes_in_place_and_raises_the_length_once():
    model, ids = tiny_model("llama"), _ids(12)
    cache = PrefixCache.allocate((FULL,) * 3, "float32", 12, 4, whole=True)
    buffers = [(b.keys.data_ptr(), b.values.data_ptr()) for b in cache.buffers]
    lengths = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: lengths.append(cache.length))
    shown = cache.for_model()
    _forward(model, shown, ids)
    assert lengths == [0, 0, 12]
    keys, values = shown.layers[0].update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16))
    assert (keys.data_ptr(), values.data_ptr()) == buffers[0]
    assert keys.shape == (1, 2, 13, 16)
    assert [(b.keys.data_ptr(), b.values.data_ptr()) for b in cache.buffers] == buffers


def test_a_forward_without_room_is_refused_and_changes_no_length():
    model = tiny_model("llama")
    cache = PrefixCache.allocate((FULL,) * 3, "float32", 8, 0, whole=True)
    _forward(model, cache.for_model(), _ids(8))
    with pytest.raises(IndexError):
        _forward(model, cache.for_model(), [5])
    assert cache.length == 8


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("tokens", AROUND_WINDOW)
def test_sliding_layers_give_the_logits_of_transformers_own_cache(family, tokens, attention):
    model, layers = _sliding_model(family)
    model.set_attn_implementation(attention)
    ids = _ids(tokens + 8)
    cache = PrefixCache.allocate(layers, "float32", tokens, 20, whole=True)
    _prefill(model, cache, ids[:tokens])
    received = _window_of(cache, 20)
    dynamic = DynamicCache(config=model.config)
    for start in range(0, tokens, BLOCK):
        _forward(model, dynamic, ids[start : min(tokens, start + BLOCK)])
    for query in (ids[tokens : tokens + 5], *([i] for i in ids[tokens + 5 :])):
        expected = _forward(model, dynamic, query)
        for ours in (cache, received):
            logits = _forward(model, ours.for_model(), query)
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_a_window_that_is_one_token_off_would_show():
    """The bound of the test above is far below the error of a wrong window."""
    model, layers = _sliding_model("mistral")
    ids = _ids(80)
    logits = []
    for shift in (0, 1):
        wrong = LayerGeometry(2, 16, attention="sliding", window=WINDOW - shift)
        cache = PrefixCache.allocate(
            (wrong,) * 3 if shift else layers, "float32", 75, 9, whole=True
        )
        _prefill(model, cache, ids[:75])
        logits.append(_forward(model, cache.for_model(), ids[75:])[-1])
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_using_the_window_changes_what_is_held_and_not_what_is_computed():
    model, layers = _sliding_model("gemma3")
    ids = _ids(60)
    cache = PrefixCache.allocate(layers, "float32", 55, 20, whole=True)
    _prefill(model, cache, ids[:55])
    before = _forward(model, cache.for_model(), ids[55:])
    cache.truncate(55)
    assert cache.first_token(0) == 0
    cache.use_window()
    assert [cache.first_token(i) for i in range(3)] == [55 - WINDOW + 1, 55 - WINDOW + 1, 0]
    assert torch.equal(_forward(model, cache.for_model(), ids[55:]), before)
    with pytest.raises(IndexError):
        cache.tensor(0, "K", 55 - WINDOW, 55)
    assert cache.can_continue_from(55)
    assert not cache.can_continue_from(54)
    cache.truncate(55)
    with pytest.raises(IndexError, match="window before 54"):
        cache.truncate(54)


def test_a_whole_cache_can_be_truncated_anywhere():
    model, layers = _sliding_model("gemma3")
    ids = _ids(60)
    cache = PrefixCache.allocate(layers, "float32", 60, 4, whole=True)
    _prefill(model, cache, ids)
    cache.truncate(3 * BLOCK)
    again = _forward(model, cache.for_model(), ids[3 * BLOCK :])
    fresh = PrefixCache.allocate(layers, "float32", 60, 4, whole=True)
    _prefill(model, fresh, ids[: 3 * BLOCK])
    assert torch.equal(again, _forward(model, fresh.for_model(), ids[3 * BLOCK :]))
    with pytest.raises(IndexError, match="60 tokens to 61"):
        cache.truncate(61)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tokens", [0, 10, 60, 64])
def test_a_copy_is_independent_and_continues_alike(tokens, whole):
    model, layers = _sliding_model("gemma3")
    ids = _ids(tokens + 4)
    source = PrefixCache.allocate(layers, "float32", tokens, 8, whole=True)
    _prefill(model, source, ids[:tokens])
    if not whole:
        source = _window_of(source, 8)
    copied = source.copy(tokens, 30)
    assert (copied.length, copied.capacity) == (tokens, tokens + 30)
    assert [copied.first_token(i) for i in range(3)] == [source.first_token(i) for i in range(3)]
    expected = _forward(model, source.for_model(), ids[tokens:])
    assert copied.length == tokens
    assert torch.equal(_forward(model, copied.for_model(), ids[tokens:]), expected)
    source.tensor(2, "K", 0, source.length).zero_()
    assert tokens == 0 or copied.tensor(2, "K", 0, tokens).any()


def test_a_copy_of_windows_keeps_only_the_window():
    model, layers = _sliding_model("mistral")
    ids = _ids(90)
    whole = PrefixCache.allocate(layers, "float32", 60, 30, whole=True)
    _prefill(model, whole, ids[:60])
    received = _window_of(whole, 30)
    _forward(model, received.for_model(), ids[60:])
    copied = received.copy(90, 5)
    assert copied.first_token(0) == 90 - WINDOW + 1
    assert copied.nbytes == cache_bytes(layers, "float32", 90, 5, whole=False)
    with pytest.raises(IndexError):
        received.copy(91, 5)
    with pytest.raises(IndexError):
        received.copy(59, 5)


def test_held_positions_stay_as_they_are_while_a_forward_writes_behind_them():
    model, ids = tiny_model("llama"), _ids(20)
    cache = PrefixCache.allocate((FULL,) * 3, "float32", 20, 0, whole=True)
    _forward(model, cache.for_model(), ids[:16])
    view = cache.tensor(1, "K", 0, 16)
    held = view.clone()
    _forward(model, cache.for_model(), ids[16:])
    assert torch.equal(view, held)
