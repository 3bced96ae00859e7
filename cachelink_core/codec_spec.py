"""Codec and packing ids, their parameters, and the encoded size of a tensor: pure data, no torch.

A *codec* turns one tensor slice ``[H, T, D]`` into bytes; a *packing* turns the bytes of a whole
chunk into fewer bytes. What a codec's bytes hold is written in proto/README.md; here is only what
both sides must agree on before any byte exists: names, parameters and sizes.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from cachelink_core import limits
from cachelink_core.errors import UnknownCodec, UnknownPacking

CodecId = Literal["native", "bf16", "int8", "int4"]
PackingId = Literal["none", "zstd"]
DType = Literal["float32", "bfloat16", "float16"]
TensorKind = Literal["K", "V"]
Trust = Literal["exact", "lossy", "mapped"]
Space = Literal["content", "rotated"]

ITEM_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
TRUST_ORDER: Final[tuple[Trust, ...]] = ("mapped", "lossy", "exact")
"""From least to most trusted."""


class CodecSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A codec and its parameters; the parameters are zero for codecs that quantize nothing.

    Attributes:
        id: the codec.
        key_group_tokens: tokens that share one scale of a key channel; groups are aligned to
            multiples of it in absolute positions and never cross a block.
        value_group_channels: channels of one head and token that share one scale of the values.
        sink_tokens: first positions that are not quantized.
    """

    id: CodecId
    key_group_tokens: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    value_group_channels: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    sink_tokens: Annotated[int, msgspec.Meta(ge=0, le=128)] = 0

    @property
    def quantized(self) -> bool:
        """Whether the codec loses more than a cast does."""
        return self.id in ("int8", "int4")


class PackingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packing and its level (0 for ``none``). The level is the sender's business alone."""

    id: PackingId
    level: Annotated[int, msgspec.Meta(ge=0, le=22)] = 0


NATIVE: Final = CodecSpec("native")
BF16: Final = CodecSpec("bf16")
INT8: Final = CodecSpec("int8", 128, 64, limits.SINK_TOKENS)
INT4: Final = CodecSpec("int4", 128, 64, limits.SINK_TOKENS)
NO_PACKING: Final = PackingSpec("none")
ZSTD: Final = PackingSpec("zstd", 1)

CODECS: Final[dict[str, CodecSpec]] = {s.id: s for s in (NATIVE, BF16, INT8, INT4)}
PACKINGS: Final[dict[str, PackingSpec]] = {s.id: s for s in (NO_PACKING, ZSTD)}


def parse_codec(text: str) -> tuple[CodecSpec, PackingSpec]:
    """Reads ``int4`` or ``int4+zstd``.

    Raises:
        UnknownCodec: the part before ``+`` names no codec.
        UnknownPacking: the part after it names no packing.
    """
    codec, _, packing = text.partition("+")
    if codec not in CODECS:
        raise UnknownCodec(f"codec {codec!r} is not one of {', '.join(CODECS)}")
    if (packing or "none") not in PACKINGS:
        raise UnknownPacking(f"packing {packing!r} is not one of {', '.join(PACKINGS)}")
    return CODECS[codec], PACKINGS[packing or "none"]


def codec_name(codec: CodecSpec, packing: PackingSpec) -> str:
    """The inverse of ``parse_codec``."""
    return codec.id if packing.id == "none" else f"{codec.id}+{packing.id}"


def expected_trust(codec: CodecSpec, dtype: str, *, mapped: bool) -> Trust:
    """What an installed cache is worth: nothing that was rounded counts as exact."""
    if mapped:
        return "mapped"
    rounded = codec.quantized or (codec.id == "bf16" and dtype != "bfloat16")
    return "lossy" if rounded else "exact"


