"""Where everything lies in the payload of a quantized slice.

The payload of positions ``[start, stop)`` of one tensor ``[H, T, D]`` is, without padding:

1. the scales of all quantized segments in order of position, bfloat16:
   keys ``[H, D]`` a segment, values ``[H, T, G]``, G = ceil(D / value_group_channels);
2. the zero points of all quantized segments in the same order and shape:
   keys float32, values bfloat16;
3. the native rows of all native segments in order of position (sinks, key groups that are too
   short), each ``[H, T, D]``: keys float32, values in the model's dtype;
4. the codes of all quantized segments in order of position, each ``[H, T, row]`` bytes.

T is the segment's number of tokens. Segments are ``codec_spec.segments``: keys are cut at multiples
of ``key_group_tokens``, and the tokens of a segment share one scale a channel; values have one
segment behind the sinks, and the channels of a group share one scale a token.

Axes: H KV heads, T tokens, D head dim, G value groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cachelink_core.codec_spec import (
    ITEM_BYTES,
    CodecSpec,
    DType,
    Segment,
    TensorKind,
    data_bytes,
    scale_bytes,
    segments,
    wire_dtype,
)


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """One segment and where its bytes are in the payload.

    Attributes:
        first: its first token, relative to the slice.
        stop: one beyond its last.
        quantized: whether ``data`` holds codes or native rows.
        scales: byte range of its scales; empty for native rows.
        zeros: byte range of its zero points; empty for native rows.
        data: byte range of its codes or rows.
    """

    first: int
    stop: int
    quantized: bool
    scales: slice
    zeros: slice
    data: slice


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The payload of one slice.

    Attributes:
        segments: in order of position.
        scales: byte range of all scales.
        zeros: byte range of all zero points.
        payload_bytes: all bytes.
    """

    segments: tuple[PlannedSegment, ...]
    scales: slice
    zeros: slice
    payload_bytes: int


@lru_cache(maxsize=4096)
def plan_slice(
    codec: CodecSpec, kind: TensorKind, dtype: DType, heads: int, dim: int, start: int, stop: int
) -> SlicePlan:
    """Lays out positions ``[start, stop)`` of one tensor.

    Args:
        codec: a quantizing codec.
        kind: keys and values are grouped along different axes.
        dtype: the cache's own.
        heads: H.
        dim: D.
        start: first absolute position.
        stop: one beyond the last.
    """
    parts = segments(codec, kind, start, stop)
    pairs = [
        scale_bytes(codec, kind, heads, dim, part.tokens) if part.quantized else 0 for part in parts
    ]
    scale_at = 0
    zero_at = scales_stop = sum(_scale_share(kind, pair) for pair in pairs)
    native_at = sum(pairs)
    item = ITEM_BYTES[wire_dtype(codec, kind, dtype)]
    data_at = native_at + sum(_native_bytes(part, heads, dim, item) for part in parts)
    planned: list[PlannedSegment] = []
    for part, pair in zip(parts, pairs, strict=True):
        scales = slice(scale_at, scale_at + _scale_share(kind, pair))
        zeros = slice(zero_at, zero_at + pair - _scale_share(kind, pair))
        scale_at, zero_at = scales.stop, zeros.stop
        if part.quantized:
            data = slice(data_at, data_at + data_bytes(codec, heads, part.tokens, dim))
            data_at = data.stop
        else:
            data = slice(native_at, native_at + _native_bytes(part, heads, dim, item))
            native_at = data.stop
        planned.append(
            PlannedSegment(
                part.start - start, part.stop - start, part.quantized, scales, zeros, data
            )
        )
    return SlicePlan(tuple(planned), slice(0, scales_stop), slice(scales_stop, zero_at), data_at)


def channel_groups(codec: CodecSpec, kind: TensorKind, dim: int) -> tuple[slice, ...]:
    """Channel ranges with statistics of their own: all channels for keys, G groups for values."""
    if kind == "K":
        return (slice(0, dim),)
    width = codec.value_group_channels
    return tuple(slice(at, min(dim, at + width)) for at in range(0, dim, width))


def _scale_share(kind: TensorKind, pair_bytes: int) -> int:
    """Of the bytes of scales and zero points together, those of the scales."""
    return pair_bytes // 3 if kind == "K" else pair_bytes // 2


def _native_bytes(part: Segment, heads: int, dim: int, item_bytes: int) -> int:
    return 0 if part.quantized else heads * part.tokens * dim * item_bytes
