"""The shape of a model's cache, layer by layer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from cachelink_core.errors import UnsupportedModel
from cachelink_core.identity import LayerGeometry
from cachelink_core.kv.rope import KeyRope
from cachelink_core.kv.rope_config import text_config


def layer_geometry(model: PreTrainedModel, rope: KeyRope) -> tuple[LayerGeometry, ...]:
    """One geometry a layer: heads and head dim as probed, attention kind from the configuration.

    Args:
        model: a language model, or a multimodal wrapper around one.
        rope: probed on the same model.

    Raises:
        UnsupportedModel: a sliding layer without a window.
    """
    config = text_config(model)
    windows = layer_windows(config, len(rope.layers))
    return tuple(
        LayerGeometry(
            kv_heads=rule.kv_heads,
            head_dim=rule.head_dim,
            attention="sliding" if window else "full",
            window=window,
            key_layout=rule.layout,
            rotary_dim=rule.rotary_dim,
        )
        for rule, window in zip(rope.layers, windows, strict=True)
    )


def layer_windows(config: Any, layers: int) -> tuple[int, ...]:
    """Each layer's window in tokens, 0 for full attention.

    A configuration without ``layer_types`` slides in every layer if it has a ``sliding_window``:
    that is how Mistral, Mixtral and Phi-3 are written.

    Raises:
        UnsupportedModel: a sliding layer without a window.
    """
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * layers
    sliding = tuple(kind == "sliding_attention" for kind in types)
    if any(sliding) and not window:
        raise UnsupportedModel(
            f"{config.model_type}: layer_types has sliding_attention, but sliding_window={window}"
        )
    return tuple(window if slides else 0 for slides in sliding)
