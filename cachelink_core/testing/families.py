"""The model families that CacheLink is tested on, and what is expected of each.

Data only. A family is *supported* when the probe of ``kv/rope.py`` finds how every layer rotates
its keys, and *refused* when its cache is not keys and values per token, or when its rotation
depends on the sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cachelink_core.identity import KeyLayout

HEAD_DIM: Final = 16
LAYERS: Final = 3
WINDOW: Final = 24
"""Sliding window of the tiny models that have one: shorter than any useful test prefix."""

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """One family.

    Attributes:
        config: name of the configuration class in transformers.
        model: name of the model class in transformers.
        overrides: configuration fields on top of ``tiny_models.BASE_CONFIG``.
        layouts: expected key layout of each layer; empty for a refused family.
        rotary_dims: expected number of rotated key channels of each layer.
        sliding: indices of the layers that attend to a window.
        refused: words that the refusal must contain; empty for a supported family.
    """

    config: str
    model: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[KeyLayout, ...] = ("half",) * LAYERS
    rotary_dims: tuple[int, ...] = (HEAD_DIM,) * LAYERS
    sliding: tuple[int, ...] = ()
    refused: str = ""


ALTERNATING: Final[dict[str, Any]] = {
    "layer_types": [SLIDING, SLIDING, FULL],
    "sliding_window": WINDOW,
}
EXPERTS: Final[dict[str, Any]] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

MINISTRAL3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8_192,
    "max_position_embeddings": 131_072,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA3_ROPE: Final[dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
OLMO3_ROPE: Final[dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 500_000.0},
    FULL: {
        "rope_type": "yarn",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16_384,
    },
}
GPT_OSS_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4_096,
}
LONGROPE: Final[dict[str, Any]] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0] * (HEAD_DIM // 2),
}


def _model(
    prefix: str, *, head: str = "ForCausalLM", config: str = "Config", **fields: Any
) -> FamilySpec:
    """A family whose configuration class is named after its model class."""
    spec = {name: fields.pop(name) for name in _EXPECTATIONS if name in fields}
    return FamilySpec(prefix + config, prefix + head, fields, **spec)


_EXPECTATIONS: Final = ("layouts", "rotary_dims", "sliding", "refused")


def _partial(rotary_dim: int) -> dict[str, Any]:
    return {"rotary_dims": (rotary_dim,) * LAYERS}


def _unrotated(*layers: int) -> dict[str, Any]:
    """Expectations for layers without RoPE among layers with the half layout."""
    return {
        "layouts": tuple("identity" if i in layers else "half" for i in range(LAYERS)),
        "rotary_dims": tuple(0 if i in layers else HEAD_DIM for i in range(LAYERS)),
    }


INTERLEAVED: Final[dict[str, Any]] = {"layouts": ("interleaved",) * LAYERS}
NARROW: Final[dict[str, Any]] = {"layouts": ("half_narrow_tables",) * LAYERS}
UNROTATED: Final[dict[str, Any]] = _unrotated(*range(LAYERS))

SUPPORTED: Final[dict[str, FamilySpec]] = {
    # Half-split pairs over the whole head.
    "llama": _model("Llama"),
    "qwen2": _model("Qwen2"),
    "qwen3": _model("Qwen3"),
    "mistral": _model("Mistral", sliding_window=WINDOW, sliding=(0, 1, 2)),
    "ministral3": _model("Ministral3", rope_parameters=MINISTRAL3_ROPE),
    "granite": _model("Granite"),
    "gemma": _model("Gemma"),
    "starcoder2": _model("Starcoder2"),
    "seed_oss": _model("SeedOss"),
    "apertus": _model("Apertus"),
    "mixtral": _model("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _model("Qwen3Moe", num_experts=4, **EXPERTS),
    # A key norm over the concatenated heads.
    "olmo2": _model("Olmo2"),
    # Alternating attention; several tables; soft caps.
    "gemma2": _model("Gemma2", sliding=(0, 1), **ALTERNATING),
    "gemma3": _model(
        "Gemma3",
        config="TextConfig",
        rope_parameters=GEMMA3_ROPE,
        sliding=(0, 1),
        **ALTERNATING,
    ),
    "olmo3": _model("Olmo3", rope_parameters=OLMO3_ROPE, sliding=(0, 1), **ALTERNATING),
    # Only the first channels of a head turn.
    "phi": _model("Phi", **_partial(8)),
    "gpt_neox": _model("GPTNeoX", **_partial(4)),
    "stablelm": _model("StableLm", qk_layernorm=True, **_partial(4)),
    "nemotron": _model("Nemotron", **_partial(8)),
    # Fused projections.
    "phi3": _model("Phi3"),
    "falcon": _model("Falcon", multi_query=True),
    # Even and odd channels form a pair.
    "glm4": _model("Glm4", **_partial(8), **INTERLEAVED),
    "cohere": _model("Cohere", **INTERLEAVED),
    "helium": _model("Helium", **INTERLEAVED),
    "ernie4_5": _model("Ernie4_5", **INTERLEAVED),
    # Tables of half the width, scaled by 1.347, and attention sinks.
    "gpt_oss": _model(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=GPT_OSS_ROPE,
        sliding=(0, 1),
        **ALTERNATING,
        **NARROW,
    ),
    # Some layers without RoPE.
    "smollm3": _model("SmolLM3", no_rope_layers=[1, 1, 0], **_unrotated(2)),
    "cohere2": _model(
        "Cohere2",
        sliding=(0, 1),
        layouts=("interleaved", "interleaved", "identity"),
        rotary_dims=(HEAD_DIM, HEAD_DIM, 0),
        **ALTERNATING,
    ),
    "exaone4": _model("Exaone4", sliding=(0, 1), **ALTERNATING, **_unrotated(2)),
    # Learned positions, and positions in the attention bias: nothing turns.
    "gpt2": _model("GPT2", head="LMHeadModel", n_embd=64, n_head=4, n_layer=LAYERS, **UNROTATED),
    "bloom": _model("Bloom", n_head=4, n_layer=LAYERS, **UNROTATED),
}
"""Families whose keys the probe understands."""

REFUSED: Final[dict[str, FamilySpec]] = {
    "phi3_longrope": _model("Phi3", rope_parameters=LONGROPE, refused="longrope"),
    "llama_dynamic": _model(
        "Llama",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        refused="dynamic NTK",
    ),
    "llama4": _model(
        "Llama4",
        config="TextConfig",
        layer_types=[FULL] * LAYERS,
        intermediate_size_mlp=96,
        num_local_experts=2,
        refused="complex-valued",
    ),
    "llama4_chunked": _model(
        "Llama4", config="TextConfig", num_local_experts=2, refused="chunked_attention"
    ),
    "deepseek_v3": _model(
        "DeepseekV3",
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        refused="latent attention",
        **EXPERTS,
    ),
    "qwen3_next": _model("Qwen3Next", num_experts=4, refused="linear_attention", **EXPERTS),
    "mamba": _model("Mamba", refused="linear_attention"),
    "lfm2": _model("Lfm2", layer_types=["conv", FULL, FULL], refused="conv"),
    "qwen2_vl": _model(
        "Qwen2VL",
        head="TextModel",
        config="TextConfig",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
        refused="M-RoPE",
    ),
    "gemma3n": _model(
        "Gemma3n",
        config="TextConfig",
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=16,
        layer_types=[FULL] * LAYERS,
        activation_sparsity_pattern=[0.0] * LAYERS,
        refused="num_kv_shared_layers",
    ),
    # The key norm comes after the rotation.
    "hunyuan": _model("HunYuanDenseV1", refused="no rule fits"),
    # Caches every KV head once for each query head that reads it.
    "falcon_grouped": _model(
        "Falcon", new_decoder_architecture=True, num_kv_heads=2, refused="no rule fits"
    ),
    # Turns the other way round.
    "nanochat": _model("NanoChat", refused="no rule fits"),
}
"""Families that must be refused at load."""

FAMILIES: Final[dict[str, FamilySpec]] = {**SUPPORTED, **REFUSED}
