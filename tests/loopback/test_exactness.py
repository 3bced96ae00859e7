"""A native handoff through two daemons is exact: tensors, tokens, logits, and the tokens counted."""

from __future__ import annotations

import pytest
import torch

from cachelink_core.engine.base import Finish, Sampling
from cachelink_core.rpc.client import HeldCache, TokenIds
from cachelink_core.rpc.client import Sampling as AskSampling
from tests.loopback.nodes import BLOCK_TOKENS, pair_of

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "ministral3")
QUERY = (7, 9, 11, 13, 15)
TOKENS = 32
SAMPLING = Sampling(max_new_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in ("float32", "bfloat16")])
def exact_pair(request, engines):
    family, dtype = request.param
    sender, receiver = engines(family, dtype), engines(family, dtype, "receiver")
    with pair_of(sender, receiver) as pair:
        yield pair


def prefix_of(tokens: int) -> tuple[int, ...]:
    return tuple(3 + (17 * i * i + 5 * i) % 240 for i in range(tokens))


def entry(node, cache_id: str):
    found = node.parts.store.find("default", cache_id)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "tokens", [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 9 * BLOCK_TOKENS + 5]
)
def test_native_handoff_is_exact(exact_pair, tokens):
    pair = exact_pair
    pair.clear()
    receipt = pair.ask_sender.handoff(TokenIds(prefix_of(tokens)), "local", codec="native")
    assert receipt.trust == "exact"
    assert receipt.tokens == tokens
    ours = entry(pair.sender_node, receipt.sender_cache_id)
    theirs = entry(pair.receiver_node, receipt.cache_id)
    assert_same_tensors(ours.cache, theirs.cache)
    assert_same_continuation(pair, ours, theirs)

    counted = pair.receiver_engine.model_tokens
    answer = pair.ask_receiver.answer(
        HeldCache(receipt.cache_id),
        TokenIds(QUERY),
        sampling=AskSampling(max_new_tokens=TOKENS, ignore_eos=True),
    )
    ids = [token for delta in answer for token in delta.token_ids]
    assert ids == greedy(pair.sender_engine, ours)
    assert answer.final.path == "exact"
    assert answer.final.model_tokens == len(QUERY) + TOKENS - 1
    assert pair.receiver_engine.model_tokens - counted == len(QUERY) + TOKENS - 1
    assert answer.final.cached_tokens == tokens


def assert_same_tensors(ours, theirs) -> None:
    assert ours.length == theirs.length
    for layer in range(len(ours.layers)):
        start = ours.layers[layer].first_token(ours.length)
        for kind in ("K", "V"):
            left = ours.tensor(layer, kind, start, ours.length)
            right = theirs.tensor(layer, kind, start, theirs.length)
            assert torch.equal(left, right), f"layer {layer} {kind}"


def assert_same_continuation(pair, ours, theirs) -> None:
    """The logits of every step, bit for bit."""
    steps = [
        [step.logits for step in engine.generate_steps(stored.cache, stored.ids, QUERY, SAMPLING)]
        for engine, stored in ((pair.sender_engine, ours), (pair.receiver_engine, theirs))
    ]
    for stored in (ours, theirs):
        stored.cache.truncate(len(stored.ids))
    assert len(steps[0]) == len(steps[1]) == TOKENS
    for left, right in zip(*steps, strict=True):
        assert torch.equal(left, right)


def greedy(engine, stored) -> list[int]:
    for item in engine.answer(stored.cache, stored.ids, QUERY, SAMPLING):
        if isinstance(item, Finish):
            stored.cache.truncate(len(stored.ids))
            return list(item.generated_ids)
    raise AssertionError("no end")
