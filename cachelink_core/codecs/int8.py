"""Codec ``int8``: 256 levels a group, one byte a code. Error bound: see ``affine.py``.

Codes: ``[H, T, D]`` bytes.
"""

from __future__ import annotations

from typing import ClassVar

from cachelink_core.codecs.affine import AffineCodec


class Int8Codec(AffineCodec):
    """8-bit codes, asymmetric."""

    top: ClassVar[int] = 255
