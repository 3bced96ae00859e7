"""``cachelink-bench planner`` on real nodes and an emulated link, with a tiny model. Needs root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.emulation.system_commands import run_tool
from cachelink_bench.planner import _parse, _prepared, _run_within
from cachelink_bench.planner_report import Document
from cachelink_bench.planner_runs import Task
from cachelink_core.errors import ConfigError, InternalError
from cachelink_core.testing.tiny_models import save_tiny
from tests.loopback.test_emulation import needs_link, own

ROOT = Path(__file__).parents[2]
VOCABULARY = 600
"""The ids of the benchmark's question go beyond a tiny model's own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planner") / "model"
    save_tiny("llama", folder, vocab_size=VOCABULARY)
    return folder


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """Daemons and the measuring process find the packages."""
    parts = [str(ROOT / part) for part in ("", "sender", "receiver", "bench")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(parts))


@pytest.mark.slow
@needs_link
def test_every_way_is_run_and_the_choice_is_shown(model, tmp_path, capfd):
    out, report = tmp_path / "out.json", tmp_path / "out.md"
    argv = ["planner", "--emulate", "100mbit", "--model", model, "--tokens", "64", "--repeats", "1"]
    assert bench.main([str(x) for x in (*argv, "--json", out, "--markdown", report)]) == 0
    shown = capfd.readouterr().out
    document = msgspec.json.decode(out.read_bytes(), type=Document)
    (link,) = document.links
    (case,) = link.cases
    ways = [run.way for run in case.runs]
    assert len(set(ways)) == len(ways)
    # A model in float32 has more ways than one in bfloat16; none that auto may take is missing.
    assert {"text", "auto", "native", "bf16", "int4+zstd"} <= set(ways)
    (verdict,) = document.verdicts
    assert set(verdict.chosen) <= set(ways)
    assert "| 100mbit |" in shown
    assert "| 100mbit |" in report.read_text()
    for written in (out, report):
        assert str(tmp_path.parent) not in written.read_text()
    assert own(os.getpid()) == []


@pytest.mark.slow
@needs_link
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_stopped_leaves_nothing(model, tmp_path, monkeypatch, number):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    argv = ["--emulate", "100mbit", "--model", str(model), "--tokens", "64", "--repeats", "500"]
    with subprocess.Popen(
        [sys.executable, "-m", "cachelink_bench", "planner", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert any(line.startswith("  64 ") for line in process.stderr)
            names = own(process.pid)
            inside = [run_tool("ip", "netns", "pids", name).split() for name in names]
            assert [len(pids) > 0 for pids in inside] == [True, True]
            process.send_signal(number)
            assert process.wait(60) == (130 if number == signal.SIGINT else 143)
            said = process.stderr.read()
        finally:
            process.kill()
    assert "Traceback" not in said
    assert ("interrupted" in said) == (number == signal.SIGINT)
    assert own(process.pid) == []
    assert not any(Path(f"/proc/{pid}").exists() for pids in inside for pid in pids)
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_cannot_be_asked_is_one_line_of_each_process(capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        task = Task(nobody, nobody, "far", (1, 2, 3), (2,), ("native",), 1)
        with pytest.raises(InternalError, match="the measuring process ended with status 1"):
            _run_within([], task)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("peer_gone: ")


def test_prefixes_longer_than_the_texts_are_refused(model):
    options = _parse(["--model", str(model), "--tokens", "64,1000000"])
    with pytest.raises(ConfigError, match="--tokens has 1000000"):
        _prepared(options)
