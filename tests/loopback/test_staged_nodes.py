"""Two daemons whose bytes take the way to a device and back, where nothing happens before it is
waited for: what they publish and send is still exact."""

from __future__ import annotations

import pytest
import torch

from cachelink_core.engine.staging import HostStaging
from cachelink_core.rpc.client import HeldCache, HeldHandoff, Sampling, TokenIds
from cachelink_core.testing.delayed_staging import DelayedStaging
from cachelink_core.testing.tiny_engines import tiny_engine
from tests.loopback.nodes import BLOCK_TOKENS, pair_of

TOKENS = 9 * BLOCK_TOKENS + 5
IDS = TokenIds(tuple(3 + (17 * i * i + 5 * i) % 240 for i in range(TOKENS)))
QUERY = TokenIds((7, 9, 11, 13, 15))
SAMPLING = Sampling(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def plain():
    """What two daemons without staging answer, by codec."""
    with pair_of(tiny_engine("llama"), tiny_engine("llama")) as pair:
        return {codec: answer_of(pair, codec) for codec in ("native", "int8+zstd", "int4")}


@pytest.fixture(scope="module", params=["at once", "late"])
def staged(request):
    makers = {"at once": HostStaging, "late": DelayedStaging}
    made = []

    def make(_device):
        made.append(makers[request.param]())
        return made[-1]

    with pair_of(tiny_engine("llama", staging=make), tiny_engine("llama", staging=make)) as pair:
        yield pair, made


def answer_of(pair, codec, **kwargs):
    receipt = pair.ask_sender.handoff(IDS, "local", codec=codec, **kwargs)
    return ids_of(pair, HeldCache(receipt.cache_id)), receipt


def ids_of(pair, context):
    running = pair.ask_receiver.answer(context, QUERY, sampling=SAMPLING)
    return [token for delta in running for token in delta.token_ids]


@pytest.mark.parametrize("codec", ["native", "int8+zstd", "int4"])
def test_answers_are_those_of_plain_copies(plain, staged, codec):
    pair, made = staged
    pair.clear()
    made.clear()
    expected, _ = plain[codec]
    answered, receipt = answer_of(pair, codec)
    assert answered == expected
    assert len(made) == 2, "one a side"
    left = [staging.pending for staging in made if isinstance(staging, DelayedStaging)]
    assert left == [0] * len(left)
    ours, theirs = (
        node.parts.store.find("default", name).cache
        for node, name in (
            (pair.sender_node, receipt.sender_cache_id),
            (pair.receiver_node, receipt.cache_id),
        )
    )
    if codec == "native":
        for layer in range(len(ours.layers)):
            for kind in ("K", "V"):
                left, right = (c.tensor(layer, kind, 0, TOKENS) for c in (ours, theirs))
                assert torch.equal(left, right)


def test_a_cache_that_is_waited_for_is_complete_when_it_is_answered_from(plain, staged):
    pair, _ = staged
    pair.clear()
    receipt = pair.ask_sender.handoff(IDS, "local", codec="native")
    assert ids_of(pair, HeldHandoff(receipt.handoff_id)) == plain["native"][0]


def test_a_node_says_where_and_how_it_computes(staged):
    pair, _ = staged
    for client, engine in (
        (pair.ask_sender, pair.sender_engine),
        (pair.ask_receiver, pair.receiver_engine),
    ):
        info = client.ping()
        assert info.device == "cpu"
        assert info.attention == engine.attention == engine.model.config._attn_implementation
