"""Models that are made to be moved, not to be asked.

A configuration with ``cachelink_bytes_only: true`` marks one: its cache is computed, moved, verified
and listed like any other, and its text means nothing, so that Answer refuses it. Every layer caches
all tokens; attention reads only the last ``cachelink_attended_tokens`` of them, so that a long cache
is made in time linear in its length. Both fields are part of the model's identity.

Axes: B batch, H heads, T new tokens, S cached tokens with the new ones, D head dim.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from cachelink_core.errors import UnsupportedModel

MARK: Final = "cachelink_bytes_only"
ATTENDED: Final = "cachelink_attended_tokens"

ATTENTION: Final = "cachelink_recent"
"""Name of the attention below, as transformers knows it."""


def is_bytes_only(config: Any) -> bool:
    """Whether a model's configuration marks it.

    Raises:
        UnsupportedModel: marked, but without a number of attended tokens.
    """
    if getattr(config, MARK, False) is not True:
        return False
    attended = getattr(config, ATTENDED, None)
    if not isinstance(attended, int) or attended < 1:
        raise UnsupportedModel(f"{MARK} is true, but {ATTENDED} is {attended!r}, not at least 1")
    return True


def recent_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Each token attends to the last ones up to itself, whatever else the cache holds.

    Args:
        module: the attention layer; its configuration says how many tokens are attended to.
        query: ``[B, H, T, D]``.
        key: ``[B, H, S, D]``, as many heads as the query has; the last T are the new tokens.
        value: ``[B, H, S, D]``.
        attention_mask: not needed: one sequence, in order.
        scaling: of the scores.

    Returns:
        ``[B, T, H, D]``, and no weights.
    """
    del attention_mask
    attended: int = getattr(module.config, ATTENDED)
    new = query.shape[2]
    first = max(0, key.shape[2] - new - attended + 1)
    keys, values = key[:, :, first:], value[:, :, first:]
    ends = torch.arange(keys.shape[2] - new, keys.shape[2], device=query.device).unsqueeze(1)
    places = torch.arange(keys.shape[2], device=query.device)
    seen = (places <= ends) & (places > ends - attended)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=scaling
    )
    return mixed.transpose(1, 2).contiguous(), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The attention above makes its own; transformers would make one of T × S."""


AttentionInterface.register(ATTENTION, recent_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


__all__ = ["ATTENDED", "ATTENTION", "MARK", "is_bytes_only", "recent_attention"]
