"""``cachelink-bench pipeline`` over two real daemons with a tiny model."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.pipeline import SMOKE
from cachelink_bench.pipeline_runs import (
    ARMS,
    PIPELINED,
    SERIAL,
    Run,
    _check,
    _watching,
    make_tasks,
)
from cachelink_core.errors import InternalError, LinkError
from cachelink_core.rpc.client import ReceiverClient
from cachelink_core.testing.tiny_models import save_tiny


@pytest.mark.slow
def test_both_arms_run_and_give_the_same_answers(tmp_path, capsys, monkeypatch):
    model, path = save_tiny("llama", tmp_path / "model"), tmp_path / "out.json"
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    page = tmp_path / "out.md"
    places = ("--json", str(path), "--markdown", str(page))
    assert bench.main(["pipeline", "--smoke", "--model", str(model), *places]) == 0
    document = json.loads(path.read_text())
    shown = capsys.readouterr().out
    assert "answers equal token for token" in shown
    assert "no verdict: a smoke run" in shown
    assert document["command"] == "cachelink-bench pipeline --smoke --model model"
    assert page.read_text() == f"# One-slot pipeline\n\n{document['date']}, " + (
        f"`{document['command']}`\n\n{shown}"
    )
    assert document["target_met"] is None, "a smoke run supports no claim"
    assert document["most_alive"] <= 2
    assert len(document["prefix_tokens"]) == SMOKE["documents"]
    for arm in ARMS:
        runs = document["runs"][arm]
        assert len(runs) == SMOKE["rounds"]
        assert all(len(run["answer_s"]) == SMOKE["documents"] for run in runs)
    assert len(document["serial_to_pipelined"]["runs"]) == SMOKE["rounds"]


def test_the_expectation_is_that_of_one_slot():
    run = Run(wall_s=12.0, prepare_s=(2.0, 2.0, 5.0), answer_s=(1.0, 1.0, 1.0), most_alive=1)
    assert run.one_slot_s == 2.0 + max(2.0, 1.0) + max(5.0, 1.0) + 1.0
    assert run.endless_ratio == 12.0 / 9.0


def test_documents_differ_and_name_their_answer():
    tasks = make_tasks(4, 3, 7)
    assert len({task.prefix.text for task in tasks}) == 4
    assert {task.sampling.max_new_tokens for task in tasks} == {7}
    for task in tasks:
        place = task.query.text.rstrip("?").rpartition(" ")[2]
        assert place in task.prefix.text


def test_a_third_cache_ends_the_benchmark():
    with pytest.raises(InternalError, match=f"{PIPELINED}: 3 caches"):
        _check(PIPELINED, Run(1.0, (), (), most_alive=3), [], [])
    _check(SERIAL, Run(1.0, (), (), most_alive=1), [], [])


def test_a_receiver_that_cannot_be_watched_ends_the_benchmark():
    def run():
        with ReceiverClient("127.0.0.1:1") as receiver, _watching(receiver):
            (watcher,) = [each for each in threading.enumerate() if each.name == "watch-caches"]
            watcher.join(60)

    with pytest.raises(LinkError):
        run()
