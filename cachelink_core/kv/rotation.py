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


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, layout: KeyLayout, rotary_dim: int) -> Tensor:
    """Turns every pair by its angle, in float32.

    Args:
        keys: ``[H, T, D]`` of any float dtype.
        cos: ``[T, P]`` float32, scaled as the model scales it.
        sin: ``[T, P]`` float32.
        layout: which channels form a pair.
        rotary_dim: channels that turn; the others are copied.

    Returns:
        ``[H, T, D]`` float32, new.
    """
    source = keys.float()
    turned = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    first, second = split_pairs(source, layout, rotary_dim)
    turned_first, turned_second = split_pairs(turned, layout, rotary_dim)
    torch.mul(first, cos, out=turned_first)
    turned_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second)
    turned_second.addcmul_(first, sin)
    turned[..., rotary_dim:] = source[..., rotary_dim:]
    return turned


def inverse_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables that turn every pair back and remove the tables' scale.

    The inverse of ``rotate`` is a rotation by the opposite angle divided by m² = cos² + sin². That
    is measured a position and pair, not taken from the configuration: it holds the scale of YaRN
    tables (1.14 at factor 4) and the rounding of bf16 tables (0.9946 to 1.0055) alike.

    Args:
        cos: ``[T, P]`` float32.
        sin: ``[T, P]`` float32.
    """
    squared_scale = cos * cos + sin * sin
    return cos / squared_scale, -sin / squared_scale


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor, layout: KeyLayout, rotary_dim: int) -> Tensor:
    """Turns every pair back and removes the table's scale; arguments and result as ``rotate``."""
    return rotate(keys, *inverse_angles(cos, sin), layout, rotary_dim)
