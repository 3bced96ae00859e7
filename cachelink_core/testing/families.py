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


FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
ALTERNATING: Final = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": WINDOW}

FAMILIES: Final[dict[str, FamilySpec]] = {
    "llama": FamilySpec("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": FamilySpec("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": FamilySpec("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": FamilySpec(
        "MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}, sliding=(0, 1, 2)
    ),
    "ministral3": FamilySpec(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {
            "rope_parameters": {
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
            },
        },
    ),
}
