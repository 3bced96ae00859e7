"""What int8 and int4 share: ``value = zero + code · scale`` with one scale and zero a group.

A group is a key channel over the tokens of one segment, or a few channels of one token of the
values. Its zero point is stored first, rounded down so that it lies at or below the minimum (key
zero points are float32 and need no rounding); then the scale, rounded up so that the highest code
reaches the maximum. Codes are computed from the *stored* numbers, so with n the highest code

    |decoded − x| ≤ scale / 2 + 2⁻²¹ · max|x|,
    scale ≤ max((max − min + z) / n, 2⁻⁹⁶) · (1 + 2⁻⁷),  z = 0 for keys, 2⁻⁷ · |min| for values,

before the cast to ``out``'s dtype; the second term is float32 rounding. Nothing is clipped. Ranges
shrunk by a few percent, or searched per group for the least squares or fourth powers, were tried on
SmolLM2: the mean divergence over six texts was 0.0041–0.0049 nats against 0.0044 with keys alone
quantized, mostly worse, and the best of them within the noise of the measure.

The decoder is exact arithmetic up to one rounding: a code has 8 bits and a bfloat16 scale has 8, so
their product fits float32, and the sum is rounded once, with or without a fused multiply-add. That
is what makes the golden bytes hold on every machine.

Axes: H KV heads, T tokens, D head dim, G value groups.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind, wire_dtype
from cachelink_core.codecs.base import TensorCodec
from cachelink_core.codecs.grouping import PlannedSegment, SlicePlan, channel_groups, plan_slice
from cachelink_core.codecs.native import (
    TORCH_DTYPES,
    Bytes,
    byte_view,
    check_length,
    numbers,
    read_rows,
)
from cachelink_core.errors import CorruptChunk, InvalidRequest

SMALLEST_SCALE: Final = 2.0**-96
"""Of a constant group. Its inverse is finite, so that encoding needs no case for a range of 0."""

_LOW_HALF: Final = 0xFFFF


class AffineCodec(TensorCodec):
    """Quantizes to codes 0..``top``; a subclass decides how codes become bytes."""

    top: ClassVar[int]
    """The highest code."""

    @abstractmethod
    def write_codes(self, codes: Tensor, target: Tensor) -> None:
        """Stores codes.

        Args:
            codes: ``[H, T, D]`` float32, non-negative, to be truncated to integers.
            target: ``[H, T, row]`` uint8.
        """

    @abstractmethod
    def read_codes(self, source: Tensor, dim: int) -> Tensor:
        """The inverse: ``[H, T, row]`` uint8 to ``[H, T, D]`` float32 in memory of its own."""

    def encode(self, tensor: Tensor, kind: TensorKind, start: int) -> list[memoryview]:
        """One buffer, written in place; on a device it is filled there and copied to the host.

        Raises:
            InvalidRequest: the tensor holds NaN or infinities, or a range beyond bfloat16.
        """
        plan = self._plan(tensor, kind, start)
        payload = byte_view(self._whole(tensor, kind, plan).cpu())
        if fault := _statistics_fault(np.asarray(payload), plan, kind):
            raise InvalidRequest(
                f"codec {self.spec.id} cannot quantize this {kind} slice at position {start}: "
                f"{fault}; codec native can carry it"
            )
        return [payload]

    def decode(self, payload: memoryview, kind: TensorKind, start: int, out: Tensor) -> None:
        """Checks scales and zero points on the host, then decodes on ``out``'s device."""
        plan = self._plan(out, kind, start)
        check_length(payload, plan.payload_bytes)
        # A copy, a quarter or half of the cache's bytes: aligned, writable, ready for a device.
        raw: Bytes = np.frombuffer(payload, np.uint8).copy()
        if fault := _statistics_fault(raw, plan, kind):
            raise CorruptChunk(f"{kind} slice at position {start}: {fault}")
        whole = torch.from_numpy(raw).to(out.device)
        for part in plan.segments:
            target = out[:, part.first : part.stop]
            if part.quantized:
                self._dequantize(whole, kind, part, target)
            else:
                read_rows(raw[part.data], wire_dtype(self.spec, kind, self.dtype), target)

    def encode_parts(self, tensor: Tensor, kind: TensorKind, start: int) -> list[Tensor]:
        """One buffer, written in place where the tensor lies."""
        return [self._whole(tensor, kind, self._plan(tensor, kind, start))]

    def fault(
        self, payload: memoryview, kind: TensorKind, start: int, shape: tuple[int, int, int]
    ) -> str | None:
        """Looks at scales and zero points."""
        heads, tokens, dim = shape
        plan = plan_slice(self.spec, kind, self.dtype, heads, dim, start, start + tokens)
        check_length(payload, plan.payload_bytes)
        return _statistics_fault(np.frombuffer(payload, np.uint8), plan, kind)

    def decode_from(self, raw: Tensor, kind: TensorKind, start: int, out: Tensor) -> None:
        """Dequantizes, and scatters native rows."""
        wire = TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)]
        for part in self._plan(out, kind, start).segments:
            target = out[:, part.first : part.stop]
            if part.quantized:
                self._dequantize(raw, kind, part, target)
            else:
                target.copy_(numbers(raw[part.data], wire).view(target.shape))

    def _whole(self, tensor: Tensor, kind: TensorKind, plan: SlicePlan) -> Tensor:
        """The payload ``[B]``, on the tensor's device."""
        rows = tensor.detach()
        whole = torch.empty(plan.payload_bytes, dtype=torch.uint8, device=rows.device)
        for part in plan.segments:
            piece = rows[:, part.first : part.stop]
            if part.quantized:
                self._quantize(piece.float(), kind, part, whole)
            else:
                wire = TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)]
                _put(whole[part.data], piece.to(wire))
        return whole

    def _plan(self, tensor: Tensor, kind: TensorKind, start: int) -> SlicePlan:
        heads, tokens, dim = tensor.shape
        return plan_slice(self.spec, kind, self.dtype, heads, dim, start, start + tokens)

    def _quantize(
        self, rows: Tensor, kind: TensorKind, part: PlannedSegment, whole: Tensor
    ) -> None:
        heads, tokens, dim = rows.shape
        axis = 1 if kind == "K" else 2
        codes = torch.empty_like(rows, memory_format=torch.contiguous_format)
        scales: list[Tensor] = []
        zeros: list[Tensor] = []
        for channels in channel_groups(self.spec, kind, dim):
            group = rows[:, :, channels]
            low, high = group.amin(axis, keepdim=True), group.amax(axis, keepdim=True)
            zero = low if kind == "K" else _bfloat16_below(low)
            scale = _bfloat16_above(((high - zero) / self.top).clamp_min(SMALLEST_SCALE))
            part_codes = codes[:, :, channels]
            torch.sub(group, zero, out=part_codes)
            part_codes.mul_(scale.reciprocal()).add_(0.5)
            scales.append(scale)
            zeros.append(zero)
        _put(whole[part.scales], torch.cat(scales, 2).bfloat16())
        zero = torch.cat(zeros, 2)
        _put(whole[part.zeros], zero if kind == "K" else zero.bfloat16())
        self.write_codes(codes, whole[part.data].view(heads, tokens, -1))

    def _dequantize(
        self, whole: Tensor, kind: TensorKind, part: PlannedSegment, out: Tensor
    ) -> None:
        heads, tokens, dim = out.shape
        shape = (heads, 1, dim) if kind == "K" else (heads, tokens, -1)
        scales = _get(whole[part.scales], torch.bfloat16).view(shape)
        zeros = _get(whole[part.zeros], torch.float32 if kind == "K" else torch.bfloat16).view(
            shape
        )
        codes = self.read_codes(whole[part.data].view(heads, tokens, -1), dim)
        for index, channels in enumerate(channel_groups(self.spec, kind, dim)):
            group = slice(None) if kind == "K" else slice(index, index + 1)
            values = codes[:, :, channels]
            values.mul_(scales[:, :, group]).add_(zeros[:, :, group])
        out.copy_(codes)


