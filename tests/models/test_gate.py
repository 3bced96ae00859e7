"""The gate lets a right map pass and refuses wrong ones, whatever their cosines are."""

import msgspec
import pytest
import torch

from cachelink_core.errors import IdentityMismatch, InvalidRequest
from cachelink_core.fit.gate import ARMS, THRESHOLD, by_prefix, gate_artifact, gate_state
from cachelink_core.fit.gate_arms import last_attention, own_cache, scored
from cachelink_core.fit.train import Trainer
from cachelink_core.fit.train_data import Example, data_digest
from cachelink_core.testing.planted_pair import analytic_state, permuted_heads, shuffled_layers
from cachelink_core.transport.artifact import load_state, read_card, save_mapper
from cachelink_core.transport.card import ResidualShape
from cachelink_core.transport.residual import Residual
from cachelink_core.transport.state import MapperState
from tests.models.fit_pairs import documents, planted_engines
from tests.models.train_pairs import SMALL, data, engines, examples, ridge


def held_out(engine, count=4):
    made = []
    for text in documents(count, words=20, seed=9):
        ids = engine.tokens.plain(text)
        made.append(Example((0, *ids[:40]), ids[40:44], ids[44:52]))
        made.append(Example((0, *ids[:40]), ids[50:52], ids[52:57]))
    return made


@pytest.fixture(scope="module")
def planted():
    sender, receiver, twin = planted_engines("llama")
    state = analytic_state(twin, sender.identity, receiver.identity)
    tensors = {name: tensor.float() for name, tensor in state.tensors.items()}
    return sender, receiver, MapperState(state.card, tensors)


def gate(planted, state=None, text="planted"):
    sender, receiver, exact = planted
    return gate_state(state or exact, sender, receiver, held_out(sender), text=text)


def test_the_exact_map_passes(planted):
    record = gate(planted).record
    assert record.passed
    assert record.kl["own"] == 0.0
    assert record.kl["mapped"] < 1e-6
    assert min(record.kl["mismatched"], record.kl["zeroed"]) > 0.1
    assert record.attention_cosine == pytest.approx([1.0] * len(record.attention_cosine), abs=1e-5)
    assert record.tokens == 4 * (8 + 5)
    assert record.text_digest == data_digest(held_out(planted[0]))
    reported = record.reported
    assert reported["K.relative_squared_l2"] == pytest.approx(0, abs=1e-9)
    assert reported["V.r_squared"] == pytest.approx(1)
    assert reported["mapped.agreement"] == reported["own.agreement"] == 1
    assert reported["attention_js"] == pytest.approx(0, abs=1e-6)
    assert reported["prefix_mass"] == pytest.approx(reported["prefix_mass_native"], abs=1e-5)


@pytest.mark.parametrize("wrong", ["heads", "layers", "nothing"])
def test_wrong_maps_fail(planted, wrong):
    exact = planted[2]
    states = {
        "heads": permuted_heads(exact),
        "layers": shuffled_layers(exact, (2, 0, 1)[: len(exact.card.layers)]),
        "nothing": MapperState(exact.card, {n: t * 0 for n, t in exact.tensors.items()}),
    }
    record = gate(planted, states[wrong]).record
    assert not record.passed
    assert record.kl["mapped"] > THRESHOLD * min(record.kl["mismatched"], record.kl["zeroed"])


def test_a_map_of_nothing_is_the_zeroed_arm(planted):
    exact = planted[2]
    record = gate(planted, MapperState(exact.card, {n: t * 0 for n, t in exact.tensors.items()}))
    assert record.record.kl["mapped"] == pytest.approx(record.record.kl["zeroed"])


def test_it_reports_what_the_residual_did(planted):
    exact = planted[2]
    shape = ResidualShape(stem=4, fused=4)
    card = msgspec.structs.replace(exact.card, residual=shape)
    residual = Residual(card)
    for layer in residual:
        torch.nn.init.constant_(layer.head_v.bias, 0.01)
    result = gate(planted, MapperState(card, exact.tensors).with_residual(residual))
    size = result.residuals[0, "V"]
    tokens = 4 * 40
    outputs = exact.card.target_channels(0)
    assert size.delta == pytest.approx(tokens * outputs * 1e-4, rel=1e-3)
    assert result.residuals[0, "K"].delta == 0.0
    assert result.record.reported["V.residual_rms_ratio"] > 0
    assert result.record.reported["V.residual_removed"] < -100


def test_the_training_s_figure_is_the_gate_s(tmp_path):
    sender, receiver = engines()
    trainer = Trainer(sender, receiver, ridge(), data(), SMALL, tmp_path)
    trainer.run()
    card, _ = gate_artifact(tmp_path, sender, receiver, data().held_out, text="held out")
    lengths = [len(e.continuation_ids) for e in data().held_out]
    record = gate_state(trainer.learned(), sender, receiver, data().held_out[:2], text="two").record
    assert record.tokens == sum(lengths[:2])
    assert card.gate.tokens == sum(lengths)
    if len(set(lengths)) == 1:
        assert card.gate.kl["mapped"] == pytest.approx(trainer.points[-1].held_out_kl, rel=1e-3)
    assert read_card(tmp_path).gate == card.gate
    assert read_card(tmp_path).training == trainer.learned().card.training


def test_the_verdict_follows_the_threshold(planted, tmp_path):
    sender, receiver, exact = planted
    save_mapper(tmp_path, permuted_heads(exact))
    cards = [
        gate_artifact(tmp_path, sender, receiver, held_out(sender), text="t", threshold=t)[0]
        for t in (0.5, 100.0)
    ]
    assert [card.gate.passed for card in cards] == [False, True]
    assert [card.gate.threshold for card in cards] == [0.5, 100.0]
    assert set(cards[0].gate.kl) == set(ARMS)
    assert load_state(tmp_path).card.digest == cards[1].digest != cards[0].digest


def test_one_document_is_too_few(planted):
    sender, receiver, exact = planted
    with pytest.raises(InvalidRequest, match="at least 2 documents; planted has 1"):
        gate_state(exact, sender, receiver, held_out(sender, 1), text="planted")


def test_other_models_are_refused(planted):
    sender, receiver, exact = planted
    with pytest.raises(IdentityMismatch):
        gate_state(exact, receiver, sender, held_out(sender), text="reversed")


def test_documents_are_grouped(planted):
    groups = by_prefix(held_out(planted[0]))
    assert len(groups) == 4
    assert all(len(group) == 2 for group in groups.values())


def test_attention_is_read_by_the_eager_path_and_the_model_put_back():
    _, receiver = engines()
    example = examples()[0]
    cache = own_cache(receiver, example.prefix_ids, 16)
    before = scored(receiver, cache, example.query_ids)
    implementation = receiver.model.config._attn_implementation
    looked = last_attention(receiver, cache, example.query_ids)
    tokens = len(example.prefix_ids) + len(example.query_ids)
    assert looked.shape == (3, 4, tokens)
    assert torch.allclose(looked.sum(-1), torch.ones(3, 4), atol=1e-5)
    assert receiver.model.config._attn_implementation == implementation
    assert cache.length == len(example.prefix_ids)
    assert torch.equal(scored(receiver, cache, example.query_ids), before)
