"""A seeded model with a wide cache and little else: long caches of any size, made in seconds.

By default a token takes 131,072 bytes in bfloat16, as in Llama-3-8B or Qwen3-14B with 32 layers, while
the hidden state has 128 channels and the weights fit in 40 MB. The model is marked *bytes only*
(``engine/bytes_only.py``).

Its cache is made to look like a trained model's to a codec, which random weights alone do not give:

- **Channels differ.** The rows of the key and value projections have log-normal scales, keys more
  than values.
- **Keys have means.** A bias on keys is heavy-tailed: most channels lie around zero, a few far away.
- **Tokens are not independent.** Keys and values of a layer follow from 128 hidden channels, which
  the layers before have mixed over the last tokens; equal tokens in different places differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cachelink_core.atomic_write import locked, new_folder
from cachelink_core.engine.bytes_only import ATTENDED, MARK
from cachelink_core.engine.loading import quiet_progress
from cachelink_core.testing.tiny_models import VOCABULARY
from cachelink_core.testing.tiny_tokenizer import BOS_ID, EOS_ID, IM_END_ID, tiny_tokenizer

VERSION: Final = 1
"""Raised when the same shape would give other weights."""

KEY_SPREAD: Final = 0.8
VALUE_SPREAD: Final = 0.4
"""Standard deviations of the logarithm of a channel's scale."""

BIAS_FREEDOM: Final = 3.0
"""Degrees of freedom of Student's t, from which key biases are drawn."""


@dataclass(frozen=True, slots=True)
class WideShape:
    """Sizes and seed of one model.

    Attributes:
        layers: L.
        kv_heads: H; there are as many query heads, which is the least.
        head_dim: D.
        hidden: channels of the hidden state.
        positions: the window.
        attended: tokens that each one attends to.
        seed: of the weights.
    """

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 128
    positions: int = 32_768
    attended: int = 256
    seed: int = 0

    @property
    def name(self) -> str:
        """Of the model's folder."""
        return (
            f"wide-kv-{VERSION}-{self.layers}x{self.kv_heads}x{self.head_dim}"
            f"-{self.hidden}-{self.positions}-{self.attended}-{self.seed}"
        )

    @property
    def token_bytes(self) -> int:
        """Of keys and values of one token in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


WIDE: Final = WideShape()
"""131,072 bytes a token."""


def wide_model(shape: WideShape = WIDE) -> PreTrainedModel:
    """Builds the model, in bfloat16 and eval mode. The same shape gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model: PreTrainedModel = LlamaForCausalLM(_config(shape))
        for layer in model.model.layers:
            _shape_channels(layer.self_attn.k_proj, KEY_SPREAD)
            _shape_channels(layer.self_attn.v_proj, VALUE_SPREAD)
            _spread_means(layer.self_attn.k_proj.bias)
    for parameter in model.parameters():  # `to` would round the rotary frequencies as well
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model.eval().requires_grad_(False)


def wide_kv_folder(root: Path, shape: WideShape = WIDE) -> Path:
    """The model's folder below ``root``, which daemons load by its path; written the first time.

    Two processes that want the same model write it once: the second one waits.
    """
    folder = root / shape.name
    if not folder.exists():
        with locked(root / f".{shape.name}.lock"):
            if not folder.exists():
                with new_folder(folder) as aside, quiet_progress():
                    wide_model(shape).save_pretrained(aside)
                    tiny_tokenizer().save_pretrained(aside)
    return folder


def _config(shape: WideShape) -> LlamaConfig:
    marks: dict[str, Any] = {MARK: True, ATTENDED: shape.attended}
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.kv_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention_bias=True,
        max_position_embeddings=shape.positions,
        initializer_range=shape.hidden**-0.5,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, IM_END_ID],
        pad_token_id=None,
        tie_word_embeddings=True,
        **marks,
    )


def _shape_channels(projection: torch.nn.Linear, spread: float) -> None:
    """Scales each output channel by a log-normal factor."""
    scales = torch.exp(spread * torch.randn(projection.out_features, 1))
    projection.weight.data *= scales


def _spread_means(bias: Tensor) -> None:
    """Draws biases from Student's t."""
    normal = torch.randn_like(bias)
    chi = torch.distributions.Chi2(BIAS_FREEDOM).sample(bias.shape)
    bias.data.copy_(normal / (chi / BIAS_FREEDOM).sqrt())


__all__ = ["WIDE", "WideShape", "wide_kv_folder", "wide_model"]
