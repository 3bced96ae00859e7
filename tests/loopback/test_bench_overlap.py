"""``cachelink-bench overlap`` on real nodes and an emulated link, with a tiny model. Needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.emulation.namespaces import SIDES, EmulatedLink, emulated_link, set_rate
from cachelink_bench.emulation.probes import iperf_gbit
from cachelink_bench.emulation.spec import parse_link
from cachelink_bench.overlap.nodes import Cores
from cachelink_bench.overlap.planted import plant_pair
from cachelink_bench.overlap.task import Case, Failed, Measured, Nodes, Task
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError
from cachelink_core.testing.tiny_models import save_tiny
from cachelink_core.transport.artifact import read_card
from tests.loopback.test_emulation import needs_link, own

ROOT = Path(__file__).parents[2]
BLOCKS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlap") / "model"
    save_tiny("llama", folder)
    return folder


@pytest.mark.slow
@needs_link
def test_every_way_of_a_round_is_measured_and_judged(model, tmp_path, capsys, monkeypatch):
    parts = [str(ROOT / part) for part in ("", "sender", "receiver", "bench")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(parts))  # of the daemons
    out, page, base = tmp_path / "out.json", tmp_path / "out.md", tmp_path / "timeline"
    argv = ["overlap", "--smoke", "--strict", "--model", model, "--json", out, "--timeline", base]
    assert bench.main([*map(str, argv), "--markdown", str(page)]) == 1, "nothing was judged"
    printed = capsys.readouterr()
    shown = printed.out
    assert printed.err.splitlines()[-1].endswith("overlap: --strict: no verdict: a smoke run")
    for word in ("| native", "speed-up", "after last block"):
        assert word in shown
    document = json.loads(out.read_text())
    assert document["command"] == "cachelink-bench overlap --smoke --strict --model model"
    head = f"# Overlap\n\n{document['date']}, `{document['command']}`\n\n"
    assert page.read_text() == head + shown
    assert [verdict["met"] for verdict in document["verdicts"]] == [None] * 3
    receipts = {run["way"]: run["receipt"] for run in document["runs"]}
    assert set(receipts) == {"prefill", "link", "overlap", "serial"}
    assert len(receipts["overlap"]["timeline"]["prefilled_at_s"]) == BLOCKS
    assert receipts["overlap"]["wire_bytes"] == receipts["link"]["wire_bytes"] > 0
    # One stage after another: all blocks were prefilled before Reserve was answered.
    assert max(receipts["serial"]["timeline"]["prefilled_at_s"]) < 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    (row,) = document["rows"]
    assert row["spreads"]["total_s"]["median"] > 0
    assert row["rate_bits"] >= 1_000_000


@pytest.mark.slow
@needs_link
def test_ctrl_c_while_it_measures_is_one_line_and_leaves_nothing(model, tmp_path):
    parts = os.pathsep.join(str(ROOT / part) for part in ("", "sender", "receiver", "bench"))
    command = [sys.executable, "-m", "cachelink_bench", "overlap", "--smoke", "--model", str(model)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": parts, "TMPDIR": str(tmp_path)},
    ) as run:  # fmt: skip
        try:
            while not (measuring := _measuring(run.pid)):
                assert run.poll() is None
                time.sleep(0.02)
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
            assert run.stderr.read().splitlines()[-1:] == ["cachelink-bench overlap: interrupted"]
            assert run.wait(30) == 130
            assert psutil.wait_procs(measuring, timeout=10)[1] == []
        finally:
            run.kill()
    assert own(run.pid) == []
    assert list(tmp_path.glob("cachelink-*")) == []


def _measuring(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] if "cachelink_bench.overlap.measure" in child.cmdline() else []
    return found


@needs_link
def test_an_error_while_measuring_is_told_to_the_parent_and_not_printed():
    link = EmulatedLink(parse_link("1gbit"), dict.fromkeys(SIDES, "cachelink-none"), "")
    nodes = Nodes("127.0.0.1:1", {"same": "127.0.0.1:1"})
    task = Task(link, nodes, nodes, (Case("native", "native", "same"),), (1.0,), (1, 2), 1)
    done = subprocess.run(
        [sys.executable, "-m", "cachelink_bench.overlap.measure"],
        input=msgspec.json.encode(task), capture_output=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    said = msgspec.json.decode(done.stdout, type=Measured | Failed)
    assert isinstance(said, Failed)
    assert "tc -n cachelink-none" in said.message
    assert done.stderr == b""


@needs_link
def test_a_link_that_is_up_takes_another_rate():
    with emulated_link(parse_link("1gbit")) as link:
        set_rate(link, parse_link("100mbit"))
        assert 0.05 < iperf_gbit(link, seconds=1) < 0.11


def test_a_planted_pair_is_written_with_the_mapper_between_its_models(model, tmp_path):
    engine = load_engine(str(model), device="cpu")
    pair = plant_pair(engine, model, tmp_path)
    card = read_card(pair.mapper)
    twin = load_engine(str(pair.model), device="cpu")
    assert card.sender == engine.identity
    assert card.receiver == twin.identity
    assert card.sender.weights_digest != card.receiver.weights_digest


def test_one_core_is_not_enough(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {3})
    with pytest.raises(ConfigError, match="two cores"):
        Cores.pick()


def test_a_missing_taskset_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="overlap needs taskset"):
        Cores.pick()


@pytest.mark.parametrize(
    ("option", "value", "word"), [("--cases", "int5", "int5"), ("--ratios", "0", "'0'")]
)
def test_wrong_options_are_one_clear_line(option, value, word):
    with pytest.raises(SystemExit) as left:
        bench.main(["overlap", option, value])
    assert word in str(left.value.code)
