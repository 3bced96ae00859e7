"""``cachelink-bench peers`` between real processes, on a tiny model's cache."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from xxhash import xxh3_128_hexdigest

from cachelink_bench import __main__ as bench
from cachelink_bench import framed_socket
from cachelink_bench.peers.pair import Site
from cachelink_bench.peers.payload import Size, write_payloads
from cachelink_bench.peers.place import Place
from cachelink_bench.peers.results import results_text, summed_up
from cachelink_bench.peers.rounds import Field, Run
from cachelink_bench.peers.rows import SOCKET, Row, make_rows
from cachelink_bench.peers.running import Measured
from cachelink_bench.peers.verdicts import Verdict, judge
from cachelink_core.engine.spill import load_cache
from cachelink_core.errors import ChecksumMismatch, ConfigError
from cachelink_core.testing.tiny_models import save_tiny
from tests.loopback.test_emulation import needs_link

pytestmark = pytest.mark.slow

TOKENS = 70
BLOCK = 32
OURS = ("native", "native-no-digests", "int8", "int4")
KIB = 1024
START_S = 200
"""A busy machine must not look like a missing peer."""

END = """
    from cachelink_bench.peers.plain_socket import Receiver, Sender as Honest
    from cachelink_bench.peers.place import Sent
    import os, time

    class Sender(Honest):
        def send(self):
            {send}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


def options(model, *more: object) -> list[str]:
    given = [
        "--model", model, "--tokens", TOKENS, "--block-tokens", BLOCK,
        "--start-deadline", START_S, *more,
    ]  # fmt: skip
    return ["peers", "--smoke", *map(str, given)]


