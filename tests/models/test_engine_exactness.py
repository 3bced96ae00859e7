"""A cache that was handed over continues like the sender's own, bit for bit.

Both sides use the one prefill schedule: blocks from position 0, then the query in one forward.
Against a prefill in one shot the difference is reported, not bounded by zero: kernels add in
another order.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from cachelink_core.engine.base import Sampling
from cachelink_core.errors import HandoffAborted
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.testing.tiny_engines import tiny_engine

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "ministral3"]
DTYPES = [torch.float32, torch.bfloat16]
BLOCK = 16
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]
GREEDY = Sampling(max_new_tokens=32, ignore_eos=True)
QUERY = [40, 51, 62, 73, 84]


@cache
def _engine(family: str, dtype: torch.dtype, attention: str = "auto"):
    bias = {"key_bias": 50.0} if family == "qwen2" else {}
    return tiny_engine(family, dtype=dtype, attention=attention, **bias)


def _ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 320, (count,), generator=generator).tolist()


def _prefilled(engine, ids, *, headroom: int = 40, block: int = BLOCK) -> PrefixCache:
    filled = engine.open_cache(len(ids), headroom, whole=True)
    engine.prefill(filled, ids, block)
    return filled


def _handed_over(engine, source: PrefixCache) -> PrefixCache:
    """Copies each slice that travels into a receiver's cache, of another headroom."""
    n = source.length
    target = engine.open_cache(n, 100, whole=False)
    for index, layer in enumerate(source.layers):
        first = layer.first_token(n)
        for kind in ("K", "V"):
            target.tensor(index, kind, first, n).copy_(source.tensor(index, kind, first, n))
    target.set_length(n)
    return target


def _one_shot(engine, ids) -> torch.Tensor:
    """Logits of the last of ``ids``, all read in one forward into an empty cache."""
    empty = engine.open_cache(0, len(ids), whole=True)
    return next(iter(engine.generate_steps(empty, [], ids, Sampling(max_new_tokens=1)))).logits


def _assert_same_steps(ours, theirs) -> None:
    assert len(ours) == len(theirs) == GREEDY.max_new_tokens
    assert [step.token_id for step in ours] == [step.token_id for step in theirs]
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left.logits, right.logits)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_receiver_continues_as_the_sender_does(family, dtype, length):
    engine, ids = _engine(family, dtype), _ids(length)
    own = _prefilled(engine, ids)
    received = _handed_over(engine, own)
    own.use_window()
    before = engine.model_tokens
    ours = list(engine.generate_steps(own, ids, QUERY, GREEDY))
    assert engine.model_tokens - before == len(QUERY) + GREEDY.max_new_tokens - 1
    theirs = list(engine.generate_steps(received, ids, QUERY, GREEDY))
    _assert_same_steps(ours, theirs)
    assert ours[0].logits.dtype == torch.float32
    assert len({step.token_id for step in ours}) > 8  # an answer that repeats would show little
    assert own.length == received.length == length + len(QUERY) + GREEDY.max_new_tokens - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_prefix_gives_other_logits(family, dtype):
    """The control of the test above: the cache is read."""
    engine, ids = _engine(family, dtype), _ids(50)
    own = _prefilled(engine, ids)
    zeroed = engine.open_cache(50, 40, whole=True)
    zeroed.set_length(50)
    other = _prefilled(engine, _ids(50, seed=2))
    first = [
        next(iter(engine.generate_steps(held, ids, QUERY, GREEDY))).logits
        for held in (own, zeroed, other)
    ]
    assert (first[0] - first[1]).abs().max() > 0.1
    assert (first[0] - first[2]).abs().max() > 0.1


