"""The family matrix: each family is understood layer by layer, or refused with the reason."""

import re

import pytest
import torch

from cachelink_core.errors import UnsupportedModel
from cachelink_core.identity import LayerGeometry
from cachelink_core.kv.geometry import layer_geometry
from cachelink_core.kv.rope import KeyRope
from cachelink_core.kv.rope_probe import probe
from cachelink_core.kv.rope_rules import RESIDUAL_LIMIT, key_sources, measure_rules
from cachelink_core.testing.families import (
    FAMILIES,
    HEAD_DIM,
    LAYERS,
    REFUSED,
    SUPPORTED,
    WINDOW,
)
from cachelink_core.testing.tiny_models import tiny_model

WRONG_RULE_RESIDUAL = 0.1


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_layer_of_a_supported_family_is_understood(family):
    spec = FAMILIES[family]
    rope = KeyRope.probe(tiny_model(family))
    print(family, [f"{rule} {rule.residual:.1e}" for rule in rope.layers])  # noqa: T201
    assert tuple(rule.layout for rule in rope.layers) == spec.layouts
    assert tuple(rule.rotary_dim for rule in rope.layers) == spec.rotary_dims
    assert all(rule.residual < RESIDUAL_LIMIT / 100 for rule in rope.layers)


@pytest.mark.parametrize("family", SUPPORTED)
def test_bf16_finds_the_same_rules(family):
    expected = [(str(rule), rule.columns) for rule in KeyRope.probe(tiny_model(family)).layers]
    found = KeyRope.probe(tiny_model(family, dtype=torch.bfloat16))
    print(family, [f"{rule} {rule.residual:.1e}" for rule in found.layers])  # noqa: T201
    assert [(str(rule), rule.columns) for rule in found.layers] == expected


@pytest.mark.parametrize("family", SUPPORTED)
def test_wrong_rules_miss_by_orders_of_magnitude(family):
    spec = FAMILIES[family]
    for index, evidence in enumerate(probe(tiny_model(family))):
        right = (spec.layouts[index], spec.rotary_dims[index])
        wrong = [
            rule for rule, _ in measure_rules(evidence) if (rule.layout, rule.rotary_dim) != right
        ]
        assert wrong or family in {"gpt2", "bloom"}  # without tables there is one rule only
        assert all(rule.residual > WRONG_RULE_RESIDUAL for rule in wrong)


@pytest.mark.parametrize("family", SUPPORTED)
def test_stripped_keys_are_the_keys_before_the_rotation(family):
    """At consecutive positions, which the probe did not see."""
    model = tiny_model(family)
    rope = KeyRope.probe(model)
    for index, evidence in enumerate(probe(model, torch.arange(40))):
        content = rope.to_content(index, evidence.keys, 0)
        sources = key_sources(evidence)
        errors = [(content - source).abs().max() / source.abs().max() for source in sources]
        assert min(errors) < 1e-6
        rotated = torch.empty_like(evidence.keys)
        rope.rotate_into(index, content, 0, rotated)
        error = (rotated - evidence.keys).abs().max() / evidence.keys.abs().max()
        assert error < 1e-6


@pytest.mark.parametrize("family", SUPPORTED)
def test_geometry(family):
    spec = FAMILIES[family]
    model = tiny_model(family)
    heads = probe(model)[0].keys.shape[0]
    layers = layer_geometry(model, KeyRope.probe(model))
    assert layers == tuple(
        LayerGeometry(
            kv_heads=heads,
            head_dim=HEAD_DIM,
            attention="sliding" if index in spec.sliding else "full",
            window=WINDOW if index in spec.sliding else 0,
            key_layout=spec.layouts[index],
            rotary_dim=spec.rotary_dims[index],
        )
        for index in range(LAYERS)
    )
    assert layers[0].token_bytes("bfloat16") == 2 * heads * HEAD_DIM * 2


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unsupported_families_are_refused_with_the_reason(family, dtype):
    model = tiny_model(family, dtype=dtype)
    with pytest.raises(UnsupportedModel, match=re.escape(FAMILIES[family].refused)) as refusal:
        KeyRope.probe(model)
    print(refusal.value)  # noqa: T201
    assert str(refusal.value).startswith(model.config.model_type)


@pytest.mark.parametrize("family", [f for f in REFUSED if REFUSED[f].refused == "no rule fits"])
def test_a_refusal_by_measurement_names_every_residual(family):
    with pytest.raises(UnsupportedModel) as refusal:
        KeyRope.probe(tiny_model(family))
    measured = re.findall(r"(identity|half|interleaved)/\d+[^,]* (\d[\d.e-]*)", str(refusal.value))
    assert {name for name, _ in measured} == {"identity", "half", "interleaved"}
    assert all(float(value) > WRONG_RULE_RESIDUAL for _, value in measured)


def test_a_model_that_does_not_run_with_a_plain_cache_is_refused():
    model = tiny_model("llama")

    def refuse(*_):
        raise TypeError("needs its own cache class")

    model.model.layers[1].register_forward_pre_hook(refuse)
    with pytest.raises(UnsupportedModel, match="probe forward failed: TypeError: needs its own"):
        KeyRope.probe(model)


def test_large_key_biases_do_not_blur_the_probe():
    for dtype in (torch.float32, torch.bfloat16):
        rope = KeyRope.probe(tiny_model("qwen2", dtype=dtype, key_bias=300.0))
        assert [rule.layout for rule in rope.layers] == ["half"] * LAYERS


@pytest.mark.parametrize("family", SUPPORTED)
def test_same_arguments_give_the_same_weights_and_varied_text(family):
    first, second = tiny_model(family, seed=3), tiny_model(family, seed=3)
    other = tiny_model(family, seed=4)
    ids = torch.arange(4, 36).unsqueeze(0)
    logits = first(ids).logits
    assert torch.equal(logits, second(ids).logits)
    assert not torch.equal(logits, other(ids).logits)
    assert logits[0].argmax(-1).unique().numel() > 8