@pytest.fixture(scope="module")
def ran(model, tmp_path_factory):
    """The document and the report of a smoke run, with a peer that cannot be imported."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "mooncake.py").write_text("raise ImportError('libibverbs.so.1 is not here')\n")
    rows = ",".join(("socket-again", "framed", "grpc", "mooncake", *OURS))
    files = ("--json", folder / "out.json", "--markdown", folder / "out.md")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr("cachelink_bench.kept.platformdirs.user_cache_dir", lambda _: str(folder))
        assert bench.main(options(model, "--rows", rows, *files)) == 0
    return json.loads((folder / "out.json").read_text()), (folder / "out.md").read_text()


def keys(document) -> list[str]:
    planes = [f"{key}@{plane}" for plane in ("grpc", "tcp") for key in OURS]
    return ["socket", "socket-again", "framed", "grpc", *planes]


def test_every_row_is_in_the_table_with_its_runs(ran):
    document, report = ran
    (results,) = document["results"].values()
    assert list(results) == keys(document)
    for key, result in results.items():
        rounds = [run for run in document["runs"] if run["row"] == key]
        assert result["runs"] == len(rounds) >= 2
        assert len(result["wall_s"]["runs"]) == len(rounds)
        assert 0 < result["wall_s"]["median"] <= result["p95_s"] <= result["max_s"]
        assert result["sender_cpu_s_per_gb"] > 0 < result["receiver_cpu_s_per_gb"]
        assert f"| {result['name']} " in report
    # One before the first row and one behind each.
    assert results["socket"]["runs"] == 2 * (1 + len(keys(document)) - 1)


def test_every_run_was_verified_and_found_right(ran):
    document, report = ran
    assert all(run["verified"] and run["right"] for run in document["runs"])
    assert document["wrong_from_cachelink"] == 0
    assert "wrong content from CacheLink: 0 of 16 runs" in report


def test_a_missing_peer_is_named_with_its_reason(ran):
    document, report = ran
    assert list(document["left_out"]) == ["Mooncake, defaults"]
    assert "libibverbs.so.1 is not here" in document["left_out"]["Mooncake, defaults"]
    assert "left out: Mooncake, defaults: receiver: ImportError: libibverbs" in report
    assert "time ÷ NIXL: not judged: nixl: not among --rows" in report


def test_codecs_send_less_and_the_link_carries_no_less_than_the_payload(ran):
    document, _ = ran
    (results,) = document["results"].values()
    native = results["native@grpc"]["payload_bytes"]
    assert native == results["socket"]["payload_bytes"] == document["sizes"][0]["payload_bytes"]
    for plane in ("grpc", "tcp"):
        sent = [results[f"{key}@{plane}"]["payload_bytes"] for key in ("native", "int8", "int4")]
        assert sent == sorted(sent, reverse=True)
        assert sent[0] == native > sent[1] > sent[2]
    for result in results.values():
        assert result["device_bytes"] >= result["payload_bytes"]


def test_rows_stand_between_two_runs_of_the_socket(ran):
    document, _ = ran
    runs = document["runs"]
    rows = [at for at, run in enumerate(runs) if run["row"] != "socket"]
    assert len(rows) == 2 * (len(keys(document)) - 1)
    for at in rows:
        before, after = runs[at - 1], runs[at + 1]
        assert before["row"] == after["row"] == "socket"
        assert (runs[at]["before_s"], runs[at]["after_s"]) == (before["wall_s"], after["wall_s"])


@pytest.fixture
def field(tmp_path, monkeypatch):
    """Starts a field of rows over one small payload; modules are written by the test."""
    size = Size(0.0625, 64, 64 * KIB)
    np.arange(size.payload_bytes, dtype=np.uint8).tofile(tmp_path / "tokens-64.payload")
    monkeypatch.syspath_prepend(str(tmp_path))
    said: list[str] = []

    def measured(rounds: int, deadline_s: float = 30.0, **sends: str) -> tuple[Field, Size]:
        rows = [_row(tmp_path, name, send) for name, send in sends.items()]
        place = Place("", "sender", "", size.payload_bytes, KIB)
        running = Field(
            rows, Site(None, tmp_path), place, start_deadline_s=deadline_s, say=said.append
        )
        with running:
            running.start()
            running.measure(size, size.stem(tmp_path), rounds, random.Random(1))
        return running, size

    return measured


def _row(folder: Path, name: str, send: str) -> Row:
    text = textwrap.dedent(END).format(send=send)
    (folder / f"end_{name}.py").write_text(f"{text}\n" if send else "import time; time.sleep(60)\n")
    return Row(key=name, name=name, module=f"end_{name}", pair=name)


CORRUPT = "self.data[5] ^= 1; sent = super().send(); "


def test_wrong_content_is_counted_whatever_the_peer_says(field):
    running, size = field(
        2,
        honest="return super().send()",
        wrong=CORRUPT + "return sent",
        lying=CORRUPT + "return Sent(sent.wall_s, True)",
    )
    rows = list(running.rows.values())
    results = summed_up(rows, running.runs, size)
    assert {key: result.wrong for key, result in results.items()} == {
        "socket": 0, "honest": 0, "wrong": 2, "lying": 2,
    }  # fmt: skip
    assert [run.verified for run in running.runs if run.row == "lying"] == [True, True]
    lines = results_text(size, results).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[-4:]] == ["0", "0", "2", "2"]
    assert "| - |" in " ".join(lines[-1].split())


def test_no_two_runs_have_the_same_content(field):
    running, _ = field(2, stale="self.data[:8] = 0; return super().send()")
    assert [run.right for run in running.runs if run.row == "stale"] == [False, False]


def test_a_peer_that_dies_is_left_out_and_the_others_go_on(field):
    running, size = field(
        2,
        dying="os._exit(7)",
        failing="raise RuntimeError('no  slot')",
        good="return super().send()",
    )
    assert list(running.rows) == ["good"]
    assert "status 7" in running.left_out["dying"]
    assert running.left_out["failing"] == "RuntimeError: no slot"
    assert sum(run.row == "good" for run in running.runs) == 2
    assert list(summed_up(running.rows.values(), running.runs, size)) == ["socket", "good"]


def test_a_peer_that_does_not_start_in_time_is_left_out(field):
    began = time.monotonic()
    running, _ = field(1, deadline_s=12.0, sleeping="", good="return super().send()")
    assert running.left_out == {"sleeping": "receiver: the other process was silent for 12 s"}
    assert sum(run.row == "good" for run in running.runs) == 1
    assert time.monotonic() - began < 60


SIZE = Size(1.0, 64, 10**9)
RAW = {"socket": 1.0, "framed": 0.9}
PEERS = {"nixl": 1.0, "nixl-default": 2.0, "mooncake": 1.5, "mooncake-1mib": 1.2, "lmcache": 4.0}


def judged(multiples, *, plane="tcp", left_out=None, wrong=(), rate_bits=0) -> list[Verdict]:
    """Verdicts of three rounds in which each row took a multiple of the socket's time."""
    rows = make_rows([*(set(multiples) - {"socket", "native"}), "native"], [plane], "bfloat16")
    named = {f"native@{plane}" if key == "native" else key: x for key, x in multiples.items()}
    runs = [
        Run(
            row=key, mib=SIZE.mib, round=number, wall_s=0.1 * multiple, sender_cpu_s=0.2,
            receiver_cpu_s=0.3, server_cpu_s=0.0, payload_bytes=10**9, device_bytes=10**9,
            verified=True, right=(key, number) not in wrong,
            before_s=0.0 if key == "socket" else 0.1, after_s=0.0 if key == "socket" else 0.1,
        )
        for number in range(3)
        for key, multiple in named.items()
    ]  # fmt: skip
    measured = Measured(rows, [SIZE], runs, left_out or {})
    return judge(measured, summed_up(rows, runs, SIZE), SIZE.mib, rate_bits)