def wire_dtype(codec: CodecSpec, kind: TensorKind, model_dtype: DType) -> DType:
    """The dtype of the rows that ``codec`` stores unquantized.

    Beside quantized keys they are float32: these keys are in content space, where a key bias of
    ±300 may sit on a channel, and 16 bits would round the sinks by more than 4-bit codes round the
    others. A sink then comes back bit for bit after RoPE is put back.
    """
    if codec.id == "bf16":
        return "bfloat16"
    return "float32" if codec.quantized and kind == "K" else model_dtype


def item_bytes(codec: CodecSpec, model_dtype: DType) -> int:
    """Width of the payload's floating-point items, for the packing; 1 where it holds codes."""
    return 1 if codec.quantized else ITEM_BYTES[wire_dtype(codec, "V", model_dtype)]


class Segment(msgspec.Struct, frozen=True):
    """Tokens ``[start, stop)`` of a slice (absolute positions) and whether they are quantized."""

    start: int
    stop: int
    quantized: bool

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.stop - self.start


def segments(codec: CodecSpec, kind: TensorKind, start: int, stop: int) -> tuple[Segment, ...]:
    """Splits positions ``[start, stop)`` of one slice into native rows and quantization groups.

    Keys are cut at multiples of ``key_group_tokens``; values need no cut, since their groups lie
    within a token. The sinks are always native, and so is a key group of fewer than
    ``limits.MIN_GROUP_TOKENS`` tokens.
    """
    if start >= stop:
        return ()
    if not codec.quantized:
        return (Segment(start, stop, quantized=False),)
    found: list[Segment] = []
    sink_stop = min(stop, max(start, codec.sink_tokens))
    if sink_stop > start:
        found.append(Segment(start, sink_stop, quantized=False))
    at = sink_stop
    while at < stop:
        end = stop
        if kind == "K":
            end = min(stop, (at // codec.key_group_tokens + 1) * codec.key_group_tokens)
        keep = kind == "K" and end - at < limits.MIN_GROUP_TOKENS
        found.append(Segment(at, end, quantized=not keep))
        at = end
    return tuple(found)


KEY_GROUP_BYTES: Final = 6
"""bfloat16 scale and float32 zero point of one key channel of one group: the zero point is the
channel's mean or minimum, which key biases make large (±300), and must not be rounded."""

VALUE_GROUP_BYTES: Final = 4
"""bfloat16 scale and bfloat16 zero point of one value group."""


def scale_bytes(codec: CodecSpec, kind: TensorKind, heads: int, dim: int, tokens: int) -> int:
    """Bytes of the scales and zero points of one quantized segment of ``tokens`` tokens.

    Keys have one pair per channel of the segment (``KEY_GROUP_BYTES``), values one pair per group
    of channels of each token (``VALUE_GROUP_BYTES``).
    """
    if kind == "K":
        return heads * dim * KEY_GROUP_BYTES
    groups = -(-dim // codec.value_group_channels)
    return heads * tokens * groups * VALUE_GROUP_BYTES


def data_bytes(codec: CodecSpec, heads: int, tokens: int, dim: int) -> int:
    """Bytes of the quantized data of a segment: rows of ``dim`` codes, each row padded to a byte."""
    row = (dim + 1) // 2 if codec.id == "int4" else dim
    return heads * tokens * row


def encoded_bytes(
    codec: CodecSpec,
    kind: TensorKind,
    model_dtype: DType,
    heads: int,
    dim: int,
    start: int,
    stop: int,
) -> int:
    """Exact bytes of positions ``[start, stop)`` of one tensor after ``codec``.

    Args:
        codec: the codec.
        kind: keys and values are grouped along different axes.
        model_dtype: the cache's own dtype.
        heads: H.
        dim: D.
        start: first absolute position.
        stop: one beyond the last.
    """
    item = ITEM_BYTES[wire_dtype(codec, kind, model_dtype)]
    total = 0
    for part in segments(codec, kind, start, stop):
        if part.quantized:
            total += scale_bytes(codec, kind, heads, dim, part.tokens)
            total += data_bytes(codec, heads, part.tokens, dim)
        else:
            total += heads * part.tokens * dim * item
    return total