@pytest.mark.parametrize(("attention", "bound"), [("eager", 1e-6), ("sdpa", 5e-6)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reinjected_cache_equals_a_full_forward(
    family, attention, bound, record_testsuite_property
):
    """In float32, relative to the largest logit.

    Eager attention differs in the order of additions only; torch's fused kernel picks another
    algorithm for a masked query than for a whole prompt, and transformers' own cache gives the
    same difference there.
    """
    engine, ids = _engine(family, torch.float32, attention), _ids(83)
    reinjected = _handed_over(engine, _prefilled(engine, ids, block=96))
    step = next(iter(engine.generate_steps(reinjected, ids, QUERY, GREEDY)))
    full = _one_shot(engine, ids + QUERY)
    error = float((step.logits - full).abs().max() / full.abs().max())
    record_testsuite_property(f"relative_error {family} {attention}", error)
    assert error <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_difference_to_one_shot_is_reported(family, dtype, record_testsuite_property):
    engine, ids = _engine(family, dtype), _ids(5 * BLOCK + 3)
    blocked = next(iter(engine.generate_steps(_prefilled(engine, ids), ids, QUERY, GREEDY)))
    full = _one_shot(engine, ids + QUERY)
    difference = float((blocked.logits - full).abs().max())
    record_testsuite_property(f"max_logit_difference {family} {dtype}", difference)
    # Rounding, not another computation: far below the spread of the logits.
    assert difference < 0.1 * float(full.std())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_resumed_at_a_block_equals_an_unbroken_one(family, dtype):
    engine, ids = _engine(family, dtype), _ids(4 * BLOCK + 5)
    unbroken = _prefilled(engine, ids)
    resumed = engine.open_cache(len(ids), 40, whole=True)
    engine.prefill(resumed, ids[: 2 * BLOCK], BLOCK)
    engine.prefill(resumed, ids, BLOCK)
    _assert_same_cache(resumed, unbroken)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_resumed_inside_a_block_reads_the_rest_of_it_first(family):
    engine, ids = _engine(family, torch.float32), _ids(4 * BLOCK + 5)
    caches, blocks = [], []
    for _ in range(2):
        resumed, seen = engine.open_cache(len(ids), 40, whole=True), []
        engine.prefill(resumed, ids[: BLOCK + 7], BLOCK, seen.append)
        assert resumed.length == BLOCK + 7
        engine.prefill(resumed, ids, BLOCK, lambda b, r=resumed, s=seen: s.append((b, r.length)))
        caches.append(resumed)
        blocks.append(seen)
    end = len(ids)
    assert blocks[0] == [0, 1, (1, 2 * BLOCK), (2, 3 * BLOCK), (3, 4 * BLOCK), (4, end)]
    _assert_same_cache(caches[0], caches[1])
    unbroken = _prefilled(engine, ids)
    for layer in range(len(unbroken.layers)):
        ours, theirs = (c.tensor(layer, "K", 0, end) for c in (caches[0], unbroken))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_held_prefix_that_grew_reads_only_its_tail():
    engine, ids = _engine("llama", torch.float32), _ids(3 * BLOCK)
    held = _prefilled(engine, ids[: 2 * BLOCK])
    before = engine.model_tokens
    grown = held.copy(2 * BLOCK, BLOCK)
    engine.prefill(grown, ids, BLOCK)
    assert engine.model_tokens - before == BLOCK
    _assert_same_cache(grown, _prefilled(engine, ids))


def test_a_prefill_is_given_up_between_blocks():
    engine, ids, blocks = _engine("llama", torch.float32), _ids(5 * BLOCK), []
    filled = engine.open_cache(len(ids), 0, whole=True)
    with pytest.raises(HandoffAborted, match="token 32 of 80"):
        engine.prefill(filled, ids, BLOCK, blocks.append, lambda: len(blocks) == 2)
    assert (blocks, filled.length) == ([0, 1], 2 * BLOCK)


def _assert_same_cache(ours: PrefixCache, theirs: PrefixCache) -> None:
    assert ours.length == theirs.length
    for layer in range(len(ours.layers)):
        for kind in ("K", "V"):
            left, right = (c.tensor(layer, kind, 0, c.length) for c in (ours, theirs))
            assert torch.equal(left, right)
