"""The real model: a handed-over cache of SmolLM2-135M continues bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import cachelink_core
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.loading import load_engine

BLOCK = 64
GREEDY = Sampling(max_new_tokens=32, ignore_eos=True)

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]


@cache
def _engine():
    return load_engine("demo")


@cache
def _document():
    text = (Path(cachelink_core.__file__).parent / "texts" / "demo.txt").read_text("utf-8")
    return _engine().tokens.document(text[:4000])


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_the_receiver_continues_as_the_sender_does(length, record_testsuite_property):
    engine, document = _engine(), _document()
    ids = document.ids[:length]
    query = engine.tokens.question("What is this text about?", document.frame)
    own = engine.open_cache(length, 100, whole=True)
    engine.prefill(own, ids, BLOCK)
    received = engine.open_cache(length, 200, whole=False)
    for layer in range(len(own.layers)):
        for kind in ("K", "V"):
            received.tensor(layer, kind, 0, length).copy_(own.tensor(layer, kind, 0, length))
    received.set_length(length)
    ours = list(engine.generate_steps(own, ids, query, GREEDY))
    before = engine.model_tokens
    theirs = list(engine.generate_steps(received, ids, query, GREEDY))
    assert engine.model_tokens - before == len(query) + 32 - 1
    assert [step.token_id for step in ours] == [step.token_id for step in theirs]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(ours, theirs, strict=True))
    empty = engine.open_cache(0, length + len(query), whole=True)
    single = Sampling(max_new_tokens=1)
    full = next(iter(engine.generate_steps(empty, (), [*ids, *query], single))).logits
    difference = float((full - ours[0].logits).abs().max())
    record_testsuite_property(f"max_logit_difference SmolLM2 {length}", difference)
