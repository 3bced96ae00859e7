"""``cachelink-bench two-node`` between two real daemons, on a tiny model."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import get_args

import msgspec
import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.serial.nodes import serial_receiver_daemon, serial_sender_daemon
from cachelink_bench.two_node.corpus import Corpus
from cachelink_bench.two_node.parts import make_parts
from cachelink_bench.two_node.plan import Mode, Plan, context_tokens
from cachelink_bench.two_node.prefill_times import PrefillTimes, capture_folder
from cachelink_bench.two_node.results import WideKv, read_results
from cachelink_bench.two_node.runs import FORMAT
from cachelink_bench.two_node.subjects import make_subjects
from cachelink_bench.two_node.tables import markdown
from cachelink_core.errors import ConfigError
from cachelink_core.testing.tiny_models import save_tiny
from tests.loopback.nodes import pair_of, receiver_of, sender_of, tiny_engine

pytestmark = pytest.mark.slow

CONTEXTS = ("300", "1k")
NAMES = ("text", "native", "native+zstd", "int4")
DECODE = 5
SESSION = b'{"session":'
"""How a line of the log begins that is no run."""
FIRST_SENTENCES = [
    "The watchword of the archive at Lorstow is Bardorvek.",
    "Between Torford and Ulthorpe lies a grey meadow where 57 sheep graze in late autumn.",
]
"""Of the seed "8k 0": recorded results name documents by their number, so these must not change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two-node")


@pytest.fixture(scope="module")
def engine(folder):
    return tiny_engine(folder, "llama")


@pytest.fixture(scope="module")
def pair(folder, engine):
    with pair_of(engine, tiny_engine(folder, "llama")) as pair:
        yield pair


@pytest.fixture(scope="module")
def serial_pair(folder, engine):
    makes = {"make_sender": serial_sender_daemon, "make_receiver": serial_receiver_daemon}
    with pair_of(engine, tiny_engine(folder, "llama"), **makes) as pair:
        yield pair


def options(pair, folder, out, **changed) -> list[str]:
    given = {
        "sender": pair.ask_sender.address, "receiver": pair.ask_receiver.address,
        "model": folder / "llama-float32", "contexts": ",".join(CONTEXTS),
        "representations": ",".join(NAMES), "documents": 2, "repeats": 2, "decode": DECODE,
        "out": out, **changed,
    }  # fmt: skip
    return ["two-node", *(str(x) for k, v in given.items() for x in (f"--{k}", v))]


@pytest.fixture(scope="module")
def ran(pair, folder):
    out = folder / "out"
    argv = [*options(pair, folder, out), "--note", "a tiny model"]
    assert bench.main(argv) == 0
    return out