def lines(verdicts) -> list[str]:
    return [verdict.text("").removeprefix("CacheLink bf16 ") for verdict in verdicts]


def test_the_raw_copy_is_the_one_that_was_faster():
    first = lines(judged({**RAW, **PEERS, "native": 1.05}))[0]
    assert first == (
        "(tcp), time ÷ framed socket, digest per MiB: 1.17, target at most 1.1: MISSED"
    )
    first = lines(judged({"socket": 1.0, "framed": 1.2, **PEERS, "native": 1.05}))[0]
    assert first == (
        "(tcp), time ÷ plain socket, digest of the whole: 1.05, target at most 1.1: met"
    )


def test_each_plane_is_held_against_the_fastest_row_of_each_peer():
    assert lines(judged({**RAW, **PEERS, "native": 1.12}))[1:] == [
        "(tcp), CPU s/GB: 0.50, target at most 0.6: met",
        "(tcp), time ÷ NIXL, progress thread off: 1.12, target at most 1: MISSED",
        "(tcp), time ÷ Mooncake, 1 MiB slices: 0.93, target at most 1: met",
        "(tcp), time ÷ LMCache lm://, put and get: 0.28, target at most 1: met",
    ]
    grpc = judged({**RAW, **PEERS, "native": 1.8}, plane="grpc")
    assert lines(grpc) == [
        "(grpc), time ÷ NIXL, progress thread off: 1.80, no target",
        "(grpc), time ÷ Mooncake, 1 MiB slices: 1.50, target at most 1.3: MISSED",
        "(grpc), time ÷ LMCache lm://, put and get: 0.45, target at most 0.5: met",
    ]
    assert [verdict.binding for verdict in grpc] == [False, True, True]


def test_what_is_absent_or_wrong_is_not_judged_and_says_why():
    multiples = {**RAW, "nixl": 1.0, "mooncake": 1.5, "lmcache": 4.0, "native": 0.9}
    gone = {"NIXL, progress thread off": "no agent"}
    found = judged(multiples, left_out=gone, wrong={("lmcache", 1), ("framed", 0)})
    assert [line for line in lines(found) if "not judged" in line] == [
        "(tcp), time ÷ raw copy: not judged: framed: 1 of 3 runs were wrong",
        "(tcp), time ÷ NIXL: not judged: nixl: no agent; nixl-default: not among --rows",
        "(tcp), time ÷ LMCache: not judged: lmcache: 1 of 3 runs were wrong",
    ]
    assert all(verdict.binding for verdict in found)
    (ours,) = judged({**RAW, "native": 1.0}, wrong={("native@tcp", 0)})
    assert ours.text("") == "CacheLink bf16 (tcp): not judged: 1 of 3 runs were wrong"
    assert ours.binding


def test_where_the_link_decides_nothing_may_be_slower_than_it():
    found = judged({**RAW, **PEERS, "native": 1.0}, plane="grpc", rate_bits=10**9)
    assert [verdict.target for verdict in found] == [1.02, 2.3, 1.02, 1.02, 1.02]


def test_chunks_of_a_payload_differ_and_it_ends_with_a_whole_token(model, tmp_path, monkeypatch):
    monkeypatch.setattr("cachelink_bench.kept.platformdirs.user_cache_dir", lambda _: tmp_path)
    cut = write_payloads(tmp_path, str(model), [0.1, 0.25], base_tokens=TOKENS, block_tokens=BLOCK)
    for size in cut.sizes:
        data = size.stem(tmp_path).with_suffix(".payload").read_bytes()
        assert len(data) == size.tokens * cut.token_bytes == size.payload_bytes
        assert 0 <= size.mib * 1024 * KIB - len(data) < cut.token_bytes
        block = BLOCK * cut.token_bytes
        digests = [xxh3_128_hexdigest(data[at : at + block]) for at in range(0, len(data), block)]
        assert len(set(digests)) == len(digests) > 2
        held = load_cache(size.stem(tmp_path).with_suffix(".safetensors"), headroom=0)
        assert held.header.tokens == size.tokens > TOKENS
        copies = min(TOKENS, size.tokens - TOKENS)
        first = held.cache.tensor(0, "K", 0, copies)
        copy = held.cache.tensor(0, "K", TOKENS, TOKENS + copies)
        assert not first.equal(copy)
        assert first.allclose(copy, rtol=1e-2)
    with pytest.raises(ConfigError, match="a token of this model has"):
        write_payloads(tmp_path, str(model), [1e-5], base_tokens=TOKENS, block_tokens=BLOCK)