def _bfloat16_above(positive: Tensor) -> Tensor:
    """The nearest bfloat16 number at or above each positive float32 number, as float32."""
    bits = positive.contiguous().view(torch.int32)
    return ((bits + _LOW_HALF) & ~_LOW_HALF).view(torch.float32)


def _bfloat16_below(numbers: Tensor) -> Tensor:
    """The nearest bfloat16 number at or below each float32 number, as float32."""
    bits = numbers.contiguous().view(torch.int32)
    # Clearing the low half rounds toward zero; a negative number has to move away from it.
    away = (bits >> 31) & _LOW_HALF
    return ((bits + away) & ~_LOW_HALF).view(torch.float32)


def _put(target: Tensor, numbers: Tensor) -> None:
    """Writes numbers as bytes, at any alignment."""
    target.copy_(numbers.contiguous().view(-1).view(torch.uint8))


def _get(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads bytes as float32 numbers, at any alignment."""
    return source.clone().view(dtype).float()


def _statistics_fault(raw: Bytes, plan: SlicePlan, kind: TensorKind) -> str | None:
    """What is wrong with the scales and zero points, looking at their bits; None if nothing is."""
    scales = np.frombuffer(raw[plan.scales].tobytes(), np.uint16)
    if scales.size and scales.max() >= 0x7F80:
        return "a scale is negative, infinite or NaN"
    if kind == "K":
        zeros32 = np.frombuffer(raw[plan.zeros].tobytes(), np.uint32)
        bad = zeros32.size and (zeros32 & 0x7FFFFFFF).max() >= 0x7F800000
    else:
        zeros16 = np.frombuffer(raw[plan.zeros].tobytes(), np.uint16)
        bad = zeros16.size and (zeros16 & 0x7FFF).max() >= 0x7F80
    return "a zero point is infinite or NaN" if bad else None
