"""The exact proof: where a linear map exists, the fit finds it, and nothing else passes for it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cachelink_core import texts
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.gguf_model import converted_folder, demo_gguf
from cachelink_core.engine.identify import identify
from cachelink_core.engine.loading import load_tokenizer
from cachelink_core.engine.tokens import HFTokens
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.build import SolveOptions, build_mapper
from cachelink_core.fit.calibration import calibrate
from cachelink_core.fit.measure import measure
from cachelink_core.fit.panels import full_panel
from cachelink_core.fit.run import FitOptions, fit, solve
from cachelink_core.fit.shards import Shards
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.planted_pair import permuted_heads, plant, shuffled_layers
from cachelink_core.transport.artifact import load_state, verify_mapper
from tests.models.fit_pairs import calibration, documents, planted_engines
from tests.models.planted_proof import filled, mean_kl, scores, source_content, top1, translated

EXACT = SolveOptions(k=1, lambda_value=0.0, lambda_mode="sum")
GREEDY = Sampling(max_new_tokens=16, ignore_eos=True)


def measured(sender, receiver, text, tmp_path):
    panel = full_panel(sender.identity.layers, receiver.identity.layers)
    return measure(
        sender, receiver, text, (panel,), checkpoint=tmp_path / "checkpoint", shards=Shards()
    )


def arms(sender, receiver, state, ids, query):
    """Logits of every arm by name."""
    source = source_content(sender, filled(sender, ids), len(ids))
    layers = len(receiver.identity.layers)
    order = [*range(1, layers), 0]
    states = {
        "mapped": state,
        "untranslated": None,
        "shuffled layers": shuffled_layers(state, order),
        "permuted heads": permuted_heads(state),
    }
    found = {
        name: scores(receiver, translated(receiver, each, source, ids), query)
        for name, each in states.items()
    }
    return found | {"native": scores(receiver, filled(receiver, ids), query)}


def check_controls(found, record):
    right = mean_kl(found["native"], found["mapped"])
    for name in ("untranslated", "shuffled layers", "permuted heads"):
        kl, agreed = mean_kl(found["native"], found[name]), top1(found["native"], found[name])
        record(f"{name}: KL", kl)
        record(f"{name}: top-1", agreed)
        assert agreed <= 0.5 or kl >= 10 * max(right, 1e-9), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("selection", ["same-head", "all-head", "greedy"])
def test_a_fitted_map_gives_the_twins_logits(
    family, selection, tmp_path, record_testsuite_property
):
    sender, receiver, _ = planted_engines(family)
    moments = measured(sender, receiver, calibration(sender.tokens), tmp_path)
    options = SolveOptions(k=1, selection=selection, lambda_value=0.0, lambda_mode="sum")
    state = build_mapper(moments, options)
    assert [layer.sources for layer in state.card.layers] == [(0,), (1,), (2,)]
    assert state.card.fit.warnings == ()
    for layer in state.card.layers:
        for kind in (layer.key, layer.value):
            assert kind.r2_held_out > 1 - 1e-9
            assert kind.r2_in_sample > 1 - 1e-9
    ids = sender.tokens.document(documents(1, seed=99)[0][:240], chat=False).ids
    found = arms(sender, receiver, state, ids, list(range(10, 60)))
    error = float((found["mapped"] - found["native"]).abs().max())
    record_testsuite_property(f"max_logit_difference planted {family} {selection}", error)
    assert error <= 1e-4
    check_controls(found, record_testsuite_property)


@pytest.mark.parametrize("heads", ["all", "local"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_more_layers_than_needed_do_no_harm(heads, k, tmp_path):
    sender, receiver, _ = planted_engines("llama")
    moments = measured(sender, receiver, calibration(sender.tokens), tmp_path)
    options = SolveOptions(k=k, heads=heads, lambda_value=0.0, lambda_mode="sum")
    state = build_mapper(moments, options)
    assert all(index in layer.sources for index, layer in enumerate(state.card.layers))
    ids = sender.tokens.document(documents(1, seed=99)[0][:240], chat=False).ids
    source = source_content(sender, filled(sender, ids), len(ids))
    query = list(range(10, 40))
    ours = scores(receiver, translated(receiver, state, source, ids), query)
    native = scores(receiver, filled(receiver, ids), query)
    assert (ours - native).abs().max() <= 1e-4


def test_the_default_lambda_costs_what_it_costs(tmp_path, record_testsuite_property):
    sender, receiver, _ = planted_engines("llama")
    moments = measured(sender, receiver, calibration(sender.tokens), tmp_path)
    state = build_mapper(moments, SolveOptions(k=1))
    ids = sender.tokens.document(documents(1, seed=99)[0][:240], chat=False).ids
    found = arms(sender, receiver, state, ids, list(range(10, 40)))
    error = float((found["mapped"] - found["native"]).abs().max())
    record_testsuite_property("max_logit_difference planted llama, default lambda", error)
    check_controls(found, record_testsuite_property)


def test_position_0_of_the_card_is_the_receivers_own(tmp_path):
    sender, receiver, _ = planted_engines("qwen2")
    moments = measured(sender, receiver, calibration(sender.tokens), tmp_path)
    state = build_mapper(moments, EXACT)
    assert state.card.bos_id == 0
    native = filled(receiver, (0, 9, 9))
    for layer in range(3):
        keys = receiver.to_content(layer, native.tensor(layer, "K", 0, 1), 0)[:, 0]
        values = native.tensor(layer, "V", 0, 1)[:, 0]
        # Not bit for bit: forwards of other lengths round differently.
        torch.testing.assert_close(state.tensors[f"position0.{layer}.K"], keys)
        torch.testing.assert_close(state.tensors[f"position0.{layer}.V"], values)


def test_fit_and_solve_leave_artifacts_that_agree(tmp_path):
    sender, receiver, _ = planted_engines("llama")
    folder = tmp_path / "text"
    folder.mkdir()
    for index, text in enumerate(documents()):
        (folder / f"{index:02d}.txt").write_text(text)
    options = FitOptions(
        calibration=str(folder), sequences=12, length=96, stride=1, solve=EXACT, panels="full"
    )
    told = []
    card = fit(sender, receiver, options, tmp_path / "a", progress=lambda *a: told.append(a))
    assert {stage for stage, _, _ in told} == {"reading", "all-head probes", "solving"}
    assert all(done <= total for _, done, total in told)
    assert verify_mapper(tmp_path / "a") == card
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "card.json", "mapper.safetensors", "moments.safetensors",
    ]  # fmt: skip
    again = solve(tmp_path / "a" / "moments.safetensors", EXACT, tmp_path / "b")
    assert again.digest == card.digest
    wider = SolveOptions(k=2, lambda_value=1e-3, lambda_mode="mean", weights_dtype="bfloat16")
    other = solve(tmp_path / "a" / "moments.safetensors", wider, tmp_path / "c")
    assert other.digest != card.digest
    assert all(len(layer.sources) == 2 for layer in other.layers)
    assert load_state(tmp_path / "c").tensors["ridge.0.K.weight"].dtype == torch.bfloat16
    repeated = fit(sender, receiver, options, tmp_path / "d")
    assert repeated.digest == card.digest, "the same seed gives the same mapper"


def test_moments_a_layer_at_a_time_find_the_same_map(tmp_path):
    sender, receiver, _ = planted_engines("llama")
    folder = tmp_path / "text"
    folder.mkdir()
    for index, text in enumerate(documents()):
        (folder / f"{index:02d}.txt").write_text(text)
    common = {"calibration": str(folder), "sequences": 12, "length": 96, "stride": 1}
    full = fit(
        sender, receiver, FitOptions(**common, solve=EXACT, panels="full"), tmp_path / "full"
    )
    # Room for the moments of one target layer: three passes.
    small = FitOptions(**common, solve=EXACT, panels="auto", memory_bytes=60_000)
    card = fit(sender, receiver, small, tmp_path / "small")
    assert [layer.sources for layer in card.layers] == [layer.sources for layer in full.layers]
    ours, theirs = load_state(tmp_path / "small"), load_state(tmp_path / "full")
    for name, tensor in theirs.tensors.items():
        assert (ours.tensors[name] - tensor).abs().max() < 1e-6, name
    assert "full moments did not fit" in card.fit.warnings[-1]
    assert card.fit.selection == "given"
    assert not (tmp_path / "small" / "moments.safetensors").exists()


def test_fewer_observations_than_unknowns_are_refused_with_both_numbers(tmp_path):
    sender, receiver, _ = planted_engines("llama")
    text = calibration(sender.tokens, sequences=1, length=80, stride=1)
    moments = measured(sender, receiver, text, tmp_path)
    with pytest.raises(InvalidRequest, match="79 observations for the 97 unknowns"):
        build_mapper(moments, SolveOptions(k=3))
    build_mapper(moments, SolveOptions(k=2))
    build_mapper(moments, SolveOptions(k=3, heads="local"))


def demo_engine(model, folder):
    tokenizer = load_tokenizer(folder)
    rope = KeyRope.probe(model)
    name = identify(model, tokenizer, rope)
    return TransformersEngine(model, HFTokens(tokenizer), name, rope)


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_and_its_twin(tmp_path, tmp_path_factory, record_testsuite_property):
    folder = str(converted_folder(demo_gguf(), tmp_path_factory.getbasetemp() / "smollm2"))
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original.eval().requires_grad_(False)
    twin = plant(original, seed=3)
    sender, receiver = demo_engine(original, folder), demo_engine(twin.model, folder)
    begin = sender.tokens.document("", chat=False).ids
    text = calibrate(
        [texts.read(name) for name in ("prose", "essay", "code", "manual")],
        sender.tokens.plain,
        bos_id=begin[0] if begin else None,
        source="shipped texts",
        sequences=6,
        length=192,
        stride=1,
    )
    moments = measured(sender, receiver, text, tmp_path)
    state = build_mapper(moments, EXACT)
    assert [layer.sources for layer in state.card.layers] == [(i,) for i in range(30)]
    ids = sender.tokens.document(texts.read("demo")[:1500], chat=False).ids
    query = sender.tokens.plain("\n\n" + texts.DEMO_QUESTION)
    found = arms(sender, receiver, state, ids, query)
    error = float((found["mapped"] - found["native"]).abs().max())
    record_testsuite_property("max_logit_difference planted SmolLM2", error)
    assert error <= 2e-3
    check_controls(found, record_testsuite_property)
    source = source_content(sender, filled(sender, ids), len(ids))
    answers = [
        [step.token_id for step in receiver.generate_steps(cache, ids, query, GREEDY)]
        for cache in (filled(receiver, ids), translated(receiver, state, source, ids))
    ]
    assert answers[0] == answers[1]
