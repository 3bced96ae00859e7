"""Codec ``int4``: 16 levels a group, two codes a byte. Error bound: see ``affine.py``.

Codes: ``[H, T, ceil(D / 2)]`` bytes. Byte i of a row holds the code of channel i in its low four
bits and that of channel ceil(D / 2) + i in its high ones, so that both halves are contiguous runs.
With odd D the last byte's high bits are 0.
"""

from __future__ import annotations

from typing import ClassVar

from cachelink_core.codecs.affine import AffineCodec


class Int4Codec(AffineCodec):
    """4-bit codes, asymmetric."""

    top: ClassVar[int] = 15
