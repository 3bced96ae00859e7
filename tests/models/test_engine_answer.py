"""Answers: what is counted, when they end, what they refuse, and that they can overlap."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from cachelink_core.engine.base import Delta, Finish, FinishReason, Sampling
from cachelink_core.engine.executor import DeviceExecutor
from cachelink_core.errors import (
    BudgetExceeded,
    EmptyQuery,
    HeadroomExceeded,
    InvalidRequest,
    QueryTooLong,
)
from cachelink_core.testing.tiny_engines import tiny_engine
from cachelink_core.testing.tiny_tokenizer import EOS_ID

BLOCK = 16
QUERY = (40, 51, 62, 73, 84)
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True)


@cache
def _engine():
    return tiny_engine("llama")


def _ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 270, (count,), generator=generator).tolist()


@cache
def _prefix():
    """A prefilled cache that tests copy and never change."""
    engine, ids = _engine(), _ids(40)
    filled = engine.open_cache(40, 0, whole=True)
    engine.prefill(filled, ids, BLOCK)
    return filled, ids


def _answer(sampling=GREEDY, query=QUERY, cancelled=None, headroom=64):
    """(deltas, finish, cache) of an answer on a copy of the prefix."""
    filled, ids = _prefix()
    own = filled.copy(40, headroom)
    items = list(_engine().answer(own, ids, query, sampling, cancelled))
    assert all(isinstance(item, Delta) for item in items[:-1])
    assert isinstance(items[-1], Finish)
    return items[:-1], items[-1], own


def _model_tokens() -> int:
    """The engine's count, the prefix that tests share already read."""
    _prefix()
    return _engine().model_tokens


def _text(deltas) -> str:
    return "".join(delta.text for delta in deltas)


def _whole_text(ids) -> str:
    return _engine().tokens.decode(ids)


def test_tokens_are_counted_in_the_model():
    before = _model_tokens()
    deltas, finish, own = _answer()
    assert finish.reason is FinishReason.LENGTH
    assert finish.query_tokens == 5
    assert len(finish.generated_ids) == 24
    assert finish.model_tokens == _model_tokens() - before == 5 + 24 - 1
    assert own.length == 40 + 5 + 24 - 1
    assert tuple(i for delta in deltas for i in delta.token_ids) == finish.generated_ids
    assert finish.query_prefill_s > 0
    assert finish.decode_s > 0
    assert finish.device_wait_s >= 0


def test_an_answer_of_one_token_reads_the_query_only():
    _, finish, own = _answer(replace(GREEDY, max_new_tokens=1), headroom=5)
    assert finish.model_tokens == 5
    assert own.length == own.capacity == 45


def test_only_the_last_position_gets_logits():
    engine, rows = tiny_engine("llama"), []
    head = engine._runner._model.lm_head
    head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    filled = engine.open_cache(20, 64, whole=True)
    engine.prefill(filled, _ids(20), BLOCK)
    list(engine.answer(filled, (), QUERY, replace(GREEDY, max_new_tokens=2)))
    assert rows == [1, 1, 1, 1]


def test_truncating_drops_an_answer_and_the_next_one_is_the_same():
    filled, ids = _prefix()
    own = filled.copy(40, 64)
    first = list(_engine().generate_steps(own, ids, QUERY, GREEDY))
    own.truncate(40)
    list(_engine().generate_steps(own, ids, (9, 9, 9), GREEDY))
    own.truncate(40)
    again = list(_engine().generate_steps(own, ids, QUERY, GREEDY))
    assert [s.token_id for s in first] == [s.token_id for s in again]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(first, again, strict=True))


def test_the_deltas_join_to_the_decoded_answer():
    deltas, finish, _ = _answer()
    assert _text(deltas) == _whole_text(finish.generated_ids)


def test_an_answer_goes_on_in_the_kept_cache_as_if_unbroken():
    """A conversation: query and answer stay, the next query follows the last token."""
    filled, ids = _prefix()
    whole = filled.copy(40, 64)
    one = list(_engine().generate_steps(whole, ids, QUERY, GREEDY))
    split = filled.copy(40, 64)
    first = list(_engine().generate_steps(split, ids, QUERY, replace(GREEDY, max_new_tokens=10)))
    rest = replace(GREEDY, max_new_tokens=14)
    second = list(_engine().generate_steps(split, ids, (first[-1].token_id,), rest))
    assert [s.token_id for s in one] == [s.token_id for s in first + second]


def test_cancellation_stops_within_one_token():
    asked = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 4

    before = _model_tokens()
    _, finish, _ = _answer(cancelled=cancelled)
    assert finish.reason is FinishReason.CANCELLED
    assert len(finish.generated_ids) == 4
    assert _model_tokens() - before == finish.model_tokens == 5 + 3


def test_a_cancelled_request_costs_nothing():
    before = _model_tokens()
    deltas, finish, own = _answer(cancelled=lambda: True)
    assert (deltas, finish.reason, finish.generated_ids) == ([], FinishReason.CANCELLED, ())
    assert (_model_tokens(), own.length) == (before, 40)
    assert (finish.decode_s, finish.query_prefill_s) == (0.0, 0.0)


