"""Seeded models of each family with random weights, small enough for a unit test.

They are built from configurations: nothing is downloaded. The weights are drawn wide enough that
logits differ clearly between tokens, so that a wrong cache shows in greedy decoding.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from cachelink_core.testing.families import FAMILIES, HEAD_DIM, LAYERS, FamilySpec
from cachelink_core.testing.tiny_tokenizer import BOS_ID, EOS_ID, IM_END_ID, tiny_tokenizer

VOCABULARY: Final = 320
"""Rows of the embedding: more than the tokenizer has, as in many published models."""

BASE_CONFIG: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 131_072,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID, IM_END_ID],
    "pad_token_id": None,
}

BIASED_CHANNELS: Final = 4
"""Key channels a head that get a constant bias."""


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    rope_scaling: Mapping[str, Any] | None = None,
    key_bias: float = 0.0,
    **overrides: Any,
) -> PreTrainedModel:
    """Builds one model in eval mode. The same arguments give the same weights.

    Args:
        family: a key of ``FAMILIES``.
        dtype: of the weights, drawn in float32 and rounded.
        seed: of the weights.
        rope_scaling: RoPE parameters on top of the family's own, for instance
            ``{"rope_type": "linear", "factor": 4.0}``.
        key_bias: constant added to four key channels of every head, ``±key_bias`` and
            ``±key_bias / 6``; the model must have key biases (Qwen2). Qwen2.5 has biases up to
            several hundred, which ruin per-token quantization.
        **overrides: configuration fields.

    Raises:
        KeyError: no such family.
    """
    spec = FAMILIES[family]
    config = _config(spec, rope_scaling, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, spec.model)(config)
        _spread_parameters(model)
    if key_bias:
        _bias_keys(model, key_bias)
    _round_parameters(model, dtype)
    return model.eval().requires_grad_(False)


def save_tiny(family: str, folder: Path, **kwargs: Any) -> Path:
    """Saves a tiny model with the tiny tokenizer, as a local model folder.

    Args:
        family: a key of ``FAMILIES``.
        folder: made if it is not there.
        **kwargs: of ``tiny_model``.

    Returns:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(family, **kwargs).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _config(
    spec: FamilySpec, rope_scaling: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> Any:
    """The family's configuration; a field that its class does not have is not passed."""
    config_class = getattr(transformers, spec.config)
    known = {field.name for field in dataclasses.fields(config_class)}
    known |= config_class.attribute_map.keys()
    fields = {name: value for name, value in BASE_CONFIG.items() if name in known}
    fields |= copy.deepcopy({**spec.overrides, **overrides})
    if rope_scaling is not None:
        rope = fields.get("rope_parameters") or {"rope_theta": 10_000.0}
        fields["rope_parameters"] = {**rope, **rope_scaling}
    return config_class(**fields)


def _round_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts as loading in that dtype does.

    ``model.to(dtype)`` would round the rotary frequencies too, which loading leaves in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _spread_parameters(model: nn.Module) -> None:
    """Draws the parameters that start as constants: norm weights and biases.

    A norm weight of one and a bias of zero would hide a norm or a bias that is left out.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and bool((parameter == parameter[0]).all()):
            centre = 1.0 if name.endswith("weight") and float(parameter.data[0]) == 1.0 else 0.0
            parameter.data.normal_(mean=centre, std=0.1)


def _bias_keys(model: nn.Module, bias: float) -> None:
    """Adds constants to the slowest key channels of every head, as trained models have them.

    Slow channels turn little over a prefix, so that the constants nearly cancel in the softmax.
    """
    half = HEAD_DIM // 2
    channels = [half - 1, half - 2, HEAD_DIM - 1, HEAD_DIM - 2][:BIASED_CHANNELS]
    values = torch.tensor([bias, -bias / 6, -bias, bias / 6])
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            assert module.bias is not None, f"{name} has no bias"
            module.bias.data.view(-1, HEAD_DIM)[:, channels] += values
