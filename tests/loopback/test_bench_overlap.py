"""``cachelink-bench overlap`` on real nodes and an emulated link, with a tiny model. Needs root."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.emulation.namespaces import emulated_link, set_rate
from cachelink_bench.emulation.probes import iperf_gbit
from cachelink_bench.emulation.spec import parse_link
from cachelink_bench.overlap.nodes import Cores
from cachelink_bench.overlap.planted import plant_pair
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError
from cachelink_core.testing.tiny_models import save_tiny
from cachelink_core.transport.artifact import read_card
from tests.loopback.test_emulation import needs_link

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
    out, base = tmp_path / "out.json", tmp_path / "timeline"
    argv = ["overlap", "--smoke", "--model", model, "--json", out, "--timeline", base]
    assert bench.main([str(part) for part in argv]) == 0
    shown = capsys.readouterr().out
    for word in ("| native", "speed-up", "after last block"):
        assert word in shown
    document = json.loads(out.read_text())
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


@pytest.mark.parametrize(
    ("option", "value", "word"), [("--cases", "int5", "int5"), ("--ratios", "0", "'0'")]
)
def test_wrong_options_are_one_clear_line(option, value, word):
    with pytest.raises(SystemExit) as left:
        bench.main(["overlap", option, value])
    assert word in str(left.value.code)
