"""Codec and packing ids → classes: explicit tables, so that a peer can name only what is here."""

from __future__ import annotations

from typing import Final

from cachelink_core.codec_spec import CodecSpec, DType, PackingSpec
from cachelink_core.codecs.affine import AffineCodec
from cachelink_core.codecs.base import Packing, TensorCodec
from cachelink_core.codecs.int4 import Int4Codec
from cachelink_core.codecs.int8 import Int8Codec
from cachelink_core.codecs.kernels import PLAIN, Kernels
from cachelink_core.codecs.native import TORCH_DTYPES, NativeCodec
from cachelink_core.codecs.packing_none import NoPacking
from cachelink_core.codecs.zstd import ZstdPacking
from cachelink_core.errors import UnknownCodec, UnknownPacking

CODECS: Final[dict[str, type[TensorCodec]]] = {
    "native": NativeCodec,
    "bf16": NativeCodec,
    "int8": Int8Codec,
    "int4": Int4Codec,
}
PACKINGS: Final[dict[str, type[Packing]]] = {"none": NoPacking, "zstd": ZstdPacking}


def tensor_codec(spec: CodecSpec, dtype: DType, kernels: Kernels = PLAIN) -> TensorCodec:
    """The codec of ``spec`` for a cache of ``dtype``.

    Args:
        spec: the codec's id and parameters.
        dtype: of the sender's cache.
        kernels: run the arithmetic of a quantizing codec.

    Raises:
        UnknownCodec: no codec of that id, or not with those parameters or that dtype.
    """
    if spec.id not in CODECS:
        raise UnknownCodec(f"codec {spec.id!r} is not one of {', '.join(CODECS)}")
    if dtype not in TORCH_DTYPES:
        raise UnknownCodec(
            f"codec {spec.id}: dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}"
        )
    groups = (spec.key_group_tokens, spec.value_group_channels)
    if spec.quantized and min(groups) < 1:
        raise UnknownCodec(
            f"codec {spec.id}: key_group_tokens {groups[0]} and value_group_channels {groups[1]} "
            "must be at least 1"
        )
    if not spec.quantized and (any(groups) or spec.sink_tokens):
        raise UnknownCodec(
            f"codec {spec.id} has no parameters, but key_group_tokens is {groups[0]}, "
            f"value_group_channels {groups[1]}, sink_tokens {spec.sink_tokens}"
        )
    codec = CODECS[spec.id]
    return codec(spec, dtype, kernels) if issubclass(codec, AffineCodec) else codec(spec, dtype)


def packing(spec: PackingSpec) -> Packing:
    """The packing of ``spec``.

    Raises:
        UnknownPacking: no packing of that id.
    """
    if spec.id not in PACKINGS:
        raise UnknownPacking(f"packing {spec.id!r} is not one of {', '.join(PACKINGS)}")
    return PACKINGS[spec.id](spec)
