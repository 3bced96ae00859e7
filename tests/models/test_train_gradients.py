"""Gradients reach the residual, the whole residual, and nothing else."""

import dataclasses

import msgspec
import pytest
import torch

from cachelink_core.engine.weights_digest import weights_digest
from cachelink_core.fit.aligned import align
from cachelink_core.fit.gate_arms import mapped_cache
from cachelink_core.fit.losses import forward_kl, functional_loss
from cachelink_core.fit.mapped_rows import TrainableMapper
from cachelink_core.fit.receiver_forward import ReceiverForward, RowCache
from cachelink_core.fit.train import Trainer, native_cache
from cachelink_core.testing.tiny_engines import tiny_engine
from cachelink_core.transport.card import ResidualShape
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.state import MapperState
from tests.models.train_pairs import SMALL, data, engines, examples, ridge


@pytest.fixture
def trainer(tmp_path):
    return Trainer(*engines(), ridge(), data(), SMALL, tmp_path)


def cache_of(state, example):
    sender, receiver = engines()
    mapper = Mapper.place(state, dtype=torch.float32)
    return RowCache.of(mapped_cache(mapper, sender, receiver, example.prefix_ids, 0))


def same(first, second):
    pairs = zip(first.keys + first.values, second.keys + second.values, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_step_0_is_ridge_to_the_bit(trainer):
    chosen = examples()[:3]
    found = trainer.prepare(chosen).mapped
    assert found.penalty.item() == 0.0
    for example, cache in zip(chosen, found.caches, strict=True):
        assert same(cache, cache_of(ridge(), example))


def test_step_0_is_ridge_to_the_bit_in_16_bit_too(tmp_path):
    sender, receiver = (
        tiny_engine("qwen3", dtype=torch.bfloat16, seed=0),
        tiny_engine("qwen3", dtype=torch.bfloat16, seed=1, num_hidden_layers=3),
    )
    names = {"sender": sender.identity, "receiver": receiver.identity}
    state = MapperState(msgspec.structs.replace(ridge().card, **names), ridge().tensors)
    trainer = Trainer(sender, receiver, state, data(), SMALL, tmp_path)
    example = examples()[1]
    mapper = Mapper.place(state, dtype=torch.bfloat16)
    served = mapped_cache(mapper, sender, receiver, example.prefix_ids, 0)
    found = trainer.prepare([example]).mapped.caches[0]
    assert found.keys[0].dtype == torch.bfloat16
    assert same(found, RowCache.of(served))
    first = trainer.train_step()
    assert all(p.dtype == torch.float32 for p in trainer.mapper.residual.parameters())
    losses = [trainer.train_step() for _ in range(11)]
    assert sum(losses[-4:]) / 4 < first


def test_a_trained_residual_is_served_as_it_was_trained(trainer):
    trainer.run()
    example = examples()[7]
    trained = trainer.prepare([example]).mapped.caches[0]
    served = cache_of(trainer.learned(), example)
    for a, b in zip(trained.keys + trained.values, served.keys + served.values, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert not same(served, cache_of(ridge(), example))


def test_position_0_stays_the_receiver_s_own(trainer):
    trainer.run()
    cache = trainer.prepare([examples()[0]]).mapped.caches[0]
    own = native_cache(engines()[1], examples()[0].prefix_ids)
    for mapped, native in zip(cache.keys + cache.values, own.keys + own.values, strict=True):
        assert torch.allclose(mapped[:, 0], native[:, 0], atol=1e-5)
        assert not torch.allclose(mapped[:, 1], native[:, 1], atol=1e-2)


def test_gradients_are_in_the_residual_alone(trainer):
    trainer.train_step()  # the heads are zero before it, and block what lies behind them
    trainer.train_step()
    for name, parameter in trainer.mapper.residual.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name
    for engine in engines():
        assert all(p.grad is None for p in engine.model.parameters())
    assert not any(t.requires_grad for t in ridge().tensors.values())


def test_models_and_ridge_are_the_same_bytes_after_training(trainer):
    before = [weights_digest(engine.model) for engine in engines()]
    tensors = {name: tensor.clone() for name, tensor in ridge().tensors.items()}
    trainer.run()
    assert [weights_digest(engine.model) for engine in engines()] == before
    learned = trainer.learned().tensors
    assert all(torch.equal(learned[name], tensor) for name, tensor in tensors.items())
    assert any(not torch.equal(t, torch.zeros_like(t)) for n, t in learned.items() if "head_" in n)


def test_five_weights_agree_with_finite_differences(trainer):
    for _ in range(4):
        trainer.train_step()
    chosen = examples()[:2]
    layer = trainer.mapper.residual.layer(1)

    def value():
        return trainer.loss(trainer.prepare(chosen)).total

    trainer.mapper.residual.zero_grad()
    value().backward()
    for name in ("stem_k", "stem_v", "fuse", "head_k", "head_v"):
        weight = getattr(layer, name).weight
        place = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
        step = 2e-2
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[place] += sign * step
                sides.append(float(value().double()))
                weight[place] -= sign * step
        expected = (sides[0] - sides[1]) / (2 * step)
        assert float(weight.grad[place]) == pytest.approx(expected, rel=0.05, abs=1e-4), name


def test_the_native_cache_has_no_divergence_at_any_step(trainer):
    receiver = ReceiverForward(engines()[1])
    for _ in range(3):
        micro = trainer.prepare(examples()[:3])
        own = [native_cache(engines()[1], e.prefix_ids) for e in examples()[:3]]
        again = receiver.logits(own, micro.aligned.ids)
        assert float(forward_kl(micro.native, again)[micro.aligned.counted].abs().max()) == 0.0
        assert float(trainer.loss(micro).divergence) > 0
        trainer.train_step()


def test_labels_off_by_one_raise_the_loss():
    receiver = ReceiverForward(engines()[1])
    chosen = examples()
    aligned = align(chosen, "continuation", receiver.device)
    own = [native_cache(engines()[1], e.prefix_ids) for e in chosen]
    logits = receiver.logits(own, aligned.ids)
    losses = []
    for shift in (0, 1, -1):
        targets = aligned.targets.roll(shift, dims=1)
        losses.append(float(functional_loss(logits, logits, targets, aligned.counted).total))
    right, early, late = losses
    # The continuations are the receiver's own greedy answers.
    assert right + 1 < min(early, late)


def test_gradients_of_parts_add_up_to_that_of_the_batch(tmp_path):
    found = []
    for rows in (1, 3):
        settings = dataclasses.replace(SMALL, rows=rows)
        trainer = Trainer(*engines(), ridge(), data(), settings, tmp_path / str(rows))
        trainer.train_step()
        found.append([p.grad.clone() for p in trainer.mapper.residual.parameters()])
    for one, together in zip(*found, strict=True):
        assert torch.allclose(one, together, atol=1e-5)


def test_the_penalty_keeps_the_residual_small(tmp_path):
    sizes = []
    for penalty in (0.0, 100.0):
        settings = dataclasses.replace(SMALL, steps=12, penalty=penalty)
        trainer = Trainer(*engines(), ridge(), data(), settings, tmp_path / str(penalty))
        trainer.run()
        sizes.append(trainer.prepare(examples()[:3]).mapped.penalty.item())
    assert sizes[1] < sizes[0] / 3


def test_activations_of_the_mapper_are_not_kept():
    """The receiver keeps its own; of the mapper only what no recomputation can give back."""
    sender, receiver = engines()
    forward = ReceiverForward(receiver)
    shape = ResidualShape(stem=512, fused=512)
    mapper = TrainableMapper(ridge(), shape, forward, seed=0)
    source = mapper.read(sender, examples()[8].prefix_ids)
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mapper.rows([source])
        checkpointed = sum(kept.values())
        kept.clear()
        rows = torch.randn(source.block.tokens, mapper.state.card.source_channels(0))
        mapper.residual.layer(0)(rows, rows)
        weights = {p.data_ptr() for p in mapper.residual.parameters()}
        one_layer = sum(size for place, size in kept.items() if place not in weights)
    assert checkpointed < one_layer / 3


def test_a_second_training_replaces_the_residual(trainer, tmp_path):
    trainer.run()
    again = Trainer(*engines(), trainer.learned(), data(), SMALL, tmp_path / "again")
    assert isinstance(again.mapper.state, MapperState)
    assert same(again.prepare([examples()[0]]).mapped.caches[0], cache_of(ridge(), examples()[0]))
