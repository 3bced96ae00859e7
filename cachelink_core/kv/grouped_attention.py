"""Attention on a CPU for heads that share keys, without a copy of the keys for each head.

torch's fused kernel expects as many key heads as query heads. transformers repeats keys and values to
that number for every layer of every forward, or, for a single query token, lets torch leave its fused
kernel. Both read or write the prefix several times over and dominate an answer behind a long prefix.
Here heads that share keys become rows of one head (one query token) or look at one view (several).
Several tokens give every bit of transformers' ``sdpa``; one token goes through another matrix product
of the same kernel and may differ from it in the last bits.

Axes: B batch, Hq query heads, H KV heads, G = Hq / H, Q query tokens, T keys, D head dim.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA: Final = "grouped_sdpa"
"""Its name among transformers' attention implementations."""


def prefer_grouped(model: PreTrainedModel) -> None:
    """Switches a model on a CPU from ``sdpa`` to ``grouped_sdpa``; leaves any other as it is."""
    on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    name = model.config.get_text_config()._attn_implementation  # noqa: SLF001 - no public name
    if on_cpu and name == "sdpa":
        model.set_attn_implementation(GROUPED_SDPA)


def grouped_sdpa_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers calls.

    Args:
        module: the attention layer.
        query: ``[B, Hq, Q, D]``.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, D]``.
        attention_mask: boolean or additive, ``[1, 1, Q, T]``; None if every key is seen.
        dropout: of probabilities.
        scaling: of scores.
        **kwargs: further arguments of ``sdpa``.

    Returns:
        ``[B, Q, Hq, D]``, and None for the weights, which no fused kernel has.
    """
    if not _applies(query, key, attention_mask, dropout, kwargs):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    heads, tokens = query.shape[1:3]
    keys = key.shape[1]
    if tokens == 1:
        # One query token: the heads of a group are rows that read the same keys once.
        rows, mask = query.reshape(1, keys, heads // keys, -1), None
    else:
        # KV heads as batch: the mask and the keys broadcast over a group as views.
        rows, mask = query.reshape(keys, heads // keys, tokens, -1), attention_mask
        key, value = (
            each[0].unsqueeze(1).expand(-1, heads // keys, -1, -1) for each in (key, value)
        )
    result = torch.nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, scale=scaling
    )
    result = result.reshape(1, heads, tokens, value.shape[-1])
    return result.transpose(1, 2).contiguous(), None


def _applies(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> bool:
    """One sequence behind a cache, on a CPU, with nothing that needs another kernel."""
    batch, heads, tokens, _ = query.shape
    masked = mask is not None
    return (
        batch == 1
        and key.shape[1] < heads
        and query.device.type == "cpu"
        and not dropout
        and not torch.is_grad_enabled()
        # A single token that sees less than all, or several without a mask: rare, and left alone.
        and masked == (tokens > 1)
        and (mask is None or mask.shape[:2] == (1, 1))
        and all(kwargs.get(name) is None for name in ("softcap", "position_bias"))
    )


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa_forward)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)

__all__ = ["GROUPED_SDPA", "grouped_sdpa_forward", "prefer_grouped"]
