"""What a configuration alone says about a model's rotation, and which models it rules out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from transformers import PreTrainedModel

from cachelink_core.errors import UnsupportedModel

STATIC_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""RoPE types whose frequencies do not depend on how long the sequence is."""

ATTENTION_TYPES: Final = frozenset({"full_attention", "sliding_attention"})

MOVING_FREQUENCIES: Final = {
    "dynamic": "dynamic NTK scaling changes the frequencies as the sequence grows",
    "longrope": "longrope changes the frequencies when the sequence passes its original length",
}


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model; of the text part for a multimodal wrapper."""
    return model.config.get_text_config(decoder=True)


def rope_parameters(config: Any) -> dict[str, Any]:
    """Every RoPE parameter as plain JSON values, keys sorted.

    Returns:
        ``{"default": {...}}``, or one entry a layer type for models with several tables, with the
        window of the model beside them; empty for a model without RoPE.
    """
    found = {name: dict(values) for name, values in _by_layer_type(config)}
    if not found:
        return {}
    found["window"] = {"max_position_embeddings": config.max_position_embeddings}
    plain: dict[str, Any] = json.loads(json.dumps(found, sort_keys=True))
    return plain


def refuse_by_config(config: Any) -> None:
    """Refuses models whose cache is not rotated keys and values per token and layer.

    Raises:
        UnsupportedModel: with the configuration field and its value.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: is_encoder_decoder=True, the prefix has no decoder cache")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{kind}: kv_lora_rank={config.kv_lora_rank}, multi-head latent attention caches a "
            "latent and a shared rotary key, not keys and values per head"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(
            f"{kind}: num_kv_shared_layers={config.num_kv_shared_layers}, layers without a cache "
            "of their own are not supported"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_TYPES)
    if others:
        raise UnsupportedModel(
            f"{kind}: layer_types has {', '.join(others)}; only {', '.join(sorted(ATTENTION_TYPES))}"
            " keep keys and values for each token"
        )
    for name, values in _by_layer_type(config):
        _refuse_by_type(f"{kind}: rope_parameters[{name}]", values)


def _refuse_by_type(where: str, values: dict[str, Any]) -> None:
    rope_type = values.get("rope_type", "default")
    if rope_type in MOVING_FREQUENCIES:
        reason = MOVING_FREQUENCIES[rope_type]
        raise UnsupportedModel(f"{where} has rope_type={rope_type}: {reason}")
    if values.get("mrope_section"):
        raise UnsupportedModel(
            f"{where} has mrope_section={values['mrope_section']}: positions with several axes "
            "(M-RoPE) are not supported"
        )
    if rope_type not in STATIC_TYPES:
        known = ", ".join(sorted(STATIC_TYPES))
        raise UnsupportedModel(f"{where} has rope_type={rope_type}: known are {known}")


def _by_layer_type(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """RoPE parameters under their layer type, or under ``default`` if all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {name: values for name, values in parameters.items() if isinstance(values, dict)}
    if nested:
        yield from sorted(nested.items())
    elif parameters:
        yield "default", parameters
