"""Floating-point items split into byte planes, so that exponents can be packed apart from noise.

An item of w bytes is rotated left by one bit, which puts the 8 exponent bits of bfloat16 and float32
into its highest byte and the sign below the mantissa. Plane k holds byte w − 1 − k of every item:
plane 0 is the exponents (of float16: 5 exponent and 3 mantissa bits), the others are sign and
mantissa. The split loses nothing whatever the items are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from cachelink_core.codecs.native import Bytes

ITEM_TYPES: Final[dict[int, type[np.unsignedinteger]]] = {2: np.uint16, 4: np.uint32}
"""Item widths that have planes."""


def split_planes(raw: Bytes, item_bytes: int) -> list[Bytes]:
    """Splits bytes into ``item_bytes`` planes of equal length.

    Args:
        raw: a whole number of items.
        item_bytes: 2 or 4.
    """
    items = raw.view(ITEM_TYPES[item_bytes])
    bits = 8 * item_bytes
    rotated = (items << 1) | (items >> (bits - 1))
    return [(rotated >> shift).astype(np.uint8) for shift in range(bits - 8, -1, -8)]


def join_planes(planes: Sequence[Bytes], item_bytes: int) -> Bytes:
    """The inverse of ``split_planes``."""
    rotated = planes[0].astype(ITEM_TYPES[item_bytes])
    for plane in planes[1:]:
        rotated <<= 8
        rotated |= plane
    items = rotated >> 1
    rotated <<= 8 * item_bytes - 1
    items |= rotated
    return items.view(np.uint8)