def own_environment() -> dict[str, str]:
    """For a process that finds our packages where this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def error_of(capsys, argv: list[str], status: int = 1) -> str:
    assert bench.main(argv) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("cachelink-bench two-node: ")


def test_every_row_has_every_run_and_every_time(ran):
    results = read_results(ran / "two-node.json")
    assert [(r.context, r.representation) for r in results.rows] == [
        (context, name) for context in CONTEXTS for name in NAMES
    ]
    assert len(results.runs) == len(CONTEXTS) * 2 * (1 + 2 * len(NAMES))
    for row in results.rows:
        assert row.runs == row.compared == 4
        assert all(len(spread.runs) == 4 for spread in row.metrics.values())
        moved = row.representation != "text"
        assert row.mode == ("overlapped" if moved else "")
        for name in ("start_s", "send_s", "load_s", "install_s", "gbit_per_s", "handoff_s"):
            assert (name in row.metrics) == moved
        assert (row.metrics["remote_prefill_s"].median > 0) == (not moved)
        assert 0 < row.metrics["first_token_s"].median < row.metrics["round_trip_s"].median
        if row.representation.startswith(("text", "native")):
            assert row.equal == 4
    assert [item.context for item in results.prefills] == list(CONTEXTS)
    assert all(len(item.seconds.runs) == 2 for item in results.prefills)


def test_phases_of_one_clock_stay_within_the_clients_round_trip(ran):
    for run in read_results(ran / "two-node.json").runs:
        if run.ids:
            assert len(run.ids) == DECODE
            handoff_s = run.handoff.get("total", 0.0)
            assert handoff_s + run.answer["total"] <= run.round_trip_s
            parts = ("wait", "queue", "prefix", "prepare", "query_prefill", "decode", "finish")
            spent_s = sum(run.answer.get(part, 0.0) for part in parts)
            assert spent_s == pytest.approx(run.answer["total"], rel=0.02)
            if run.handoff:
                parts = ("start", "prefill_wait", "reserve", "send", "tail")
                spent_s = sum(run.handoff[part] for part in parts)
                assert spent_s == pytest.approx(handoff_s, rel=0.02)


def test_serial_nodes_give_the_columns_of_one_stage_after_another(serial_pair, folder, tmp_path):
    assert bench.main([*options(serial_pair, folder, tmp_path, contexts="1k"), "--serial"]) == 0
    results = read_results(tmp_path / "two-node.json")
    assert results.config.modes == ("serial",)
    assert str(results.nodes["sender"]).endswith("+serial")
    for run in results.runs:
        if "send" in run.handoff:
            assert run.mode == "serial"
            # All of the encoding before the first frame, all of the decoding after the last one.
            assert run.handoff["encode"] <= run.handoff["start"]
            assert run.handoff["load_busy"] <= run.handoff["load"]
    report = (tmp_path / "two-node.md").read_text()
    heading = "payload MB | prefill | serialize | send | load | install | remote prefill"
    assert heading in " ".join(report.split())
    assert "*send* (sender's clock)" not in report  # nothing overlapped was measured


def test_nodes_of_the_other_mode_are_refused(pair, serial_pair, folder, tmp_path, capsys):
    out = tmp_path / "out"
    line = error_of(capsys, [*options(pair, folder, out), "--serial"])
    assert line.startswith(f"--sender {pair.ask_sender.address} is no serial node (")
    assert line.endswith("python -m cachelink_bench.serial sender")
    line = error_of(capsys, options(serial_pair, folder, out))
    assert line.startswith(f"--sender {serial_pair.ask_sender.address} is a serial node (")
    assert not out.exists()


def test_the_table_and_the_csv_hold_the_same_runs(ran):
    report = (ran / "two-node.md").read_text()
    assert "| 1k (" in report
    assert "text → remote prefill" in report
    assert "native fp32+zstd" in report
    assert "One stage after another" not in report
    assert "Limits: a tiny model" in report
    with (ran / "two-node.csv").open() as file:
        lines = list(csv.DictReader(file))
    runs = read_results(ran / "two-node.json").runs
    read = [run.representation == "prefill" for run in runs]
    assert [float(line["round_trip_s"] or 0) for line in lines] == pytest.approx(
        [run.round_trip_s for run in runs]
    )
    assert [bool(line["prefill_s"]) for line in lines] == read
    assert [line["send_s"] + line["round_trip_s"] == "" for line in lines] == read
    assert [line["representation"] for line in lines] == [run.representation for run in runs]


def test_nothing_stays_in_either_node(ran, pair):
    for client in (pair.ask_sender, pair.ask_receiver):
        listed = client.caches()
        assert listed.caches == ()
        assert listed.reserved_bytes == 0


def test_the_documents_fill_their_class_and_are_recorded(ran, engine):
    for document in read_results(ran / "two-node.json").documents:
        total = document.tokens + document.question_tokens + DECODE
        assert context_tokens(document.context) - 150 < total <= context_tokens(document.context)
        assert len(document.text_digest) == len(document.ids_digest) == 64
    plan = Plan(contexts=CONTEXTS, documents=2, decode=DECODE)
    subjects, _ = make_subjects(plan, engine.tokens, 8192)
    recorded = read_results(ran / "two-node.json").documents
    assert [d.text_digest for d in recorded] == [s.text_digest for s in subjects[1:]]


def test_an_interrupted_run_goes_on(ran, pair, folder, tmp_path, capsys):
    whole = (ran / "two-node.runs.jsonl").read_bytes().split(b"\n")
    assert whole[1].startswith(SESSION)
    log = tmp_path / "two-node.runs.jsonl"
    # The session and 12 runs; half a line follows, as when a process is killed.
    log.write_bytes(b"\n".join(whole[:14]) + b"\n" + whole[14][:40])
    argv = options(pair, folder, tmp_path)
    assert "12 runs; --resume" in error_of(capsys, argv)
    assert "decode 5, this run 6" in error_of(
        capsys, [*options(pair, folder, tmp_path, decode=6), "--resume"]
    )
    assert bench.main([*argv, "--resume", "--note", "and another"]) == 0
    lines = log.read_bytes().split(b"\n")
    assert lines[:14] == whole[:14]
    assert lines[14].startswith(SESSION)
    key = ("context", "document", "repeat", "representation", "mode")
    held, again = (
        [json.loads(x) for x in y[1:-1] if not x.startswith(SESSION)] for y in (whole, lines)
    )
    assert [[r[k] for k in key] for r in held] == [[r[k] for k in key] for r in again]
    assert [r["ids"] for r in held] == [r["ids"] for r in again]
    results = read_results(tmp_path / "two-node.json")
    first, second = results.sessions
    assert first == msgspec.structs.replace(
        read_results(ran / "two-node.json").sessions[0], runs=12
    )
    assert (second.runs, second.note) == (len(held) - 12, "and another")
    assert results.load_average == max(first.load_average, second.load_average)
    report = (tmp_path / "two-node.md").read_text()
    assert "The worst that was recorded of the sessions below." in report
    assert f"- {first.began}: 12 runs; " in report
    assert "Limits: a tiny model and another" in report


def test_a_log_from_before_sessions_goes_on_and_its_prefill_without_a_time_is_measured(
    ran, pair, folder, tmp_path
):
    begin, _, *runs = (ran / "two-node.runs.jsonl").read_bytes().split(b"\n")[:14]
    prefill = json.loads(runs[0])
    assert prefill["representation"] == "prefill"
    runs[0] = json.dumps({**prefill, "handoff": {}}).encode()
    log = tmp_path / "two-node.runs.jsonl"
    log.write_bytes(b"\n".join([begin, *runs]) + b"\n")
    assert bench.main([*options(pair, folder, tmp_path), "--resume"]) == 0
    results = read_results(tmp_path / "two-node.json")
    (session,) = results.sessions
    assert session.runs == len(results.runs) - 12
    assert [len(item.seconds.runs) for item in results.prefills] == [2, 2]
    report = (tmp_path / "two-node.md").read_text()
    assert "- earlier: 12 runs, whose conditions were not recorded\n" in report
    assert "No prefill time" not in report


def test_a_prefill_without_a_time_is_named_and_measured_once_it_is_prefilled(
    pair, engine, folder, tmp_path
):
    changed = {"contexts": "300", "documents": 1, "repeats": 1}
    captures = {"capture_dir": tmp_path / "captures"}
    with pair_of(engine, tiny_engine(folder, "llama"), sender_config=captures) as capturing:
        for out in ("first", "second"):
            assert bench.main(options(capturing, folder, tmp_path / out, **changed)) == 0
    named = "No prefill time: 300 document 1 (overlapped)."
    for out, missing in (("first", False), ("second", True)):
        assert (named in (tmp_path / out / "two-node.md").read_text()) == missing
        assert bool(read_results(tmp_path / out / "two-node.json").prefills) != missing
    assert bench.main([*options(pair, folder, tmp_path / "second", **changed), "--resume"]) == 0
    assert named not in (tmp_path / "second" / "two-node.md").read_text()
    (prefill,) = read_results(tmp_path / "second" / "two-node.json").prefills
    assert (len(prefill.seconds.runs), prefill.earlier) == (1, "")


def test_the_report_says_which_model_each_class_ran_on(ran):
    results = read_results(ran / "two-node.json")
    nodes = {**results.nodes, "architecture": "Wide", "token_bytes": 131_072}
    model = f"model {results.config.model} (LlamaForCausalLM, float32)"
    assert f"; {model}; CacheLink" in markdown(results)
    some, every = (
        msgspec.structs.replace(results, wide_kv=WideKv(contexts=wide, nodes=nodes))
        for wide in (("1k",), CONTEXTS)
    )
    wide = "1k on the wide-KV model (Wide, float32)"
    assert f"; 300 on {model} and {wide}; CacheLink" in markdown(some)
    assert f"; 300, {wide}; CacheLink" in markdown(every)


def test_runs_of_another_version_are_refused(ran, pair, folder, tmp_path, capsys):
    log = tmp_path / "two-node.runs.jsonl"
    data = (ran / "two-node.runs.jsonl").read_bytes()
    log.write_bytes(data.replace(FORMAT.encode(), b"cachelink-two-node-0"))
    line = error_of(capsys, [*options(pair, folder, tmp_path), "--resume"])
    assert "format is 'cachelink-two-node-0'" in line
    assert log.read_bytes().startswith(b'{"format":"cachelink-two-node-0"')


def test_a_node_that_is_not_there_is_named(pair, folder, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    for role in ("sender", "receiver"):
        line = error_of(capsys, options(pair, folder, tmp_path / "out", **{role: free}))
        assert line.startswith(f"--{role} {free} cannot be reached")
    assert not (tmp_path / "out").exists()


def test_a_receiver_of_another_model_is_refused_before_anything_moves(
    engine, folder, tmp_path, capsys
):
    other = tiny_engine(folder, "qwen3")
    with (
        receiver_of(other) as receiver,
        sender_of(engine, {"other": receiver.addresses["grpc"]}) as sender,
    ):
        argv = ["--sender", sender.addresses["grpc"], "--receiver", receiver.addresses["grpc"]]
        capsys.readouterr()  # what the daemons said at their start
        line = error_of(capsys, ["two-node", *argv, "--out", str(tmp_path / "out")])
    assert "architecture: ours Qwen3ForCausalLM, theirs LlamaForCausalLM" in line
    assert not (tmp_path / "out").exists()


def test_a_receiver_that_the_sender_does_not_list_is_an_error(pair, folder, tmp_path, capsys):
    line = error_of(capsys, options(pair, folder, tmp_path, **{"receiver-name": "elsewhere"}))
    assert "no 'elsewhere'; it knows local" in line
    swapped = {"sender": pair.ask_receiver.address}
    argv = options(pair, folder, tmp_path, **swapped)
    assert error_of(capsys, argv).startswith(f"--sender {pair.ask_receiver.address} is no sender")


def test_a_node_that_dies_is_one_line_with_what_was_done_and_how_to_go_on(engine, folder, tmp_path):
    log = tmp_path / "two-node.runs.jsonl"
    with pair_of(engine, tiny_engine(folder, "llama")) as pair:
        command = [sys.executable, "-m", "cachelink_bench"]
        command += options(pair, folder, tmp_path, repeats=200)
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=own_environment()
        ) as process:
            try:
                while not log.exists() or log.read_bytes().count(b"\n") < 5:
                    assert process.poll() is None, process.stderr.read()
                    time.sleep(0.01)
                pair.receiver.stop()
                said = process.communicate(timeout=60)[1]
            finally:
                process.kill()  # nothing, if it has ended
    assert process.returncode == 1
    (line,) = said.splitlines()
    line = line.removeprefix("cachelink-bench two-node: ")
    assert re.match(r"(300|1k) document [12]: [a-z0-9+]+: .", line)
    assert line.endswith("; --resume goes on with what was measured")
    assert [path.name for path in tmp_path.iterdir()] == [log.name]


def test_nodes_that_ask_for_a_token_are_reached_with_it(engine, folder, tmp_path, capsys):
    secret = tmp_path / "lab.token"
    secret.write_text("a token of the laboratory\n")
    asks = {"auth": {"tokens": {"lab": {"file": str(secret)}}}}
    with (
        receiver_of(tiny_engine(folder, "llama"), **asks) as receiver,
        sender_of(
            engine,
            {"far": {"address": receiver.addresses["grpc"], "token": {"file": str(secret)}}},
            **asks,
        ) as sender,
    ):
        argv = ["two-node", "--sender", sender.addresses["grpc"]]
        argv += ["--receiver", receiver.addresses["grpc"], "--model", str(folder / "llama-float32")]
        argv += ["--contexts", "300", "--representations", "text,native", "--documents", "1"]
        argv += ["--repeats", "1", "--decode", str(DECODE), "--out", str(tmp_path / "out")]
        capsys.readouterr()  # what the daemons said at their start
        assert "token" in error_of(capsys, argv)
        assert "cannot be read" in error_of(capsys, [*argv, "--token-file", str(tmp_path / "no")])
        assert not (tmp_path / "out").exists()
        assert bench.main([*argv, "--token-file", str(secret)]) == 0
    stored = (tmp_path / "out" / "two-node.json").read_text()
    assert "laboratory" not in stored
    resolved = json.loads(stored)["resolved"]
    assert (resolved["link"], resolved["threads"], resolved["decode"]) == (None, None, DECODE)


def test_a_place_that_cannot_be_written_is_one_line_before_anything_runs(
    pair, folder, tmp_path, capsys
):
    taken = tmp_path / "file"
    taken.touch()
    for out in (taken, taken / "below"):
        line = error_of(capsys, options(pair, folder, out))
        assert line == f"--out is {str(out)!r}: {str(taken)!r} is no folder"


def test_progress_shows_the_time_left_on_a_terminal():
    script = (
        "import time\n"
        "from cachelink_bench.two_node.progress import watching\n"
        "with watching() as watch:\n"
        "    show = watch(100.0)\n"
        "    for _ in range(8):\n"
        "        show('2k document 1: int4+zstd', 10.0)\n"
        "        time.sleep(0.3)\n"
    )
    ours, theirs = pty.openpty()
    environment = own_environment() | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how a terminal ends on Linux
            while data := os.read(ours, 65536):
                shown += data
    os.close(ours)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert re.search(r"2k document 1: int4\+zstd .* 80% 0:00:\d\d left 0:00:\d\d", plain)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"contexts": "8q"}, "'8q'"),
        ({"contexts": "2k,2k"}, "2k,2k"),
        ({"contexts": "40"}, "no sentence"),
        ({"contexts": "512k"}, "window"),
        ({"representations": "text,int5"}, "'int5'"),
        ({"documents": 0}, "documents is 0"),
        ({"decode": 0}, "decode is 0"),
    ],
)
def test_wrong_values_are_one_clear_line(pair, folder, tmp_path, capsys, changed, words):
    assert words in error_of(capsys, options(pair, folder, tmp_path / "out", **changed))
    assert not (tmp_path / "out").exists()


def test_either_two_daemons_or_a_link_to_emulate(capsys):
    for argv in (
        [],
        ["--sender", "a:1"],
        ["--sender", "a:1", "--receiver", "b:2", "--emulate", "1gbit"],
    ):
        with pytest.raises(SystemExit, match="2"):
            bench.main(["two-node", *argv])
        assert "give --sender and --receiver, or --emulate" in capsys.readouterr().err


def test_a_class_beyond_the_window_is_left_out_with_the_reason(engine):
    plan = Plan(contexts=("300", "2k"), documents=1, decode=DECODE)
    subjects, left_out = make_subjects(plan, engine.tokens, 2000)
    assert {s.context for s in subjects} == {"warm-up", "300"}
    assert [(x.context, x.reason) for x in left_out] == [
        ("2k", "2048 tokens exceed the model's window of 2000")
    ]
    with pytest.raises(ConfigError, match="2048 tokens exceed"):
        make_subjects(Plan(contexts=("2k",)), engine.tokens, 2000)


def test_wide_classes_need_daemons_that_are_started_here(pair, folder, tmp_path):
    argv = options(pair, folder, tmp_path, contexts="300,256k", documents=1, repeats=1)
    assert bench.main(argv) == 0
    (left_out,) = read_results(tmp_path / "two-node.json").left_out
    assert left_out.context == "256k"
    assert "on daemons that are started here (--emulate)" in left_out.reason


def test_classes_beyond_the_window_are_cut_for_the_wide_model(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_tiny("llama", tmp_path / "model", max_position_embeddings=600)
    plan = Plan(
        contexts=("300", "2k", "64k"), documents=1, decode=DECODE, model=str(tmp_path / "model")
    )
    (small, wide), left_out = make_parts(plan, None, started_here=True)
    assert (small.plan.contexts, wide.plan.contexts) == (("300",), ("2k",))
    assert (small.bytes_only, wide.bytes_only) == (False, True)
    assert "text" not in wide.plan.representations
    (warm_up, document) = wide.subjects
    assert warm_up.context == "warm-up"
    assert 1900 < document.tokens + document.question_tokens + DECODE <= 2048
    assert [(item.context, "bytes-only" in item.reason) for item in left_out] == [
        ("64k", False),
        ("2k", True),
    ]
    (only,), left_out = make_parts(
        msgspec.structs.replace(plan, wide_kv=False), None, started_here=True
    )
    assert only.plan.contexts == ("300",)
    assert [item.context for item in left_out] == ["2k", "64k"]


def test_earlier_prefill_times_are_those_of_this_machine_and_model(tmp_path):
    times = PrefillTimes(tmp_path, "two cores", "model")
    times.add("a", 1.5)
    times.add("a", 2.5)
    again = PrefillTimes(tmp_path, "two cores", "model")
    assert again.get("a").seconds == 2.5
    assert again.get("a").date.endswith("UTC")
    assert again.get("b") is None
    for other in (
        PrefillTimes(tmp_path, "four", "model"),
        PrefillTimes(tmp_path, "two cores", "x"),
    ):
        assert other.get("a") is None
    kept_nowhere = PrefillTimes(None, "two cores", "model")
    kept_nowhere.add("c", 1.0)
    assert PrefillTimes(tmp_path, "two cores", "model").get("c") is None
    (tmp_path / "prefill-times.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"prefill-times\.jsonl"):
        PrefillTimes(tmp_path, "two cores", "model")


def test_every_setting_and_mode_has_captures_of_its_own(tmp_path):
    settings = ("two cores, threads 1", "two cores, threads 2")
    folders = [
        capture_folder(tmp_path, setting, mode) for setting in settings for mode in get_args(Mode)
    ]
    assert len(set(folders)) == 4
    assert {folder.parent for folder in folders} == {tmp_path}
    assert capture_folder(tmp_path, settings[0], "overlapped") == folders[0]


def test_a_corpus_is_the_same_for_the_same_seed_and_states_its_answer_once():
    one, same, other = Corpus("8k 0"), Corpus("8k 0"), Corpus("8k 1")
    first = [text for text, _ in zip(one.sentences(), range(500), strict=False)]
    assert first == [text for text, _ in zip(same.sentences(), range(500), strict=False)]
    assert sum(one.watchword in text for text in first) == 1
    assert one.watchword in first[0]
    assert next(other.sentences()) != first[0]
    assert first[:2] == FIRST_SENTENCES
    assert len(set(first)) > 490
