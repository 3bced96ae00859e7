"""Codec ``int8``: 256 levels a group, one byte a code. Error bound: see ``affine.py``.

Codes: ``[H, T, D]`` bytes.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cachelink_core.codecs.affine import AffineCodec


class Int8Codec(AffineCodec):
    """8-bit codes, asymmetric."""

    top: ClassVar[int] = 255

    def write_codes(self, codes: Tensor, target: Tensor) -> None:
        """One byte a code."""
        target.copy_(codes)

    def read_codes(self, source: Tensor, dim: int) -> Tensor:  # noqa: ARG002
        """One code a byte."""
        return source.float()
