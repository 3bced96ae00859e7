"""Tables, their digest, the parameters for the identity, and the probe's own machinery."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from cachelink_core.kv.geometry import layer_geometry, layer_windows
from cachelink_core.kv.rope import KeyRope
from cachelink_core.kv.rope_probe import PROBE_TOKENS, probe_positions
from cachelink_core.kv.rope_rules import residual_limit
from cachelink_core.kv.rope_tables import GROWTH_TOKENS
from cachelink_core.testing.tiny_models import tiny_model

LINEAR = {"rope_type": "linear", "factor": 4.0}


def test_a_position_has_the_same_table_however_it_was_reached():
    model = tiny_model("llama", num_hidden_layers=1)
    keys = torch.randn(2, 1, 16)
    for position in (0, 1, GROWTH_TOKENS - 1, GROWTH_TOKENS, 100_000):
        alone = KeyRope.probe(model).to_content(0, keys, position)
        rope = KeyRope.probe(model)
        for start in (0, position // 2, position + 5_000):
            rope.to_content(0, keys, start)
        assert torch.equal(rope.to_content(0, keys, position), alone)


def test_tables_equal_those_of_a_forward_at_that_block():
    """What a forward over one block computes is what the big table holds for it."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("ministral3", dtype=dtype, num_hidden_layers=1)
        rope = KeyRope.probe(model)
        table = next(iter(rope._tables.values()))
        for start, stop in ((0, 1), (1, 17), (250, 500), (4_000, 4_200), (99_999, 100_001)):
            positions = torch.arange(start, stop).unsqueeze(0)
            cos, sin = model.model.rotary_emb(torch.empty(1, dtype=dtype), positions)
            ours = table.at(start, stop, torch.device("cpu"))
            assert torch.equal(ours[0], cos[0, :, :8].float())
            assert torch.equal(ours[1], sin[0, :, :8].float())


def test_many_threads_may_grow_the_tables():
    model = tiny_model("llama", num_hidden_layers=1)
    keys = torch.randn(2, 8, 16)
    starts = [(7 * i * i * 131) % 60_000 for i in range(64)]
    quiet = KeyRope.probe(model)
    expected = [quiet.to_content(0, keys, start) for start in starts]
    shared = KeyRope.probe(model)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: shared.to_content(0, keys, start), starts))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tables_first_used_by_an_engine_serve_a_fit():
    rope = KeyRope.probe(tiny_model("llama", num_hidden_layers=1))
    with torch.inference_mode():
        rope.to_content(0, torch.randn(2, 8, 16), 0)
    keys = torch.randn(2, 8, 16, requires_grad=True)
    cos, sin = next(iter(rope._tables.values())).at(0, 8, keys.device)
    (keys[..., :8] * cos + keys[..., 8:] * sin).sum().backward()
    assert bool(keys.grad.abs().sum() > 0)


def test_digest_tells_tables_apart():
    digests = {
        name: KeyRope.probe(tiny_model(family, **kwargs)).tables_digest(1_000)
        for name, family, kwargs in (
            ("llama", "llama", {}),
            ("again", "llama", {"seed": 5}),
            ("theta", "llama", {"rope_scaling": {"rope_theta": 10_001.0}}),
            ("linear", "llama", {"rope_scaling": LINEAR}),
            ("bf16", "llama", {"dtype": torch.bfloat16}),
            ("gemma3", "gemma3", {}),
        )
    }
    assert digests["again"] == digests["llama"]  # weights are not tables
    assert len(set(digests.values())) == len(digests) - 1
    rope = KeyRope.probe(tiny_model("llama"))
    assert rope.tables_digest(1_000) != rope.tables_digest(1_001)
    assert rope.tables_digest(1) == rope.tables_digest(0)
    assert len(rope.tables_digest(100_000)) == 64


def test_digest_sees_tables_that_differ_far_from_position_zero_only():
    """In bf16 a slightly different base agrees at first and drifts apart."""
    bf16 = {"dtype": torch.bfloat16, "num_hidden_layers": 1}
    right = KeyRope.probe(tiny_model("llama", **bf16))
    drifting = KeyRope.probe(tiny_model("llama", rope_scaling={"rope_theta": 10_001.0}, **bf16))
    assert right.tables_digest(2) == drifting.tables_digest(2)
    assert right.tables_digest(100_000) != drifting.tables_digest(100_000)


def test_parameters_are_plain_complete_and_repeatable():
    ministral = KeyRope.probe(tiny_model("ministral3")).parameters
    assert json.loads(json.dumps(ministral)) == ministral
    assert ministral == KeyRope.probe(tiny_model("ministral3", seed=9)).parameters
    assert ministral["default"]["rope_type"] == "yarn"
    assert ministral["default"]["rope_theta"] == 1_000_000.0
    assert ministral["default"]["factor"] == 16.0
    assert ministral["default"]["llama_4_scaling_beta"] == 0.1
    assert list(ministral["default"]) == sorted(ministral["default"])
    gemma = KeyRope.probe(tiny_model("gemma3")).parameters
    assert gemma["sliding_attention"]["rope_theta"] == 10_000.0
    assert gemma["full_attention"] == {
        "factor": 8.0,
        "rope_theta": 1_000_000.0,
        "rope_type": "linear",
    }
    assert KeyRope.probe(tiny_model("gpt2")).parameters == {}
    scaled = KeyRope.probe(tiny_model("llama", rope_scaling=LINEAR)).parameters
    assert scaled != KeyRope.probe(tiny_model("llama")).parameters


def test_a_probe_leaves_no_trace_in_the_model():
    model = tiny_model("llama")
    ids = torch.arange(20).unsqueeze(0)
    before = model(ids).logits
    KeyRope.probe(model)
    assert torch.equal(model(ids).logits, before)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("window", [16, 17, 100, 2_048, 131_072, 10_000_000])
def test_probe_positions_span_the_window(window):
    positions = probe_positions(window)
    assert positions.shape == (PROBE_TOKENS,)
    assert int(positions[0]) == 0
    assert bool((positions.diff() > 0).all())
    assert int(positions[-1]) == window - 1


def test_residual_limits():
    assert residual_limit(torch.float32) == 1e-4
    assert residual_limit(torch.bfloat16) == 2**-6
    assert residual_limit(torch.float16) == 2**-9


def test_a_multimodal_wrapper_is_probed_through_its_text_model():
    text = tiny_model("ministral3").config
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 32,
        "patch_size": 16,
    }
    config = Mistral3Config(text_config=text.to_dict(), vision_config=vision, image_token_index=9)
    model = Mistral3ForConditionalGeneration(config).eval()
    rope = KeyRope.probe(model)
    assert rope.parameters == KeyRope.probe(tiny_model("ministral3")).parameters
    assert layer_geometry(model, rope) == layer_geometry(
        tiny_model("ministral3"), KeyRope.probe(tiny_model("ministral3"))
    )


def test_windows_follow_the_configuration():
    qwen = tiny_model("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert layer_windows(qwen.config, 3) == (0, 64, 64)
    assert layer_windows(tiny_model("qwen2").config, 3) == (0, 0, 0)
    assert layer_windows(tiny_model("mistral", sliding_window=None).config, 3) == (0, 0, 0)
    assert layer_windows(tiny_model("mixtral", sliding_window=32).config, 3) == (32, 32, 32)
