"""``cachelink-bench latency``: a smoke run measures every phase, and the full sizes are the right ones."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from cachelink_bench import __main__ as bench
from cachelink_bench import gpu_table, latency
from cachelink_bench.latency_limits import limits_of, map_flops_per_token
from cachelink_bench.latency_models import SMOKE_PAIR, from_shape, layer_sets, scaled
from cachelink_bench.latency_options import parse, parse_tokens, setting_of
from cachelink_bench.stopwatch import Stopwatch, Timing
from cachelink_bench.transport_shapes import pair_card, pair_names
from cachelink_core.errors import ConfigError
from cachelink_core.testing.tiny_models import save_tiny
from cachelink_core.transport.card import ResidualShape

ARMS = ["native_blocks", "native_one_shot", "ridge", "ridge_residual"]
BUILD = ["move", "strip", "check", "map", "rotate", "install", "query"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latency")
    paths = ["--json", str(folder / "r.json"), "--markdown", str(folder / "r.md")]
    arguments = ["--smoke", "--prefixes", "96,160", "--map-tokens", "128", "--strict"]
    assert latency.main([*arguments, *paths]) == 0
    return json.loads((folder / "r.json").read_text()), (folder / "r.md").read_text()


def test_every_arm_is_measured_and_its_phases_sum_to_its_total(smoke):
    document, _ = smoke
    assert document["smoke"]
    assert [result["tokens"] for result in document["results"]] == [96, 160]
    for result in document["results"]:
        assert list(result["arms"]) == ARMS
        for name, arm in result["arms"].items():
            phases = ["prefill", "query"] if name.startswith("native") else BUILD
            assert list(arm["phases_s"]) == phases
            assert len(arm["total_s"]["runs"]) >= 5
            assert arm["sum_error"] <= 0.02
            assert arm["phases_s"]["query"] < arm["total_s"]["median"]


def test_a_transport_arm_reads_the_query_alone(smoke):
    document, _ = smoke
    query = document["config"]["query_tokens"]
    for result in document["results"]:
        read = {name: arm["model_tokens"] for name, arm in result["arms"].items()}
        assert read["ridge"] == read["ridge_residual"] == query
        assert read["native_blocks"] == read["native_one_shot"] == result["tokens"] + query


def test_derived_figures_follow_from_the_measured_ones(smoke):
    document, _ = smoke
    for result in document["results"]:
        runs = {name: arm["total_s"]["runs"] for name, arm in result["arms"].items()}
        pairs = zip(runs["native_one_shot"], runs["ridge"], strict=True)
        assert result["speedup"]["ridge over native_one_shot"]["runs"] == pytest.approx(
            [native / ridge for native, ridge in pairs]
        )
        cold = result["cold"]
        assert cold["total_s"]["ridge"] == pytest.approx(
            cold["sender_prefill_s"]["median"] + result["arms"]["ridge"]["total_s"]["median"]
        )
        native = min(result["arms"][name]["total_s"]["median"] for name in ARMS[:2])
        spare = native - result["arms"]["ridge"]["total_s"]["median"]
        rate = result["break_even_gbps"]["ridge"]
        moved_s = None if rate is None else 8e-9 * result["tokens"] * 2_048 / rate
        assert (spare <= 0) if rate is None else moved_s == pytest.approx(spare)


def test_the_report_begins_with_the_limit_and_says_that_it_is_a_smoke_run(smoke):
    document, report = smoke
    assert "supports no claim" in report
    headings = [line for line in report.splitlines() if line.startswith("## ")]
    assert headings[0] == "## Theoretical limit"
    assert any(line.startswith("## Cold") for line in headings)
    assert "left out" not in report
    assert "json" not in document["config"]


def test_the_last_line_of_the_output_is_the_document(capsys):
    arguments = ["--smoke", "--prefixes", "16", "--no-cold", "--layer-sets", "nearest"]
    assert latency.main(arguments) == 0
    shown = capsys.readouterr().out
    document = json.loads(shown.splitlines()[-1])
    assert document["results"][0]["cold"]["sender_prefill_s"] is None
    assert "not measured" in shown


@pytest.mark.parametrize("name", pair_names())
def test_a_presets_receiver_has_the_parameters_of_its_card(name):
    for shape in (pair_card(name).sender, pair_card(name).receiver):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(from_shape(shape).config)
        counted = sum(p.numel() for p in model.parameters())
        norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
        assert counted - norms == shape.parameters
        assert model.config.max_position_embeddings == shape.max_positions


def test_the_map_has_the_published_number_of_operations():
    card = pair_card("qwen3-14b-32b")
    sizes = card.sender, card.receiver, card.k
    # 70 and 23 TFLOP at 32K: 5,508,096 parameters a layer less 2,816 biases.
    ridge = map_flops_per_token(*sizes, None)
    residual = map_flops_per_token(*sizes, ResidualShape()) - ridge
    assert ridge == 2 * 64 * 2 * 8_192 * 1_024
    assert residual == 2 * 64 * (5_508_096 - 2 * 256 - 512 - 2 * 1_024)
    floor = limits_of(*sizes, 32_768, {"prefill": 1e15, "map": 5e14})
    assert floor.residual_flop == 32_768 * (ridge + residual)
    assert floor.residual_s == floor.residual_flop / 5e14
    assert floor.native_s == card.receiver.prefill_flops(32_768) / 1e15


def test_a_scaled_model_keeps_its_width():
    built = scaled(from_shape(pair_card("qwen3-14b-32b").receiver), 2)
    assert (built.config.num_hidden_layers, built.config.vocab_size) == (2, 4_096)
    assert (built.shape.layers, built.shape.hidden) == (2, 5_120)
    assert len(built.config.layer_types) == 2
    setting = setting_of(parse(["--layers", "2", "--device", "cpu"]))
    assert (setting.receiver.shape.layers, setting.sender.shape.layers) == (2, 8)


def test_layer_sets_are_ascending_and_of_the_senders_layers():
    card = pair_card("qwen3-14b-32b")
    for kind, gaps in (("scattered", True), ("nearest", False)):
        sets = layer_sets(card.sender.geometry, card.receiver.geometry, 8, kind)
        assert len(sets) == 64
        assert all(list(found) == sorted(set(found)) and found[-1] < 40 for found in sets)
        assert {len(found) for found in sets} == {8}
        assert any(found[-1] - found[0] > 7 for found in sets) == gaps


def test_prefixes_beyond_a_window_are_left_out_and_said(capsys):
    setting = setting_of(parse(["--pair", "yi1.5-9b-34b", "--device", "cpu"]))
    assert setting.prefixes == (2_048,)
    assert setting.left_out == (4_096, 8_192, 16_384, 32_768)
    with pytest.raises(ConfigError, match="room for 4032"):
        setting_of(parse(["--pair", "yi1.5-9b-34b", "--prefixes", "8k"]))
    longest = SMOKE_PAIR.receiver.max_positions
    arguments = ["--smoke", "--prefixes", f"16,{longest}", "--no-cold"]
    assert latency.main(arguments) == 0
    assert f"({longest},) tokens" in capsys.readouterr().out


def test_a_budget_skips_what_would_take_longer(capsys):
    arguments = ["--smoke", "--prefixes", "16,32,64", "--no-cold", "--budget-s", "0"]
    assert latency.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "skipped, beyond the budget of 0 s: [32, 64] tokens" in shown
    assert [r["tokens"] for r in json.loads(shown.splitlines()[-1])["results"]] == [16]


@pytest.mark.parametrize("weights", [["--random-weights"], []])
def test_two_configurations_make_a_pair(weights, tmp_path, capsys):
    sender = save_tiny("llama", tmp_path / "sender")
    receiver = save_tiny("qwen3", tmp_path / "receiver", num_hidden_layers=4)
    models = ["--sender-config", str(sender), "--receiver-config", str(receiver), "--k", "2"]
    assert latency.main([*models, *weights, "--prefixes", "40", "--query-tokens", "4"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["sender"]["layers"], document["receiver"]["layers"]) == (3, 4)
    assert document["k"] == 2
    assert document["results"][0]["arms"]["ridge"]["model_tokens"] == 4


@pytest.mark.parametrize("text", ["", "k", "0", "-2k", "2m", "1.5k"])
def test_a_prefix_that_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ConfigError, match="wanted is a number of tokens"):
        parse_tokens(text)
    assert parse_tokens(" 32K ") == 32_768


def test_wrong_arguments_end_with_status_2(capsys):
    for arguments in (["--rounds", "3"], ["--sender-config", "x"]):
        with pytest.raises(SystemExit) as ended:
            latency.main(arguments)
        assert ended.value.code == 2
    assert bench.main(["latency", "--pair", "nobody"]) == 1
    assert "'nobody' is unknown" in capsys.readouterr().err


def test_a_stopwatch_adds_up_laps_of_one_name():
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    for name in ("a", "b", "a"):
        watch.lap(name)
    timing = watch.stop()
    assert list(timing.phases_s) == ["a", "b"]
    assert sum(timing.phases_s.values()) <= timing.total_s
    assert Timing(2.0, {"a": 1.0, "b": 0.5}).sum_error == 0.25


def test_the_gpu_table_shows_figures_failures_and_what_was_skipped(smoke, tmp_path, capsys):
    (tmp_path / "latency.json").write_text(json.dumps(smoke[0]))
    (tmp_path / "tests.log").write_text("FAILED a\n1 failed, 12 passed in 3.4s\n")
    parts = tmp_path / "parts.tsv"
    parts.write_text("latency\tok\t9\n")
    assert gpu_table.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "160 tokens, Ridge + residual" in shown
    assert "250 ms" not in shown, "the goal is for the full pair alone"
    parts.write_text("latency\tok\t9\nloopback\tskipped: no Python package grpc\t1\n")
    assert gpu_table.main([str(tmp_path)]) == 3
    assert "no Python package grpc" in capsys.readouterr().out
    parts.write_text("tests\tFAILED: status 1\t4\nloopback\tskipped: no time left\t0\n")
    assert gpu_table.main([str(tmp_path)]) == 1
    assert "1 failed, 12 passed" in capsys.readouterr().out
    full = smoke[0] | {"pair": gpu_table.GOAL_PAIR, "receiver": {"layers": 64}}
    full["results"] = [full["results"][0] | {"tokens": 32_768}]
    (tmp_path / "latency.json").write_text(json.dumps(full))
    parts.write_text("latency\tok\t9\n")
    assert gpu_table.main([str(tmp_path)]) == 0
    assert "≤ 250 ms, ≥ 25 times" in capsys.readouterr().out
    assert gpu_table.main([]) == 2
