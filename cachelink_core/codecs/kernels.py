"""The arithmetic of ``int8`` and ``int4``, as pure functions from tensors to tensors.

Each function is one expression from its inputs to its outputs and writes nothing in place, so a
compiler can make one loop of it that reads and writes every number once. It may turn keys on the
way, and then content-space keys never exist in memory. Run as they stand the functions are the
reference; ``compiled.py`` compiles them for the shapes of full blocks.

Axes: H KV heads, T tokens, D head dim, S key groups of N tokens each (T = S·N), G value groups,
P pairs, R bytes of a row of codes.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

PairAngles = tuple[Tensor, Tensor]
"""cos and sin ``[T, P]`` float32: how far channels i and P + i of each position's keys turn. A scale
of the rotation is part of both."""

Encoded = tuple[Tensor, Tensor, Tensor]
"""Scales, zero points and codes, each in the order of the payload (``grouping.py``)."""

SMALLEST_SCALE: Final = 2.0**-96
"""Of a constant group. Its inverse is finite, so that encoding needs no case for a range of 0."""

LARGEST_NIBBLE: Final = 15
"""Codes up to it are stored two a byte."""

_LOW_HALF: Final = 0xFFFF


class Kernels(Protocol):
    """The four functions of this module, as they stand or compiled."""

    def encode_keys(self, keys: Tensor, angles: PairAngles | None, top: int, group: int) -> Encoded:
        """See ``encode_keys``."""

    def encode_values(self, values: Tensor, top: int, width: int) -> Encoded:
        """See ``encode_values``."""

    def decode_keys(
        self, encoded: Encoded, angles: PairAngles | None, top: int, dtype: torch.dtype
    ) -> Tensor:
        """See ``decode_keys``."""

    def decode_values(
        self, encoded: Encoded, dim: int, top: int, width: int, dtype: torch.dtype
    ) -> Tensor:
        """See ``decode_values``."""

    def turns(self, rows: Tensor, pairs: int, top: int, group: int, *, encode: bool) -> bool:
        """Whether such keys are better turned here than before or after.

        Args:
            rows: ``[H, T, D]``, to be encoded or to be decoded into.
            pairs: P.
            top: the highest code.
            group: N.
            encode: or decode.
        """


class PlainKernels:
    """The functions as they stand: any shape, any device."""

    def encode_keys(self, keys: Tensor, angles: PairAngles | None, top: int, group: int) -> Encoded:
        """See ``encode_keys``."""
        return encode_keys(keys, angles, top, group)

    def encode_values(self, values: Tensor, top: int, width: int) -> Encoded:
        """See ``encode_values``."""
        return encode_values(values, top, width)

    def decode_keys(
        self,
        encoded: Encoded,
        angles: PairAngles | None,
        top: int,
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor:
        """See ``decode_keys``; float32, whatever ``dtype``: who copies the result casts it."""
        return decode_keys(encoded, angles, top, torch.float32)

    def decode_values(
        self,
        encoded: Encoded,
        dim: int,
        top: int,
        width: int,
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor:
        """See ``decode_values``; float32, whatever ``dtype``: who copies the result casts it."""
        return decode_values(encoded, dim, top, width, torch.float32)

    def turns(
        self,
        rows: Tensor,  # noqa: ARG002
        pairs: int,  # noqa: ARG002
        top: int,  # noqa: ARG002
        group: int,  # noqa: ARG002
        *,
        encode: bool,  # noqa: ARG002
    ) -> bool:
        """Never: pass by pass, the engine's rotation is faster."""
        return False


PLAIN: Final = PlainKernels()


def encode_keys(keys: Tensor, angles: PairAngles | None, top: int, group: int) -> Encoded:
    """Quantizes keys, one scale and zero point a channel and group.

    Args:
        keys: ``[H, T, D]``, any float dtype.
        angles: turns the keys before; None for keys that are in content space.
        top: the highest code.
        group: N, tokens of a group; divides T.

    Returns:
        ``[S, H, D]`` bfloat16, ``[S, H, D]`` float32 and ``[S, H, N, R]`` uint8.
    """
    rows = keys.float() if angles is None else turned(keys.float(), angles)
    rows = torch.unflatten(rows, 1, (-1, group)).transpose(0, 1)
    low, high = rows.amin(2, keepdim=True), rows.amax(2, keepdim=True)
    scale = bfloat16_above(((high - low) / top).clamp_min(SMALLEST_SCALE))
    codes = packed((rows - low).mul_(scale.reciprocal()).add_(0.5), top)
    return scale.bfloat16().squeeze(2), low.squeeze(2).contiguous(), codes.contiguous()


