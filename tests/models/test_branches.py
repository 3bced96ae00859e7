"""Answers that take turns behind one prefix are those asked alone, bit for bit, and copy little."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from cachelink_core.engine.base import Sampling
from cachelink_core.kv import branch as branches
from cachelink_core.kv.branch import Branch, room_bytes
from cachelink_core.testing.tiny_engines import tiny_engine

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "ministral3"]
DTYPES = [torch.float32, torch.bfloat16]
BLOCK = 16
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.2)
QUESTIONS = [((40, 51, 62), GREEDY), ((73, 84, 95, 106, 117), DRAWN), ((7,), GREEDY)]


@cache
def _engine(family: str = "llama", dtype: torch.dtype = torch.float32):
    return tiny_engine(family, dtype=dtype)


def _prefix(engine, tokens: int = 70, headroom: int = 64):
    ids = [4 + (7 * i + i * i) % 300 for i in range(tokens)]
    held = engine.open_cache(tokens, headroom, whole=True)
    engine.prefill(held, ids, BLOCK)
    held.use_window()
    return held, ids


def _alone(engine, held, ids):
    answers = []
    for query, sampling in QUESTIONS:
        answers.append(list(engine.generate_steps(held, ids, query, sampling)))
        held.truncate(len(ids))
    return answers


def _assert_same(ours, theirs) -> None:
    assert [step.token_id for step in ours] == [step.token_id for step in theirs]
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left.logits, right.logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_turns_equal_those_asked_alone(family, dtype):
    engine = _engine(family, dtype)
    held, ids = _prefix(engine)
    alone = _alone(engine, held, ids)
    shares = [Branch(held) for _ in QUESTIONS]
    running = [
        engine.generate_steps(share, ids, query, sampling)
        for share, (query, sampling) in zip(shares, QUESTIONS, strict=True)
    ]
    answers = [[] for _ in QUESTIONS]
    turn = 0
    while any(len(answer) < GREEDY.max_new_tokens for answer in answers):
        # An uneven order: some answers have two tokens in a row.
        each = (turn * turn + turn // 3) % len(running)
        turn += 1
        if (step := next(running[each], None)) is not None:
            answers[each].append(step)
    for ours, theirs in zip(answers, alone, strict=True):
        _assert_same(ours, theirs)
    assert held.length == len(ids)
    for share in shares:
        share.close()
    assert held.room.occupant is None
    _assert_same(_alone(engine, held, ids)[0], alone[0])


def test_the_control_mixed_rows_give_another_answer():
    """Without the exchange, answers would read each other's rows."""
    engine = _engine()
    held, ids = _prefix(engine)
    alone = _alone(engine, held, ids)
    shares = [Branch(held) for _ in QUESTIONS[:2]]
    for share in shares:
        share.activate = lambda: None
    running = [
        engine.generate_steps(share, ids, query, sampling)
        for share, (query, sampling) in zip(shares, QUESTIONS[:2], strict=True)
    ]
    mixed = [step for pair in zip(*running, strict=True) for step in pair]
    assert [step.token_id for step in mixed[::2]] != [step.token_id for step in alone[0]]


def test_an_answer_alone_copies_nothing(monkeypatch):
    engine = _engine()
    held, ids = _prefix(engine)
    monkeypatch.setattr(branches.torch, "_foreach_copy_", pytest.fail)
    share = Branch(held)
    list(engine.generate_steps(share, ids, *QUESTIONS[0]))
    assert share._rows == []
    assert share.tensor(0, "K", 0, 1).data_ptr() == held.tensor(0, "K", 0, 1).data_ptr()


def test_each_turn_saves_only_what_is_new(monkeypatch):
    engine = _engine()
    held, ids = _prefix(engine)
    real, rows = torch._foreach_copy_, []

    def watching(targets, sources):
        assert len(targets) == len(sources) == 2 * len(held.layers)
        rows.append(targets[0].shape[1])
        real(targets, sources)

    monkeypatch.setattr(branches.torch, "_foreach_copy_", watching)
    query, _ = QUESTIONS[0]
    running = [engine.generate_steps(Branch(held), ids, query, GREEDY) for _ in range(2)]
    for _ in range(2):
        for answer in running:
            next(answer)
    # The first's query; then for each turn what the other wrote, and all of one's own.
    assert rows == [3, 3, 3, 1, 3]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_copy_holds_the_answer_wherever_its_rows_are(elsewhere):
    engine = _engine("mistral")
    held, ids = _prefix(engine)
    alone = held.copy(len(ids), 64)
    query, _ = QUESTIONS[0]
    short = replace(GREEDY, max_new_tokens=9)
    list(engine.generate_steps(alone, ids, query, short))
    share = Branch(held)
    list(engine.generate_steps(share, ids, query, short))
    if elsewhere:
        list(engine.generate_steps(Branch(held), ids, (9, 9, 9, 9), short))
    end = share.length
    ours, theirs = share.copy(end, 30), alone.copy(end, 30)
    assert ours.length == theirs.length == end
    for layer, geometry in enumerate(held.layers):
        first = geometry.first_token(end)
        for kind in ("K", "V"):
            left, right = (c.tensor(layer, kind, first, end) for c in (ours, theirs))
            assert torch.equal(left, right)
    assert share.copy(len(ids), 0).length == len(ids)
    with pytest.raises(IndexError, match="cannot copy"):
        share.copy(end + 1, 0)


def test_a_forward_that_fails_leaves_every_answer_as_it_was(monkeypatch):
    engine = _engine()
    held, ids = _prefix(engine)
    alone = _alone(engine, held, ids)
    first, second = (Branch(held) for _ in range(2))
    running = engine.generate_steps(first, ids, *QUESTIONS[0])
    steps = [next(running)]
    with monkeypatch.context() as broken:
        layer = engine.model.model.layers[1]

        def failing(*_args, **_kwargs):
            raise RuntimeError("broken")

        broken.setattr(layer, "forward", failing)
        with pytest.raises(RuntimeError, match="broken"):
            next(engine.generate_steps(second, ids, *QUESTIONS[1]))
    assert second.length == len(ids)
    steps += running
    _assert_same(steps, alone[0])
    _assert_same(list(engine.generate_steps(second, ids, *QUESTIONS[1])), alone[1])


def test_the_prefix_is_not_a_branch_s_to_cut():
    held, ids = _prefix(_engine())
    share = Branch(held)
    with pytest.raises(IndexError, match="shared prefix of 70"):
        share.truncate(len(ids) - 1)


def test_bytes_of_a_branch_are_those_of_the_room():
    held, ids = _prefix(_engine(), headroom=64)
    longer, _ = _prefix(_engine(), headroom=65)
    assert room_bytes(held, len(ids)) == 64 * (longer.nbytes - held.nbytes)
