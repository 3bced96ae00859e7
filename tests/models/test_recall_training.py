"""Base training of the recall pair: deterministic, resumable, and it learns what it is shown."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cachelink_bench.recall_pair.base_training import STATE_FILE, BaseTrainer, batch_loss
from cachelink_bench.recall_pair.batches import training_batch
from cachelink_bench.recall_pair.cli import app
from cachelink_bench.recall_pair.curriculum import FIRST_FACTS, LAST_FACTS, Curriculum
from cachelink_bench.recall_pair.curves import CurvePoint, read_curves, write_curves
from cachelink_bench.recall_pair.models import Shape, untrained_model
from cachelink_bench.recall_pair.optimizers import WARM_UP_STEPS, OptimizerPair, rate_factor
from cachelink_bench.recall_pair.plan import BaseTraining
from cachelink_bench.recall_pair.plot import plot_curves

SMALL = Shape(layers=2, width=32, feed_forward=48, heads=2, kv_heads=1, head_dim=16)
PLAN = BaseTraining(SMALL, seed=0, steps=6, rows=4, evaluate_every=2, save_every=2)


def train(plan, folder, stop_at=None):
    lines = []
    trainer = BaseTrainer(plan, folder)
    trainer.run(lines.append, stop_at=stop_at)
    return trainer.model.state_dict(), lines


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    first, lines = train(PLAN, tmp_path / "a")
    second, _ = train(PLAN, tmp_path / "b")
    other, _ = train(replace(PLAN, seed=1), tmp_path / "c")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert [line.split(":")[0] for line in lines] == [f"step {step} of 6" for step in (2, 4, 6)]


@pytest.mark.parametrize("stop_at", [3, 4])
def test_a_resumed_training_ends_at_the_same_weights_and_curve(tmp_path, stop_at):
    whole, _ = train(PLAN, tmp_path / "whole")
    train(PLAN, tmp_path / "parts", stop_at=stop_at)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    resumed, _ = train(PLAN, tmp_path / "parts")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    curves = [(tmp_path / part / "curves.csv").read_text() for part in ("whole", "parts")]
    assert curves[0] == curves[1]


def test_a_folder_with_another_training_is_refused_with_both_plans(tmp_path):
    train(PLAN, tmp_path, stop_at=2)
    with pytest.raises(ValueError, match=r"'seed': 0.*not of.*'seed': 1"):
        BaseTrainer(replace(PLAN, seed=1), tmp_path)


def test_the_checkpoint_is_the_model_rounded_to_bf16(tmp_path):
    weights, _ = train(PLAN, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(saved[name], tensor.to(torch.bfloat16)), name
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["plan"]["seed"] == PLAN.seed
    assert record["last_point"]["step"] == PLAN.steps
    assert not (tmp_path / STATE_FILE).exists()


def test_training_lowers_the_loss_on_a_batch_it_did_not_see():
    model = untrained_model(SMALL, seed=0)
    unseen = training_batch(seed=9, step=1, facts=4, rows=16)
    optimizers = OptimizerPair(model, steps=60)
    before = batch_loss(model, unseen)[0].item()
    for step in range(1, 121, 2):
        batch_loss(model, training_batch(seed=0, step=step, facts=4, rows=16))[0].backward()
        optimizers.step()
    assert batch_loss(model, unseen)[0].item() < 0.85 * before


def test_the_loss_does_not_look_at_padding():
    model = untrained_model(SMALL, seed=0)
    batch = training_batch(seed=0, step=1, facts=6, rows=4)
    padded = replace(
        batch,
        tokens=torch.nn.functional.pad(batch.tokens, (0, 5), value=0),
        answers=torch.nn.functional.pad(batch.answers, (0, 5)),
        text=torch.nn.functional.pad(batch.text, (0, 5)),
    )
    assert batch_loss(model, padded)[0].item() == pytest.approx(
        batch_loss(model, batch)[0].item(), rel=1e-5
    )


def test_every_parameter_has_one_optimizer():
    model = untrained_model(SMALL, seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pair = OptimizerPair(model, steps=10)
    groups = [state["param_groups"] for state in pair.state_dict()["optimizers"]]
    counts = [sum(len(group["params"]) for group in optimizer) for optimizer in groups]
    assert counts[0] == 7 * SMALL.layers  # q, k, v, o, gate, up, down
    assert sum(counts) == len(before)
    batch_loss(model, training_batch(seed=0, step=1, facts=6, rows=4))[0].backward()
    pair.step()
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_rate_warms_up_stays_and_falls_to_zero():
    assert rate_factor(0, 1_000) == pytest.approx(1 / WARM_UP_STEPS)
    assert rate_factor(WARM_UP_STEPS, 1_000) == rate_factor(600, 1_000) == 1.0
    assert rate_factor(800, 1_000) == pytest.approx(0.5)
    assert rate_factor(1_000, 1_000) == 0.0


def test_the_curriculum_waits_for_recall_and_ends_at_the_last_number():
    curriculum = Curriculum()
    for _ in range(200):
        curriculum.observe(0.89)
    assert curriculum.facts == FIRST_FACTS
    steps = [curriculum.facts]
    for _ in range(400):
        curriculum.observe(1.0)
        if curriculum.facts != steps[-1]:
            steps.append(curriculum.facts)
    assert steps == [6, 10, 14, 18, 22, 26, 30, LAST_FACTS]


def test_curves_survive_the_way_through_csv_and_are_drawn(tmp_path):
    points = [
        CurvePoint(
            step=step, facts=6, loss=2.5, copy_recall=0.25, recalls={8: 0.5, 16: 0.25, 32: 0.0}
        )
        for step in (100, 200)
    ]
    write_curves(tmp_path / "curves.csv", points)
    assert read_curves(tmp_path / "curves.csv") == points
    plot_curves({"sender": [tmp_path / "curves.csv"] * 2}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def torch_settings():
    """Gives back the process-wide settings that the command line makes."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("torch_settings")
def test_the_command_trains_and_evaluates(tmp_path):
    runner = CliRunner()
    arguments = ["train-base", "--role", "sender", "--steps", "2", "--out", str(tmp_path)]
    trained = runner.invoke(app, arguments)
    assert trained.exit_code == 0, trained.output
    assert "step 2 of 2: loss" in trained.output
    evaluated = runner.invoke(
        app, ["evaluate", str(tmp_path), "--documents", "1", "--queries", "1"]
    )
    assert evaluated.exit_code == 0, evaluated.output
    assert evaluated.output.count("| torch.bfloat16 |") == 7
