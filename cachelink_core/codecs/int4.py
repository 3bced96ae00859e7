"""Codec ``int4``: 16 levels a group, two codes a byte. Error bound: see ``affine.py``.

Codes: ``[H, T, ceil(D / 2)]`` bytes. Byte i of a row holds the code of channel i in its low four
bits and that of channel ceil(D / 2) + i in its high ones, so that both halves are contiguous runs.
With odd D the last byte's high bits are 0.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cachelink_core.codecs.affine import AffineCodec


class Int4Codec(AffineCodec):
    """4-bit codes, asymmetric."""

    top: ClassVar[int] = 15

    def write_codes(self, codes: Tensor, target: Tensor) -> None:
        """Two codes a byte."""
        row, dim = target.shape[-1], codes.shape[-1]
        whole = codes.to(torch.uint8)
        target.copy_(whole[..., :row])
        target[..., : dim - row].bitwise_or_(whole[..., row:] << 4)

    def read_codes(self, source: Tensor, dim: int) -> Tensor:
        """Low halves first, then high halves."""
        row = source.shape[-1]
        codes = torch.empty((*source.shape[:-1], dim), dtype=torch.float32, device=source.device)
        codes[..., :row] = source & 0xF
        codes[..., row:] = (source >> 4)[..., : dim - row]
        return codes
