"""A bytes-only model between two daemons: its cache is moved and listed, and nobody may ask it."""

from __future__ import annotations

import pytest
import torch

from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import UnsupportedModel
from cachelink_core.rpc.client import Document, HeldCache, Question, Sampling, TokenIds
from cachelink_core.testing.wide_kv import WideShape, wide_kv_folder
from tests.loopback.nodes import BLOCK_TOKENS, pair_of

SHAPE = WideShape(layers=3, kv_heads=2, head_dim=32, hidden=64)
IDS = tuple(4 + (29 * i) % 230 for i in range(3 * BLOCK_TOKENS + 5))


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    model = str(wide_kv_folder(folder, SHAPE))
    engines = [load_engine(model, device="cpu", cache_dir=folder / "cache") for _ in range(2)]
    with pair_of(*engines) as pair:
        yield pair


@pytest.mark.parametrize("codec", ["native", "native+zstd", "int8", "int4", "auto"])
def test_its_cache_is_handed_over_and_listed(wide_pair, codec):
    wide_pair.clear()
    receipt = wide_pair.ask_sender.handoff(TokenIds(IDS), "local", codec=codec)
    (listed,) = wide_pair.ask_receiver.caches().caches
    assert listed.cache_id == receipt.cache_id
    assert listed.tokens == len(IDS)
    assert receipt.recommendation in ("", "transfer")
    ours = wide_pair.sender_node.parts.store.find("default", receipt.sender_cache_id).cache
    theirs = wide_pair.receiver_node.parts.store.find("default", receipt.cache_id).cache
    for layer in range(SHAPE.layers):
        for kind in ("K", "V"):
            sent, got = (c.tensor(layer, kind, 0, len(IDS)) for c in (ours, theirs))
            if receipt.trust == "exact":
                assert torch.equal(sent, got)
            else:
                assert got.float().std() > 0


def test_auto_never_recommends_to_read_again(wide_pair):
    for _ in range(3):  # the first one measures
        wide_pair.clear()
        receipt = wide_pair.ask_sender.handoff(TokenIds(IDS), "local", codec="auto")
    assert "text" not in {prediction.way for prediction in receipt.plan.predictions}


@pytest.mark.parametrize("side", ["ask_sender", "ask_receiver"])
@pytest.mark.parametrize("options", [{}, {"keep": True}, {"on_failure": "recompute"}])
def test_no_question_is_answered(wide_pair, side, options):
    wide_pair.clear()
    receipt = wide_pair.ask_sender.handoff(TokenIds(IDS), "local")
    client = getattr(wide_pair, side)
    held = receipt.cache_id if side == "ask_receiver" else receipt.sender_cache_id
    engine = wide_pair.receiver_engine if side == "ask_receiver" else wide_pair.sender_engine
    counted = engine.model_tokens
    for context in (HeldCache(held), Document("Once upon a time."), HeldCache("gone")):
        with pytest.raises(UnsupportedModel, match=r"bytes-only.*answers no question") as raised:
            client.answer(
                context, Question("What?"), sampling=Sampling(max_new_tokens=2), **options
            ).text()
        assert raised.value.status == "FAILED_PRECONDITION"
    assert engine.model_tokens == counted
