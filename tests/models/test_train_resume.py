"""A training that stops and goes on ends where an unbroken one does."""

import dataclasses

import pytest
import torch

from cachelink_core.errors import ConfigError, CorruptChunk, IdentityMismatch, InvalidRequest
from cachelink_core.fit.curves import read_curve
from cachelink_core.fit.train import CURVE_FILE, PICTURE_FILE, Trainer
from cachelink_core.fit.train_data import TrainingData
from cachelink_core.fit.train_state import CHECKPOINT_FILE
from cachelink_core.transport.artifact import load_state, verify_mapper
from tests.models.train_pairs import SMALL, data, engines, ridge


def trainer(folder, settings=SMALL, *, resume=False, seen=None, memory=None):
    return Trainer(
        *engines(), ridge(), seen or data(), settings, folder, resume=resume, memory=memory
    )


def test_a_resumed_training_gives_the_weights_of_an_unbroken_one(tmp_path):
    whole = trainer(tmp_path / "whole")
    assert whole.run() is not None
    assert trainer(tmp_path / "broken").run(stop_at=3) is None
    assert (tmp_path / "broken" / CHECKPOINT_FILE).is_file()
    resumed = trainer(tmp_path / "broken", resume=True)
    assert resumed.step == 3
    resumed.run()
    first, second = (t.learned().tensors for t in (whole, resumed))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not (tmp_path / "broken" / CHECKPOINT_FILE).exists()
    curves = [(tmp_path / name / CURVE_FILE).read_text() for name in ("whole", "broken")]
    assert curves[0] == curves[1]


def test_a_seed_decides_everything(tmp_path):
    runs = [trainer(tmp_path / str(i), dataclasses.replace(SMALL, seed=i // 2)) for i in range(3)]
    for run in runs:
        run.run()
    tensors = [run.learned().tensors for run in runs]
    name = "residual.0.fuse.weight"
    assert torch.equal(tensors[0][name], tensors[1][name])
    assert not torch.equal(tensors[0][name], tensors[2][name])


def test_remembered_examples_change_nothing(tmp_path):
    memory = {}
    plain, remembering = trainer(tmp_path / "a"), trainer(tmp_path / "b", memory=memory)
    plain.run()
    remembering.run()
    assert len(memory) == len(data().train) + len(data().held_out)
    read = engines()[1].model_tokens
    trainer(tmp_path / "c", memory=memory).train_step()
    processed = engines()[1].model_tokens - read
    assert processed < 3 * 12, "the prefixes were read again"
    pairs = zip(plain.points, remembering.points, strict=True)
    assert all(a.held_out_kl == pytest.approx(b.held_out_kl, rel=1e-3) for a, b in pairs)


def test_the_artifact_says_how_it_was_trained(tmp_path):
    run = trainer(tmp_path)
    card = run.run()
    assert verify_mapper(tmp_path) == card
    assert card.training.steps == SMALL.steps
    assert card.training.loss == "ce+kl"
    assert card.training.data_digest == data().digest
    assert card.training.settings["learning_rate"] == SMALL.learning_rate
    assert card.residual.stem == SMALL.stem
    assert card.residual.standardised
    assert card.gate is None
    assert card.training.results["last_held_out_kl"] == run.points[-1].held_out_kl
    assert set(load_state(tmp_path).tensors) == set(run.learned().tensors)


def test_the_curve_begins_with_ridge_and_is_drawn(tmp_path):
    trainer(tmp_path).run()
    points = read_curve(tmp_path / CURVE_FILE)
    assert [point.step for point in points] == [0, 2, 4, 6]
    assert points[0].train_loss is None
    assert points[1].train_loss > 0
    assert (tmp_path / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_of_another_training_is_refused_by_name(tmp_path):
    trainer(tmp_path).run(stop_at=2)
    other = dataclasses.replace(SMALL, learning_rate=5e-3, seed=3)
    with pytest.raises(ConfigError, match=r"learning_rate is 0.01 there and 0.005 here; seed is 0"):
        trainer(tmp_path, other, resume=True)
    seen = data()
    fewer = TrainingData(seen.name, "0" * 64, seen.train, seen.held_out)
    with pytest.raises(ConfigError, match="the examples differ"):
        trainer(tmp_path, resume=True, seen=fewer)


def test_a_damaged_checkpoint_is_named(tmp_path):
    trainer(tmp_path).run(stop_at=2)
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptChunk, match=CHECKPOINT_FILE):
        trainer(tmp_path, resume=True)


def test_resume_without_a_checkpoint_starts(tmp_path):
    assert trainer(tmp_path, resume=True).step == 0


def test_nothing_to_learn_from_is_refused(tmp_path):
    seen = data()
    with pytest.raises(InvalidRequest, match="no examples in held_out"):
        trainer(tmp_path, seen=TrainingData("some", seen.digest, seen.train, ()))


def test_other_models_are_refused(tmp_path):
    sender, receiver = engines()
    with pytest.raises(IdentityMismatch, match="reverse direction"):
        Trainer(receiver, sender, ridge(), data(), SMALL, tmp_path)
