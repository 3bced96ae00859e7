"""The arithmetic of rotary position embeddings on cached keys.

A rotary embedding turns pairs of key channels by an angle that grows with the position. Layouts
differ in which channels form a pair (``KeyLayout`` in ``identity.py``) and tables differ in where
they keep the angle of a pair (``Columns``).

Axes: H KV heads, T tokens, D head dim, P pairs (half of the rotated channels), W table width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cachelink_core.identity import KeyLayout

Columns = Literal["first_half", "even", "all"]
"""Which of a table's W columns hold the P pair angles: tables repeat them as [a b a b] (take the
first half), as [a a b b] (take the even ones), or not at all."""


def pair_columns(table: Tensor, columns: Columns) -> Tensor:
    """The angles' columns of a cos or sin table: ``[T, W]`` → ``[T, P]``, a view."""
    if columns == "first_half":
        return table[:, : table.shape[1] // 2]
    if columns == "even":
        return table[:, ::2]
    return table


def split_pairs(keys: Tensor, layout: KeyLayout, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """First and second channel of each pair: ``[H, T, D]`` → two views ``[H, T, P]``."""
    if layout == "interleaved":
        return keys[..., 0:rotary_dim:2], keys[..., 1:rotary_dim:2]
    half = rotary_dim // 2
    return keys[..., :half], keys[..., half:rotary_dim]


def rotate(
    keys: Tensor, cos: Tensor, sin: Tensor, layout: KeyLayout, rotary_dim: int, out: Tensor
) -> None:
    """Turns every pair by its angle, in float32, and casts into ``out``.

    Args:
        keys: ``[H, T, D]`` of any float dtype; may be ``out`` itself.
        cos: ``[T, P]`` float32, scaled as the model scales it.
        sin: ``[T, P]`` float32.
        layout: which channels form a pair.
        rotary_dim: channels that turn; the others are copied.
        out: ``[H, T, D]`` of any float dtype.
    """
    if rotary_dim:
        # Both products come before both copies, so that keys and out may share their memory.
        first, second = split_pairs(keys, layout, rotary_dim)
        turned_first = first * cos
        turned_first -= second * sin
        turned_second = second * cos
        turned_second += first * sin
        out_first, out_second = split_pairs(out, layout, rotary_dim)
        out_first.copy_(turned_first)
        out_second.copy_(turned_second)
    if rotary_dim < keys.shape[-1]:
        out[..., rotary_dim:].copy_(keys[..., rotary_dim:])


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor, layout: KeyLayout, rotary_dim: int) -> Tensor:
    """Turns every pair back and removes the table's scale: ``[H, T, D]`` → float32, same shape.

    The inverse of ``rotate`` is a rotation by the opposite angle divided by m² = cos² + sin². That
    is measured a position and pair, not taken from the configuration: it holds the scale of YaRN
    tables (1.14 at factor 4) and the rounding of bf16 tables (0.9946 to 1.0055) alike.
    """
    content = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    squared_scale = cos * cos + sin * sin
    rotate(keys, cos / squared_scale, -sin / squared_scale, layout, rotary_dim, content)
    return content
