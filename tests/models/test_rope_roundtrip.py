"""Keys that the model's own code rotated come back, at any position and with any static scaling."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_partial
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half

from cachelink_core.kv.rope import KeyRope
from cachelink_core.kv.rope_probe import probe
from cachelink_core.testing.tiny_models import tiny_model

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8_192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
}
YARN_SCALE = 1.1386
STARTS = (0, 1, 4_096, 100_000)
TOKENS = 512
HEAD_DIM = 64


def rotated_by_the_model(model, keys, start, apply=rotate_half):
    """``[H, T, D]`` keys → the same rotated by transformers' code with the model's own tables."""
    positions = torch.arange(start, start + keys.shape[1]).unsqueeze(0)
    cos, sin = model.model.rotary_emb(keys, positions)
    return apply(keys.unsqueeze(0), keys.unsqueeze(0), cos, sin)[1][0]


def keys_like_a_cache(dtype, heads=2, tokens=TOKENS):
    """``[H, T, D]`` normal keys with two large constant channels, as trained models have them."""
    keys = torch.randn(heads, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    keys[..., 5] += 20.0
    keys[..., 40] -= 20.0
    return keys.to(dtype)


@pytest.fixture(scope="module", params=SCALINGS)
def scaling(request):
    return request.param


@pytest.fixture(scope="module")
def models(scaling):
    return {
        dtype: tiny_model(
            "llama",
            dtype=dtype,
            head_dim=HEAD_DIM,
            num_hidden_layers=1,
            rope_scaling=SCALINGS[scaling],
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.parametrize("start", STARTS)
def test_float32_returns_within_rounding(models, start):
    model = models[torch.float32]
    rope = KeyRope.probe(model)
    keys = keys_like_a_cache(torch.float32)
    cached = rotated_by_the_model(model, keys, start)
    content = rope.to_content(0, cached, start)
    assert (content - keys).abs().max() < 3e-7 * keys.abs().max()
    again = torch.empty_like(cached)
    rope.rotate_into(0, content, start, again)
    assert (again - cached).abs().max() < 3e-7 * cached.abs().max()


@pytest.mark.parametrize("start", STARTS)
def test_bf16_returns_bit_for_bit_where_float32_can_tell(models, start):
    model = models[torch.bfloat16]
    rope = KeyRope.probe(model)
    keys = keys_like_a_cache(torch.bfloat16)
    cached = rotated_by_the_model(model, keys, start)
    content = rope.to_content(0, cached, start)
    assert (content - keys.float()).abs().max() < 2**-7 * keys.abs().max()
    again = torch.empty_like(cached)
    rope.rotate_into(0, content, start, again)
    differing = again != cached
    assert differing.float().mean() < 1e-3
    partner = cached.float().roll(HEAD_DIM // 2, dims=-1).abs()
    assert (cached.float().abs()[differing] < 2**-8 * partner[differing]).all()


@pytest.mark.parametrize("start", STARTS)
def test_a_real_forward_at_these_positions_is_stripped(models, start):
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2**-6)):
        rope = KeyRope.probe(models[dtype])
        evidence = probe(models[dtype], torch.arange(start, start + 16))[0]
        before = evidence.projections[0].view(16, -1, HEAD_DIM).transpose(0, 1).float()
        content = rope.to_content(0, evidence.keys, start)
        assert (content - before).abs().max() < limit * before.abs().max()


def test_tables_of_another_precision_change_the_cache():
    """Why the tables are taken in the model's dtype: the control of the test above."""
    model = tiny_model("llama", dtype=torch.bfloat16, head_dim=HEAD_DIM, num_hidden_layers=1)
    fine = KeyRope.probe(tiny_model("llama", head_dim=HEAD_DIM, num_hidden_layers=1))
    cached = rotated_by_the_model(model, keys_like_a_cache(torch.bfloat16), 0)
    content = KeyRope.probe(model).to_content(0, cached, 0)
    again = torch.empty_like(cached)
    fine.rotate_into(0, content, 0, again)
    assert (again != cached).float().mean() > 0.05


def test_the_wrong_position_is_seen():
    model = tiny_model("llama", head_dim=HEAD_DIM, num_hidden_layers=1)
    keys = keys_like_a_cache(torch.float32)
    content = KeyRope.probe(model).to_content(0, rotated_by_the_model(model, keys, 5), 6)
    assert (content - keys).abs().max() > 0.1 * keys.abs().max()


def test_yarn_scale_is_removed_and_content_is_that_of_the_plain_model():
    """A map fitted without scaling stays valid when scaling is switched on."""
    plain = tiny_model("llama")
    scaled = tiny_model("llama", rope_scaling=SCALINGS["yarn"])
    assert scaled.model.rotary_emb.attention_scaling == pytest.approx(YARN_SCALE, abs=1e-4)
    positions = torch.arange(64)
    # Layer 0 sees the same hidden states in both models.
    contents = [
        KeyRope.probe(model).to_content(0, probe(model, positions)[0].keys, 0)
        for model in (plain, scaled)
    ]
    assert (contents[0] - contents[1]).abs().max() < 1e-6 * contents[0].abs().max()


@pytest.mark.parametrize(
    ("family", "apply"), [("cohere", rotate_interleaved), ("glm4", rotate_partial)]
)
def test_interleaved_keys_return(family, apply):
    model = tiny_model(family, head_dim=HEAD_DIM, hidden_size=4 * HEAD_DIM)
    rope = KeyRope.probe(model)
    keys = keys_like_a_cache(torch.float32)
    for start in STARTS:
        cached = rotated_by_the_model(model, keys, start, apply)
        content = rope.to_content(1, cached, start)
        assert (content - keys).abs().max() < 3e-7 * keys.abs().max()
        rope.rotate_into(1, content, start, content)
        assert (content - cached).abs().max() < 3e-7 * keys.abs().max()


def test_layers_without_rope_pass_through_as_copies():
    model = tiny_model("smollm3", dtype=torch.bfloat16)
    rope = KeyRope.probe(model)
    keys = torch.randn(2, 8, 16).bfloat16()
    content = rope.to_content(2, keys, 100)
    assert content.dtype == torch.float32
    assert torch.equal(content, keys.float())
    out = torch.empty_like(keys)
    rope.rotate_into(2, content, 100, out)
    assert torch.equal(out, keys)
    single = torch.randn(2, 8, 16)
    assert rope.to_content(2, single, 0).data_ptr() != single.data_ptr()


def test_no_tokens_and_strided_views_work():
    rope = KeyRope.probe(tiny_model("llama"))
    assert rope.to_content(0, torch.empty(2, 0, 16), 7).shape == (2, 0, 16)
    whole = torch.randn(2, 64, 16)
    window = whole[:, 20:30]
    assert torch.equal(rope.to_content(0, window, 20), rope.to_content(0, window.clone(), 20))
    target = torch.zeros(2, 64, 16)
    rope.rotate_into(0, window, 20, target[:, 20:30])
    assert torch.equal(target[:, :20], torch.zeros(2, 20, 16))
    assert bool(target[:, 20:30].abs().min() > 0)