def test_a_closed_stream_leaves_the_device_free():
    filled, ids = _prefix()
    stream = _engine().answer(filled.copy(40, 64), ids, QUERY, GREEDY)
    next(stream)
    stream.close()
    with _engine().executor.turn(urgent=False, timeout_s=0.0):
        pass


def test_an_end_of_sequence_token_ends_the_answer_and_has_no_text():
    """The model is made to like the end-of-sequence token by its own output matrix."""
    engine = tiny_engine("llama")
    assert engine.eos_ids == {1, 3}
    ids = _ids(20)
    filled = engine.open_cache(20, 64, whole=True)
    engine.prefill(filled, ids, BLOCK)
    steps = list(engine.generate_steps(filled, ids, QUERY, GREEDY))
    target = steps[6].token_id
    assert target not in [step.token_id for step in steps[:6]]
    weight = engine._runner._model.lm_head.weight
    weight[[target, EOS_ID]] = weight[[EOS_ID, target]]
    filled.truncate(20)
    items = list(engine.answer(filled, ids, QUERY, replace(GREEDY, ignore_eos=False)))
    assert items[-1].reason is FinishReason.STOP
    assert items[-1].generated_ids[-1] == EOS_ID
    assert len(items[-1].generated_ids) == 7
    assert _text(items[:-1]) == engine.tokens.decode(items[-1].generated_ids[:-1])
    filled.truncate(20)
    *_, finish = engine.answer(filled, ids, QUERY, GREEDY)
    assert (finish.reason, len(finish.generated_ids)) == (FinishReason.LENGTH, 24)


def test_a_stop_string_that_spans_tokens_ends_the_answer_before_it():
    _, finish, _ = _answer()
    ids = finish.generated_ids
    text = _whole_text(ids)
    pieces = [_whole_text((token_id,)) for token_id in ids]
    at = next(i for i in range(3, 23) if (pieces[i] + pieces[i + 1]).isascii())
    stop = pieces[at][-1] + pieces[at + 1][0]
    deltas, stopped, own = _answer(replace(GREEDY, stop=("no such text", stop)))
    assert stopped.reason is FinishReason.STOP
    assert _text(deltas) == text[: text.find(stop)]
    assert 1 < len(stopped.generated_ids) <= at + 2
    assert stopped.model_tokens == 5 + len(stopped.generated_ids) - 1
    assert own.length == 40 + stopped.model_tokens


def test_held_back_text_comes_in_a_last_delta_without_tokens():
    _, finish, _ = _answer()
    ids = finish.generated_ids
    last = next(i for i in range(24, 0, -1) if _whole_text(ids[i - 1 : i]).isascii())
    tail = _whole_text(ids[:last])[-1]
    sampling = replace(GREEDY, max_new_tokens=last, stop=(tail + "never follows",))
    deltas, finish, _ = _answer(sampling)
    assert (deltas[-1].text, deltas[-1].token_ids) == (tail, ())
    assert finish.reason is FinishReason.LENGTH
    assert _text(deltas) == _whole_text(ids[:last])


def test_logprobs_are_the_models_own():
    sampling = replace(GREEDY, logprobs=3, max_new_tokens=6, temperature=0.7, top_k=2, seed=5)
    deltas, _, _ = _answer(sampling)
    filled, ids = _prefix()
    steps = list(_engine().generate_steps(filled.copy(40, 64), ids, QUERY, sampling))
    for delta, step in zip((d for d in deltas if d.token_ids), steps, strict=True):
        (entry,) = delta.logprobs
        expected = torch.log_softmax(step.logits, dim=-1)
        assert entry.chosen == pytest.approx(float(expected[step.token_id]))
        assert [i for i, _ in entry.alternatives] == expected.topk(3).indices.tolist()
        assert [p for _, p in entry.alternatives] == pytest.approx(expected.topk(3).values.tolist())
    plain, _, _ = _answer()
    assert all(delta.logprobs == () for delta in plain)


@pytest.mark.parametrize(
    ("change", "query", "headroom", "error", "words"),
    [
        ({}, (), 64, EmptyQuery, "0 tokens"),
        ({}, (5, 320), 64, InvalidRequest, "320 is outside the vocabulary of 320"),
        ({}, (5, -1), 64, InvalidRequest, "-1 is outside"),
        ({}, QUERY, 27, HeadroomExceeded, "take 68 positions, the cache has room for 67"),
        ({"max_new_tokens": 1}, QUERY, 4, HeadroomExceeded, "45 positions.*44"),
        ({"max_new_tokens": 0}, QUERY, 64, InvalidRequest, "max_new_tokens 0"),
        ({"temperature": -0.1}, QUERY, 64, InvalidRequest, "temperature -0.1"),
        ({"temperature": float("nan")}, QUERY, 64, InvalidRequest, "temperature nan"),
        ({"top_p": 0.0}, QUERY, 64, InvalidRequest, "top_p 0.0"),
        ({"top_p": 1.5}, QUERY, 64, InvalidRequest, "top_p 1.5"),
        ({"top_k": -1}, QUERY, 64, InvalidRequest, "top_k -1"),
        ({"repetition_penalty": 0.0}, QUERY, 64, InvalidRequest, "repetition_penalty 0.0"),
        ({"seed": -1}, QUERY, 64, InvalidRequest, "seed -1"),
        ({"stop": ("",)}, QUERY, 64, InvalidRequest, "stop"),
        ({"logprobs": -1}, QUERY, 64, InvalidRequest, "logprobs -1"),
    ],
)
def test_a_wrong_request_is_refused_before_any_forward(change, query, headroom, error, words):
    filled, ids = _prefix()
    own = filled.copy(40, headroom)
    before = _model_tokens()
    with pytest.raises(error, match=words):
        _engine().answer(own, ids, query, replace(GREEDY, **change))
    assert (_model_tokens(), own.length) == (before, 40)


