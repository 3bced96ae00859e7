"""Costs before the start, and the two commands."""

import json

import pytest
from typer.testing import CliRunner

from cachelink_core.errors import ConfigError
from cachelink_core.fit.cli_commands import fit_app, solve_app
from cachelink_core.fit.moments import Moments
from cachelink_core.fit.panels import Channels, depth_panels, full_panel
from cachelink_core.fit.plan import moments_cost, plan_fit
from cachelink_core.fit.shapes import model_shape, read_pair_card
from cachelink_core.testing.tiny_models import save_tiny
from cachelink_core.transport.artifact import read_card
from tests.models.fit_pairs import documents
from tests.models.synthetic_moments import RECEIVER, SENDER

PAIRS = ["ministral3-8b-14b", "qwen3-14b-32b", "qwen3-8b-14b", "yi1.5-9b-34b"]


@pytest.fixture
def pairs(pytestconfig):
    return pytestconfig.rootpath / "manifests" / "pairs"


def plan_of(card):
    return plan_fit(card.sender, card.receiver, k=card.k)


def test_qwen3_14b_to_32b_is_the_published_size(pairs):
    card = read_pair_card(pairs / "qwen3-14b-32b.json")
    plan = plan_of(card)
    assert plan.ridge_parameters == 1_073_741_824 + 131_072
    assert plan.ridge_bytes == 4_295_491_584
    assert plan.residual_parameters == 352_518_144
    assert (plan.source_token_bytes, plan.target_token_bytes) == (163_840, 262_144)
    # The Gram of all layers weighs 6.71 GB in float32, the cross moments 10.74 GB.
    assert plan.full.gram_bytes / 2 == pytest.approx(6.71e9, rel=1e-3)
    assert plan.full.cross_bytes / 2 == pytest.approx(10.74e9, rel=1e-3)
    assert plan.observations == 127_500
    assert plan.full.flops / 2 == pytest.approx(1.1 * (4.3e14 + 6.9e14), rel=0.02)
    assert plan.prefill_flops == pytest.approx(1.1 * 4.7e16, rel=0.05)
    assert card.sender.parameters == pytest.approx(14.77e9, rel=1e-3)
    assert card.receiver.parameters == pytest.approx(32.76e9, rel=1e-3)


def test_the_papers_pairs_have_their_geometry(pairs):
    assert sorted(path.stem for path in pairs.glob("*.json")) == PAIRS
    shapes = {
        name: [(s.layers, s.kv_heads, s.head_dim) for s in (card.sender, card.receiver)]
        for name in PAIRS
        for card in [read_pair_card(pairs / f"{name}.json")]
    }
    assert shapes == {
        "qwen3-14b-32b": [(40, 8, 128), (64, 8, 128)],
        "qwen3-8b-14b": [(36, 8, 128), (40, 8, 128)],
        "ministral3-8b-14b": [(34, 8, 128), (40, 8, 128)],
        "yi1.5-9b-34b": [(48, 4, 128), (60, 8, 128)],
    }


def test_the_predicted_bytes_are_those_that_are_allocated():
    for panels in ((full_panel(SENDER, RECEIVER),), depth_panels(SENDER, RECEIVER, 2)):
        moments = Moments(Channels.of(SENDER), Channels.of(RECEIVER), panels)
        assert moments_cost(SENDER, RECEIVER, panels, 0).nbytes == moments.nbytes


def test_a_shape_is_read_from_a_configuration_alone(tmp_path):
    folder = save_tiny("qwen3", tmp_path / "m")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    shape = model_shape(str(folder))
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim) == (3, 64, 2, 16)
    with pytest.raises(ConfigError, match="no configuration to plan with"):
        model_shape(str(tmp_path / "missing"))


def test_a_file_that_is_no_pair_card_is_named(tmp_path):
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"pair": "x"}))
    with pytest.raises(ConfigError, match=r"card\.json"):
        read_pair_card(path)
    with pytest.raises(ConfigError, match="pair card"):
        read_pair_card(tmp_path / "missing.json")


def test_a_dry_run_needs_no_weights(pairs):
    result = CliRunner().invoke(fit_app, ["--dry-run", "--pair", str(pairs / "qwen3-14b-32b.json")])
    assert result.exit_code == 0, result.output
    for words in ("127,500", "13.4 GB", "21.5 GB", "1,073,872,896", "352,518,144", "5.09e+16"):
        assert words in result.output


def test_fit_and_solve_from_the_command_line(tmp_path):
    sender = save_tiny("qwen3", tmp_path / "sender", seed=1)
    receiver = save_tiny("llama", tmp_path / "receiver", seed=2)
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": words}) for words in documents()))
    common = ["--k", "2", "--lambda-mode", "heldout"]
    result = CliRunner().invoke(
        fit_app,
        ["--sender", str(sender), "--receiver", str(receiver), "--calibration", str(text),
         "--out", str(tmp_path / "out"), "--sequences", "6", "--length", "64", "--stride", "1",
         "--device", "cpu", "--panels", "full", *common],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    card = read_card(tmp_path / "out")
    assert card.fit.lambda_mode == "heldout"
    assert card.fit.calibration.source == str(text)
    again = CliRunner().invoke(
        solve_app,
        ["--moments", str(tmp_path / "out" / "moments.safetensors"), "--out",
         str(tmp_path / "again"), *common],
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert read_card(tmp_path / "again").digest == card.digest


def test_wrong_choices_are_named():
    result = CliRunner().invoke(solve_app, ["--moments", "m", "--out", "o", "--heads", "some"])
    assert isinstance(result.exception, ConfigError)
    assert "--heads is 'some'; known: all, local" in str(result.exception)
    result = CliRunner().invoke(fit_app, ["--sender", "a"])
    assert result.exit_code == 2
