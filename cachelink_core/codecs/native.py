"""Codecs ``native`` and ``bf16``: rows in a floating-point dtype, byte for byte.

Payload: ``[H, T, D]`` in C order, little-endian, in ``codec_spec.wire_dtype``. ``native`` keeps the
cache's own dtype, so every bit survives, NaN payloads included. ``bf16`` is the same for a bf16
model; from a wider dtype it rounds to nearest even, a relative error of at most 2⁻⁹ for normal
numbers.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cachelink_core.codec_spec import DType, TensorKind, encoded_bytes, wire_dtype
from cachelink_core.codecs.base import TensorCodec
from cachelink_core.errors import CorruptChunk

Bytes = npt.NDArray[np.uint8]

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class NativeCodec(TensorCodec):
    """Stores rows as they are. Encoding copies nothing: the parts are views of the tensor."""

    def encode(self, tensor: Tensor, kind: TensorKind, start: int) -> list[memoryview]:  # noqa: ARG002
        """One view per run of contiguous rows: a whole tensor, or one head's ``[T, D]`` slab."""
        rows = tensor.detach().to(
            device="cpu", dtype=TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)]
        )
        if not rows.numel():
            return []
        if rows.is_contiguous():
            return [byte_view(rows)]
        return [byte_view(head.contiguous()) for head in rows]

    def decode(self, payload: memoryview, kind: TensorKind, start: int, out: Tensor) -> None:
        """Copies the rows into ``out``: straight, or through a cast where its dtype differs."""
        heads, tokens, dim = out.shape
        check_length(
            payload,
            encoded_bytes(self.spec, kind, self.dtype, heads, dim, start, start + tokens),
        )
        read_rows(np.frombuffer(payload, np.uint8), wire_dtype(self.spec, kind, self.dtype), out)

    def encode_parts(self, tensor: Tensor, kind: TensorKind, start: int) -> list[Tensor]:  # noqa: ARG002
        """The rows, gathered."""
        rows = tensor.detach().to(TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)])
        return [flat_bytes(rows)]

    def fault(
        self, payload: memoryview, kind: TensorKind, start: int, shape: tuple[int, int, int]
    ) -> str | None:
        """Any bytes are rows."""
        heads, tokens, dim = shape
        check_length(
            payload, encoded_bytes(self.spec, kind, self.dtype, heads, dim, start, start + tokens)
        )
        return None

    def decode_from(self, raw: Tensor, kind: TensorKind, start: int, out: Tensor) -> None:  # noqa: ARG002
        """Scatters the rows, through a cast where the dtypes differ."""
        wire = TORCH_DTYPES[wire_dtype(self.spec, kind, self.dtype)]
        out.copy_(numbers(raw, wire).view(out.shape))


def check_length(payload: memoryview, expected: int) -> None:
    """Compares a payload's length with its plan.

    Raises:
        CorruptChunk: they differ.
    """
    if payload.nbytes != expected:
        raise CorruptChunk(f"payload has {payload.nbytes} bytes; the slice has {expected}")


def byte_view(rows: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    flat: Bytes = rows.reshape(-1).view(torch.uint8).numpy()
    return flat.data


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor ``[B]`` where it lies, gathered if they do not lie together."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes ``[B]`` as numbers, copied only where their address does not suit ``dtype``."""
    aligned = raw.storage_offset() % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype)


def read_rows(raw: Bytes, dtype: DType, out: Tensor) -> None:
    """Copies native rows into ``out``.

    Args:
        raw: bytes of ``[H, T, D]`` in ``dtype``; may be read-only and at any alignment.
        dtype: of the bytes.
        out: ``[H, T, D]``, any device and strides with D contiguous.
    """
    wire = TORCH_DTYPES[dtype]
    if not out.numel():
        return
    if out.dtype == wire and out.device.type == "cpu":
        target = out.detach().view(torch.uint8).numpy()
        np.copyto(target, raw.reshape(target.shape))
        return
    # A copy of its own: torch wants memory that is writable and aligned, a chunk's may be neither.
    own = torch.from_numpy(raw.copy()).view(wire)
    out.copy_(own.view(out.shape))