def encode_values(values: Tensor, top: int, width: int) -> Encoded:
    """Quantizes values, one scale and zero point for ``width`` channels of a token.

    Args:
        values: ``[H, T, D]``, any float dtype.
        top: the highest code.
        width: channels of a group; the last one may be narrower.

    Returns:
        ``[H, T, G]`` bfloat16 twice and ``[H, T, R]`` uint8.
    """
    scales, zeros, numbers = [], [], []
    for piece in torch.split(values.float(), _group_widths(values.shape[2], width), dim=-1):
        rows = torch.unflatten(piece, 2, (-1, min(width, piece.shape[2])))
        zero = bfloat16_below(rows.amin(3))
        scale = bfloat16_above(((rows.amax(3) - zero) / top).clamp_min(SMALLEST_SCALE))
        steps = (rows - zero.unsqueeze(3)).mul_(scale.reciprocal().unsqueeze(3)).add_(0.5)
        scales.append(scale.bfloat16())
        zeros.append(zero.bfloat16())
        numbers.append(steps.flatten(2))
    return _joined(scales), _joined(zeros), packed(_joined(numbers), top)


def decode_keys(
    encoded: Encoded, angles: PairAngles | None, top: int, dtype: torch.dtype
) -> Tensor:
    """The inverse of ``encode_keys``; ``angles`` turn the decoded keys.

    Returns:
        ``[S, H, N, D]`` in ``dtype``: as the payload lies, group by group.
    """
    scales, zeros, codes = encoded
    dim = scales.shape[2]
    parts = [part.float() for part in unpacked(codes, dim, top)]
    widths = [part.shape[3] for part in parts]
    scale_parts = torch.split(scales.float().unsqueeze(2), widths, dim=-1)
    zero_parts = torch.split(zeros.unsqueeze(2), widths, dim=-1)
    for part, scale, zero in zip(parts, scale_parts, zero_parts, strict=True):
        part.mul_(scale).add_(zero)
    if angles is None:
        return _joined(parts).to(dtype)
    cos, sin = (torch.unflatten(angle, 0, (-1, 1, codes.shape[2])) for angle in angles)
    if widths == [cos.shape[3]] * 2:
        # Both sides of the pairs are there already: joining them first would cost a pass.
        return _joined(_turned_pair(parts[0], parts[1], (cos, sin))).to(dtype)
    return turned(_joined(parts), (cos, sin)).to(dtype)


def decode_values(encoded: Encoded, dim: int, top: int, width: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``encode_values``: ``[H, T, D]`` in ``dtype``."""
    scales, zeros, codes = encoded
    whole = _joined(unpacked(codes, dim, top)).float()
    pieces, first = [], 0
    for piece in torch.split(whole, _group_widths(dim, width), dim=-1):
        rows = torch.unflatten(piece, 2, (-1, min(width, piece.shape[2])))
        groups = slice(first, first + rows.shape[2])
        scale, zero = scales[..., groups].float(), zeros[..., groups].float()
        pieces.append((rows * scale.unsqueeze(3)).add_(zero.unsqueeze(3)).flatten(2))
        first = groups.stop
    return _joined(pieces).to(dtype)


def turned(rows: Tensor, angles: PairAngles) -> Tensor:
    """Turns float32 rows ``[…, T, D]``; channels from 2 P on stay as they are."""
    pairs = angles[0].shape[-1]
    first, second, rest = torch.split(rows, [pairs, pairs, rows.shape[-1] - 2 * pairs], dim=-1)
    both = _turned_pair(first, second, angles)
    return _joined([*both, rest] if rest.shape[-1] else both)


def packed(numbers: Tensor, top: int) -> Tensor:
    """Truncates non-negative float32 ``[…, D]`` to codes ``[…, R]``: one a byte, or two up to 15."""
    codes = numbers.to(torch.uint8)
    if top > LARGEST_NIBBLE:
        return codes
    first, second = torch.split(codes, list(_halves(codes.shape[-1])), dim=-1)
    odd = first.shape[-1] - second.shape[-1]
    high = torch.nn.functional.pad(second, (0, odd)) if odd else second
    return (high << 4).bitwise_or_(first)


def unpacked(codes: Tensor, dim: int, top: int) -> list[Tensor]:
    """The inverse of ``packed``: all codes ``[…, D]``, or those of the low and of the high bits."""
    if top > LARGEST_NIBBLE:
        return [codes]
    return [codes & LARGEST_NIBBLE, (codes >> 4)[..., : dim // 2]]


def bfloat16_above(positive: Tensor) -> Tensor:
    """The nearest bfloat16 number at or above each positive float32 number, as float32."""
    bits = positive.contiguous().view(torch.int32)
    return ((bits + _LOW_HALF) & ~_LOW_HALF).view(torch.float32)


def bfloat16_below(numbers: Tensor) -> Tensor:
    """The nearest bfloat16 number at or below each float32 number, as float32."""
    bits = numbers.contiguous().view(torch.int32)
    # Clearing the low half rounds toward zero; a negative number has to move away from it.
    away = (bits >> 31) & _LOW_HALF
    return ((bits + away) & ~_LOW_HALF).view(torch.float32)


def _turned_pair(first: Tensor, second: Tensor, angles: PairAngles) -> list[Tensor]:
    cos, sin = angles
    return [first * cos - second * sin, second * cos + first * sin]


def _halves(dim: int) -> tuple[int, int]:
    """Channels in the low and in the high four bits of a row's bytes."""
    return (dim + 1) // 2, dim // 2


def _group_widths(dim: int, width: int) -> list[int]:
    """Channels of all full groups, and of a narrower last one."""
    rest = dim % width
    return [size for size in (dim - rest, rest) if size]


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
