"""The one-slot pipeline over two real daemons, and as a command of the tool."""

from __future__ import annotations

import json
import threading
import time

import pytest

from cachelink_core.cli import main
from cachelink_core.errors import UnknownCache
from cachelink_core.rpc.client import (
    Document,
    HandoffStages,
    HeldCache,
    Question,
    Sampling,
    Stop,
    Task,
    TokenIds,
    pipelined,
)

ITEMS = 5
SAMPLING = Sampling(max_new_tokens=12, ignore_eos=True)


def task(number: int, repeats: int = 6) -> Task:
    text = f"Room {number} holds the sea and the sand, and the other thing. " * repeats
    return Task(Document(text), Question(f"What does room {number} hold?"), SAMPLING)


TASKS = [task(number) for number in range(ITEMS)]


@pytest.fixture
def stages(pair):
    return HandoffStages(pair.ask_sender, pair.ask_receiver, "local")


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No thread of the pipeline, and no cache at the receiver, whatever happened."""
    pair = request.getfixturevalue("pair")
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("prepare")]
    assert [c.cache_id for c in pair.ask_receiver.caches().caches] == []


def serial(stages, tasks):
    answers = []
    for each in tasks:
        prepared = stages.prepare(each, Stop())
        answers.append(stages.answer(prepared, Stop()))
        stages.release(prepared)
    return answers


def test_outputs_are_those_of_serial_calls_in_order(pair, stages):
    expected = [answered.token_ids for answered in serial(stages, TASKS)]
    assert len(set(expected)) > 1, "one answer for all would prove no order"
    with pipelined(TASKS, stages) as outcomes:
        done = list(outcomes)
    assert [o.item for o in done] == TASKS
    assert [o.value().token_ids for o in done] == expected
    for outcome in done:
        final = outcome.value().final
        assert final.path == "exact"
        assert final.cache_id == outcome.value().receipt.cache_id
    assert pair.ask_sender.caches().caches == (), "evicted there too"


def test_at_most_two_caches_are_at_the_receiver_at_any_moment(pair, stages):
    counts, ended = [], threading.Event()

    def watch():
        while not ended.is_set():
            listing = pair.ask_receiver.caches()
            # A cache that is still arriving is reserved bytes, not yet an entry.
            counts.append(len(listing.caches) + (listing.reserved_bytes > 0))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pipelined([*TASKS, *(task(n, 9) for n in range(ITEMS))], stages) as outcomes:
            for outcome in outcomes:
                outcome.value()
    finally:
        ended.set()
        watcher.join()
    assert len(counts) > ITEMS
    assert max(counts) == 2


def test_a_failed_preparation_surfaces_at_its_item(stages):
    broken = Task(HeldCache("nothing-like-it"), Question("What?"), SAMPLING)
    tasks = [TASKS[0], broken, TASKS[1], broken, broken, TASKS[2]]
    expected = [a.token_ids for a in serial(stages, TASKS[:3])]
    with pipelined(tasks, stages) as outcomes:
        done = list(outcomes)
    assert [type(o.error) for o in done if o.item is broken] == [UnknownCache] * 3
    assert [o.value().token_ids for o in done if o.item is not broken] == expected


def test_a_failed_answer_surfaces_at_its_item(stages):
    beyond = Task(TASKS[1].prefix, TokenIds((2**31,)), SAMPLING)
    with pipelined([TASKS[0], beyond, TASKS[2]], stages) as outcomes:
        done = list(outcomes)
    assert [o.error is None for o in done] == [True, False, True]
    assert "vocabulary" in str(done[1].error)


def test_questions_about_one_document_share_its_cache(pair, stages):
    tasks = [Task(TASKS[0].prefix, Question(f"Number {n}?"), SAMPLING) for n in range(3)]
    before = pair.sender_engine.model_tokens
    with pipelined(tasks, stages) as outcomes:
        answers = [o.value() for o in outcomes]
    assert pair.sender_engine.model_tokens - before == answers[0].receipt.tokens
    assert len({a.receipt.cache_id for a in answers}) == 1
    assert [a.receipt.already_installed for a in answers] == [False, True, True]


def test_what_the_nodes_held_before_stays(pair, stages):
    held = pair.ask_sender.handoff(TASKS[0].prefix, "local")
    with pipelined(TASKS[:2], stages) as outcomes:
        assert all(o.error is None for o in outcomes)
    assert [c.cache_id for c in pair.ask_receiver.caches().caches] == [held.cache_id]
    assert [c.cache_id for c in pair.ask_sender.caches().caches] == [held.sender_cache_id]
    pair.clear()


def test_leaving_early_evicts_what_was_prepared(stages):
    with pipelined(TASKS, stages) as outcomes:
        assert next(outcomes).error is None
        assert next(outcomes).error is None


def test_cancelling_from_another_thread_ends_a_running_answer(stages):
    endless = Sampling(max_new_tokens=60, ignore_eos=True)
    tasks = [Task(each.prefix, each.query, endless) for each in TASKS]
    with pipelined(tasks, stages) as outcomes:
        timer = threading.Timer(0.05, outcomes.cancel)
        timer.start()
        began = time.monotonic()
        done = list(outcomes)
        timer.join()
    assert len(done) < ITEMS
    assert all(o.error is None for o in done)
    assert time.monotonic() - began < 10


@pytest.fixture
def run(pair, tmp_path, capsys):
    """Runs the command over lines; returns exit code, the lines printed and standard error."""

    def run(lines, *arguments):
        path = tmp_path / "items.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        nodes = ("--sender", pair.ask_sender.address, "--node", pair.ask_receiver.address)
        with pytest.raises(SystemExit) as left:
            main(["pipeline", "--items", str(path), *nodes, *arguments])
        captured = capsys.readouterr()
        return left.value.code, [json.loads(o) for o in captured.out.splitlines()], captured.err

    return run


def test_the_command_prints_one_line_an_item(run, stages, tmp_path):
    (tmp_path / "room.txt").write_text(TASKS[0].prefix.text)
    code, lines, err = run(
        [
            {"document": "room.txt", "question": TASKS[0].query.text},
            {"text": TASKS[1].prefix.text, "question": TASKS[1].query.text},
        ],
        "--max-new-tokens",
        "12",
        "--ignore-eos",
    )
    assert (code, err) == (0, "")
    expected = serial(stages, TASKS[:2])
    assert [line["token_ids"] for line in lines] == [list(a.token_ids) for a in expected]
    assert [line["text"] for line in lines] == [a.text for a in expected]
    assert [line["item"] for line in lines] == [0, 1]


def test_the_command_goes_on_after_a_missing_document_and_exits_with_its_code(run):
    code, lines, _ = run(
        [
            {"document": "nowhere.txt", "question": "What?"},
            {"text": TASKS[1].prefix.text, "question": "What?"},
        ],
        "--max-new-tokens",
        "4",
    )
    assert code == 2
    assert lines[0]["error"]["reason"] == "invalid_request"
    assert "nowhere.txt" in lines[0]["error"]["message"]
    assert lines[1]["path"] == "exact"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"question": "What?"}, "exactly one"),
        ({"question": "What?", "text": "a", "document": "b"}, "exactly one"),
        ({"document": "b"}, "question"),
        ({"document": "-", "question": "What?"}, "give a file"),
        ({"text": "a", "question": "What?", "extra": 1}, "extra"),
    ],
)
def test_the_command_refuses_a_wrong_line_before_it_begins(run, line, named):
    code, lines, err = run([{"text": "a", "question": "What?"}, line])
    assert (code, lines) == (2, [])
    assert "line 2" in err
    assert named in err