def test_a_framed_socket_names_a_frame_that_was_not_sent():
    data = np.arange(3000, dtype=np.uint8)
    server = framed_socket.SocketServer(np.zeros(3000, np.uint8), digests=True)
    client = framed_socket.SocketClient(server.address, digests=True)
    assert client.send(data) > 0
    assert (server.data == data).all()
    other, ours = socket.socketpair()
    client._socket.close()
    client._socket = ours
    other.sendall(b"\x00")
    with pytest.raises(ChecksumMismatch, match="said"):
        client.send(data)
    for end in (client, server, other):
        end.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rows", "native,rdma"], "--rows has 'rdma'; known: socket-again, framed"),
        (["--planes", "quic"], "--planes has 'quic'; known: grpc, tcp"),
        (["--sizes", "16,x"], "--sizes is '16,x', not a list of numbers"),
        (["--sizes", "16,64", "--rounds", "1,2,3"], "--rounds is 1,2,3, --sizes is 16,64"),
        (["--sizes", "0"], "--sizes is 0; each must be above 0 MiB"),
        (["--rounds", "0"], "at least 1"),
        (["--emulate", "10mbit"], "--emulate is '10mbit': 256 MiB would take more than 30 s"),
        (["--emulate", "fast"], "--emulate is 'fast', not a rate"),
    ],
)
def test_wrong_options_are_one_line(capsys, given, said):
    assert bench.main(["peers", *given]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "cachelink-bench" in x]
    assert said in line


@pytest.mark.parametrize(
    ("number", "status", "row"), [(signal.SIGINT, 130, "native"), (signal.SIGKILL, -9, "framed")]
)
def test_no_process_outlives_an_interrupted_run(model, tmp_path, number, status, row):
    argv = options(model, "--rows", f"socket-again,{row}", "--planes", "tcp")[2:]
    command = [sys.executable, "-m", "cachelink_bench", "peers", *argv]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "XDG_CACHE_HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }  # fmt: skip
    long = ["--sizes", "1", "--rounds", "100000"]
    with subprocess.Popen(
        [*command, *long], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=variables
    ) as run:
        try:
            for line in run.stderr:
                if b"round 2 of" in line:
                    break
            children = psutil.Process(run.pid).children(recursive=True)
            assert len(children) == 6
            run.send_signal(number)
            run.stderr.read()
            assert run.wait(30) == status
            _, alive = psutil.wait_procs(children, timeout=10)
            assert alive == []
        finally:
            run.kill()
    if number == signal.SIGINT:
        assert [path.name for path in tmp_path.glob("cachelink-peers-*")] == []


@needs_link
def test_both_sides_of_an_emulated_link(model, tmp_path, monkeypatch):
    monkeypatch.setattr("cachelink_bench.kept.platformdirs.user_cache_dir", lambda _: tmp_path)
    out = tmp_path / "out.json"
    rows = ("--rows", "native,int4", "--planes", "tcp", "--emulate", "100mbit", "--json", out)
    assert bench.main(options(model, *rows)) == 0
    document = json.loads(out.read_text())
    assert document["link"]["iperf_after_gbit"] > 0
    (results,) = document["results"].values()
    assert list(results) == [SOCKET.key, "native@tcp", "int4@tcp"]
    for result in results.values():
        assert result["wrong"] == 0
        # Above the rate by no more than what the bucket held at the start.
        carried_s = (result["payload_bytes"] - 300 * KIB) * 8 / 100e6
        assert result["wall_s"]["median"] > carried_s
        assert result["payload_bytes"] <= result["device_bytes"] < 1.2 * result["payload_bytes"]


def test_a_strict_run_that_judges_nothing_does_not_pass(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cachelink_bench.kept.platformdirs.user_cache_dir", lambda _: tmp_path)
    assert bench.main(options(model, "--rows", "native", "--planes", "tcp", "--strict")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "cachelink-bench peers: --strict: no verdict: a smoke run"
