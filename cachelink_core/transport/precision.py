"""In which numbers a mapper computes (ARCHITECTURE: weights in the receiver's dtype, sums in float32).

Axes: T tokens, I input channels, O output channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cachelink_core import limits

ROW_TILE: Final = limits.TOKEN_CUT
"""Rows of one full-precision GEMM. A GEMM picks its kernel by its number of rows, and kernels round
differently (one row does here, against seven and more). With every GEMM of this many rows, and each
token always at the same row of its tile, a token's result does not depend on how it was chunked."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of one mapper.

    Attributes:
        grid: operands of GEMMs are rounded to it: the weights' dtype.
        storage: what they are kept in: ``grid``, or float32 on a CPU, whose 16-bit GEMM would round
            its result to 16 bits; the products of 16-bit numbers are exact in float32.
        output: float32, or float64 for float64 weights.
        tile: rows of a GEMM, None for as many as there are.
    """

    grid: torch.dtype
    storage: torch.dtype
    output: torch.dtype
    tile: int | None

    def operand(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Rounds to the grid and stores."""
        return tensor.to(device=device, dtype=self.grid).to(self.storage)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """One GEMM with accumulation in the output's precision.

        Args:
            rows: ``[T, I]`` or ``[H, T, I]``, in ``storage``; T a multiple of ``tile``.
            weight: ``[I, O]`` or ``[H, I, O]``, in ``storage``.

        Returns:
            ``[T, O]`` or ``[H, T, O]`` in ``output``.
        """
        if rows.dtype != self.output:
            return _wide_product(rows, weight, self.output)
        tokens = rows.shape[-2]
        if self.tile is None or tokens == self.tile:
            return torch.matmul(rows, weight)
        tiles = torch.split(rows, self.tile, dim=-2)
        if weight.dim() == 2:
            result = rows.new_empty(tokens, weight.shape[-1])
            for part, out in zip(tiles, torch.split(result, self.tile), strict=True):
                torch.mm(part, weight, out=out)
            return result
        return torch.cat([torch.matmul(part, weight) for part in tiles], dim=-2)


def precision_for(dtype: torch.dtype, device: torch.device) -> Precision:
    """The formats for a receiver of ``dtype`` on ``device``."""
    full = dtype in (torch.float32, torch.float64)
    output = torch.float64 if dtype == torch.float64 else torch.float32
    storage = output if full or device.type == "cpu" else dtype
    return Precision(dtype, storage, output, ROW_TILE if storage == output else None)


def _wide_product(rows: Tensor, weight: Tensor, output: torch.dtype) -> Tensor:
    """16-bit operands, 32-bit result: what the tensor cores compute before they round."""
    multiply = torch.mm if weight.dim() == 2 else torch.bmm
    try:
        result: Tensor = multiply(rows, weight, out_dtype=output)
    except (TypeError, NotImplementedError):
        # Older torch: exact in float32 as well, only slower.
        return torch.matmul(rows.to(output), weight.to(output))
    return result