def test_the_models_window_is_a_limit():
    engine = tiny_engine("llama", max_position_embeddings=64)
    ids = _ids(65)
    filled = engine.open_cache(65, 64, whole=True)
    with pytest.raises(QueryTooLong, match="65 positions, the model has 64"):
        engine.prefill(filled, ids, BLOCK)
    engine.prefill(filled, ids[:50], BLOCK)
    with pytest.raises(QueryTooLong, match="65 positions, the model has 64"):
        engine.answer(filled, ids[:50], ids[50:60], replace(GREEDY, max_new_tokens=6))
    *_, finish = engine.answer(filled, ids[:50], ids[50:60], replace(GREEDY, max_new_tokens=5))
    assert filled.length == 64
    assert finish.reason is FinishReason.LENGTH


def test_a_prefix_outside_the_vocabulary_or_the_room_is_refused():
    engine = _engine()
    filled = engine.open_cache(4, 0, whole=True)
    with pytest.raises(InvalidRequest, match="prefix id 999"):
        engine.prefill(filled, [1, 2, 999], BLOCK)
    with pytest.raises(HeadroomExceeded, match="5 positions, the cache has room for 4"):
        engine.prefill(filled, [1, 2, 3, 4, 5], BLOCK)
    assert filled.length == 0


def test_a_cache_beyond_the_budget_is_not_allocated():
    engine = _engine()
    needed = engine.cache_bytes(100, 28, whole=True)
    assert needed == engine.open_cache(100, 28, whole=True, capacity_bytes=needed).nbytes
    with pytest.raises(BudgetExceeded, match=f"{needed} bytes, the budget has {needed - 1}"):
        engine.open_cache(100, 28, whole=True, capacity_bytes=needed - 1)


def test_two_answers_and_a_prefill_at_once_are_all_right():
    engine, (filled, ids) = _engine(), _prefix()
    queries = [QUERY, (7, 8, 9)]
    expected = [list(engine.generate_steps(filled.copy(40, 64), ids, q, GREEDY)) for q in queries]
    results: dict[object, object] = {}
    start = threading.Barrier(3)

    def answer(query) -> None:
        own = filled.copy(40, 64)
        start.wait()
        results[query] = list(engine.generate_steps(own, ids, query, GREEDY))

    def prefill() -> None:
        other = engine.open_cache(200, 0, whole=True)
        start.wait()
        engine.prefill(other, _ids(200, seed=3), BLOCK)
        results["prefill"] = other

    threads = [threading.Thread(target=answer, args=(query,)) for query in queries]
    threads.append(threading.Thread(target=prefill))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for query, alone in zip(queries, expected, strict=True):
        together = results[query]
        assert [s.token_id for s in together] == [s.token_id for s in alone]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(together, alone, strict=True))
    again = engine.open_cache(200, 0, whole=True)
    engine.prefill(again, _ids(200, seed=3), BLOCK)
    assert torch.equal(again.tensor(2, "V", 0, 200), results["prefill"].tensor(2, "V", 0, 200))


def test_the_wait_for_the_device_is_part_of_the_account():
    turns: list[tuple[bool, float]] = []
    executor = DeviceExecutor(on_turn=lambda urgent, waited_s: turns.append((urgent, waited_s)))
    engine = tiny_engine("llama", executor=executor)
    ids = _ids(20)
    filled = engine.open_cache(20, 64, whole=True)
    engine.prefill(filled, ids, BLOCK)
    assert [urgent for urgent, _ in turns] == [False, False]
    items: list[object] = []
    stream = engine.answer(filled, ids, QUERY, replace(GREEDY, max_new_tokens=2))
    thread = threading.Thread(target=lambda: items.extend(stream))
    with engine.device_turn(urgent=False):
        thread.start()
        while not executor.waiting(urgent=True):
            time.sleep(0.001)
        time.sleep(0.05)
    thread.join(60)
    finish = items[-1]
    assert 0.05 <= finish.device_wait_s <= finish.query_prefill_s + finish.decode_s
    assert [urgent for urgent, _ in turns[2:]] == [False, True, True]
