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

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cachelink_core.codec_spec import CodecSpec, DType, TensorKind, wire_dtype
from cachelink_core.codecs.base import TensorCodec
from cachelink_core.codecs.grouping import PlannedSegment, SlicePlan, plan_slice
from cachelink_core.codecs.kernels import PLAIN, Encoded, Kernels, PairAngles
from cachelink_core.codecs.native import (
    TORCH_DTYPES,
    Bytes,
    check_length,
    flat_bytes,
    numbers,
    read_rows,
)
from cachelink_core.errors import CorruptChunk, InvalidRequest


class AffineCodec(TensorCodec):
    """Quantizes to codes 0..``top``."""

    top: ClassVar[int]
    """The highest code."""

    def __init__(self, spec: CodecSpec, dtype: DType, kernels: Kernels = PLAIN) -> None:
        """Binds the parameters.

        Args:
            spec: the codec's id and parameters.
            dtype: of the sender's cache.
            kernels: run the arithmetic; the bytes of any are decoded alike by all.
        """
        super().__init__(spec, dtype)
        self._kernels = kernels

    @property
    def compiled(self) -> bool:
        """Whether its kernels may be other than plain."""
        return self._kernels is not PLAIN

    def turns(self, rows: Tensor, start: int, pairs: int, *, encode: bool) -> bool:
        """Whether ``encode`` or ``decode`` of these keys is to be given angles.

        Args:
            rows: ``[H, T, D]``, to be encoded or to be decoded into.
            start: absolute position of the first token.
            pairs: P, of the angles.
            encode: or decode.
        """
        group = self.spec.key_group_tokens
        whole = start % group == 0 and rows.shape[1] % group == 0
        return (
            whole
            and start >= self.spec.sink_tokens
            and self._kernels.turns(rows, pairs, self.top, group, encode=encode)
        )

    def encode(
        self, tensor: Tensor, kind: TensorKind, start: int, angles: PairAngles | None = None
    ) -> list[memoryview]:
        """Parts in the order of the payload; on a device they are made there and copied once.

        Args:
            tensor: as ``TensorCodec.encode``.
            kind: keys or values.
            start: absolute position of the first token.
            angles: turn keys that are not in content space; only where ``turns`` says so.

        Raises:
            InvalidRequest: the tensor holds NaN or infinities, or a range beyond bfloat16.
        """
        tensors, count = self._encoded(tensor, kind, start, angles)
        parts = _host_bytes(tensors)
        if fault := _statistics_fault(parts[:count], parts[count : 2 * count], kind):
            raise InvalidRequest(
                f"codec {self.spec.id} cannot quantize this {kind} slice at position {start}: "
                f"{fault}; codec native can carry it"
            )
        return [part.data for part in parts]

    def decode(
        self,
        payload: memoryview,
        kind: TensorKind,
        start: int,
        out: Tensor,
        angles: PairAngles | None = None,
    ) -> None:
        """Checks scales and zero points on the host, then decodes on ``out``'s device.

        Args:
            payload: as ``TensorCodec.decode``.
            kind: keys or values.
            start: absolute position of the first token.
            out: ``[H, T, D]``.
            angles: turn the decoded keys; only where ``turns`` says so.

        Raises:
            CorruptChunk: as ``TensorCodec.decode``.
        """
        plan = self._plan(out, kind, start)
        check_length(payload, plan.payload_bytes)
        # A copy, a quarter or half of the cache's bytes: aligned, writable, ready for a device.
        raw: Bytes = np.frombuffer(payload, np.uint8).copy()
        if fault := _statistics_fault([raw[plan.scales]], [raw[plan.zeros]], kind):
            raise CorruptChunk(f"{kind} slice at position {start}: {fault}")
        whole = torch.from_numpy(raw).to(out.device)
        for batch in _batches(plan):
            target = out[:, batch[0].first : batch[-1].stop]
            self._dequantize(whole, kind, batch, target, angles)
        for part in plan.segments:
            if not part.quantized:
                dtype = wire_dtype(self.spec, kind, self.dtype)
                read_rows(raw[part.data], dtype, out[:, part.first : part.stop])

    def encode_parts(self, tensor: Tensor, kind: TensorKind, start: int) -> list[Tensor]:
        """Scales, zero points, native rows and codes, where the tensor lies."""
        return [flat_bytes(part) for part in self._encoded(tensor, kind, start, None)[0]]

    def fault(
        self, payload: memoryview, kind: TensorKind, start: int, shape: tuple[int, int, int]
    ) -> str | None:
        """Looks at scales and zero points."""
        heads, tokens, dim = shape
        plan = plan_slice(self.spec, kind, self.dtype, heads, dim, start, start + tokens)
        check_length(payload, plan.payload_bytes)
        raw: Bytes = np.frombuffer(payload, np.uint8)
        # Copies: an odd address suits no wider number.
        return _statistics_fault([raw[plan.scales].copy()], [raw[plan.zeros].copy()], kind)

    def decode_from(self, raw: Tensor, kind: TensorKind, start: int, out: Tensor) -> None:
        """Dequantizes, and scatters native rows."""
        plan = self._plan(out, kind, start)
        wire = TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)]
        for batch in _batches(plan):
            self._dequantize(raw, kind, batch, out[:, batch[0].first : batch[-1].stop], None)
        for part in plan.segments:
            if not part.quantized:
                target = out[:, part.first : part.stop]
                target.copy_(numbers(raw[part.data], wire).view(target.shape))

    def _plan(self, tensor: Tensor, kind: TensorKind, start: int) -> SlicePlan:
        heads, tokens, dim = tensor.shape
        return plan_slice(self.spec, kind, self.dtype, heads, dim, start, start + tokens)

    def _encoded(
        self, tensor: Tensor, kind: TensorKind, start: int, angles: PairAngles | None
    ) -> tuple[list[Tensor], int]:
        """Tensors in the order of the payload; as many as the number are scales, then zero points."""
        rows = tensor.detach()
        plan = self._plan(rows, kind, start)
        encoded = [
            self._quantize(rows[:, batch[0].first : batch[-1].stop], kind, batch[0], angles)
            for batch in _batches(plan)
        ]
        wire = TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)]
        native = [
            rows[:, part.first : part.stop].to(wire) for part in plan.segments if not part.quantized
        ]
        scales, zeros, codes = zip(*encoded, strict=True) if encoded else ((), (), ())
        return [*scales, *zeros, *native, *codes], len(encoded)

    def _quantize(
        self, rows: Tensor, kind: TensorKind, first: PlannedSegment, angles: PairAngles | None
    ) -> Encoded:
        if kind == "K":
            return self._kernels.encode_keys(rows, angles, self.top, first.stop - first.first)
        return self._kernels.encode_values(rows, self.top, self.spec.value_group_channels)

    def _dequantize(
        self,
        whole: Tensor,
        kind: TensorKind,
        batch: Sequence[PlannedSegment],
        out: Tensor,
        angles: PairAngles | None,
    ) -> None:
        heads, tokens, dim = out.shape
        first, last = batch[0], batch[-1]
        scales = numbers(_range(whole, first.scales.start, last.scales.stop), torch.bfloat16)
        zeros = _range(whole, first.zeros.start, last.zeros.stop)
        codes = _range(whole, first.data.start, last.data.stop)
        if kind == "K":
            encoded = (
                scales.view(-1, heads, dim),
                numbers(zeros, torch.float32).view(-1, heads, dim),
                codes.view(len(batch), heads, tokens // len(batch), -1),
            )
            groups = torch.unflatten(out, 1, (len(batch), -1)).transpose(0, 1)
            groups.copy_(self._kernels.decode_keys(encoded, angles, self.top, out.dtype))
            return
        encoded = (
            scales.view(heads, tokens, -1),
            numbers(zeros, torch.bfloat16).view(heads, tokens, -1),
            codes.view(heads, tokens, -1),
        )
        width = self.spec.value_group_channels
        out.copy_(self._kernels.decode_values(encoded, dim, self.top, width, out.dtype))


def _batches(plan: SlicePlan) -> Iterator[list[PlannedSegment]]:
    """Quantized segments of equal length that follow each other: one pass for all of them."""
    for key, found in groupby(plan.segments, lambda part: (part.quantized, part.stop - part.first)):
        if key[0]:
            yield list(found)


def _range(whole: Tensor, start: int, stop: int) -> Tensor:
    """``whole[start:stop]``, in a third of the time: a small slice is decoded in that of ten."""
    return whole.narrow(0, start, stop - start)


def _host_bytes(tensors: Sequence[Tensor]) -> list[Bytes]:
    """The bytes of each tensor on the host, in one copy if they lie on a device."""
    if tensors and tensors[0].device.type != "cpu":
        flat = [flat_bytes(tensor) for tensor in tensors]
        tensors = torch.split(torch.cat(flat).cpu(), [piece.numel() for piece in flat])
    return [_host_view(tensor) for tensor in tensors]


def _host_view(tensor: Tensor) -> Bytes:
    """As ``byte_view``; a small tensor is encoded in the time of thirty calls of torch."""
    raw: Bytes = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    return raw


def _statistics_fault(
    scales: Sequence[Bytes], zeros: Sequence[Bytes], kind: TensorKind
) -> str | None:
    """What is wrong with the scales and zero points, looking at their bits; None if nothing is."""
    if any(_bits(raw, np.uint16).max(initial=0) >= 0x7F80 for raw in scales):
        return "a scale is negative, infinite or NaN"
    if kind == "K":
        bad = any((_bits(r, np.uint32) & 0x7FFFFFFF).max(initial=0) >= 0x7F800000 for r in zeros)
    else:
        bad = any((_bits(raw, np.uint16) & 0x7FFF).max(initial=0) >= 0x7F80 for raw in zeros)
    return "a zero point is infinite or NaN" if bad else None


def _bits(raw: Bytes, dtype: type[np.unsignedinteger]) -> np.ndarray[tuple[int], np.dtype]:
    return raw.view(dtype)
