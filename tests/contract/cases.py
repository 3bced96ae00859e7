"""The grid that every codec and packing is run over, and tensors like those of a real cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from cachelink_core.codec_spec import CODECS, CodecSpec, DType, TensorKind, encoded_bytes
from cachelink_core.codecs.kernels import PLAIN, Kernels
from cachelink_core.codecs.native import TORCH_DTYPES
from cachelink_core.codecs.registry import tensor_codec

DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
KINDS: tuple[TensorKind, ...] = ("K", "V")
TOKENS = (1, 31, 32, 33, 128, 129, 256)
DIMS = (2, 3, 64, 80)
HEADS = (1, 3)
STARTS = (0, 3, 4, 128, 256)
SHAPES = tuple(itertools.product(HEADS, TOKENS, DIMS, STARTS))


@dataclass(frozen=True)
class Slice:
    """A tensor slice and where it lies."""

    spec: CodecSpec
    dtype: DType
    kind: TensorKind
    tensor: Tensor
    start: int

    @property
    def length(self) -> int:
        heads, tokens, dim = self.tensor.shape
        return encoded_bytes(
            self.spec, self.kind, self.dtype, heads, dim, self.start, self.start + tokens
        )

    def encode(self, kernels: Kernels = PLAIN) -> bytes:
        codec = tensor_codec(self.spec, self.dtype, kernels)
        return b"".join(codec.encode(self.tensor, self.kind, self.start))

    def decode(self, payload: bytes, out: Tensor | None = None, kernels: Kernels = PLAIN) -> Tensor:
        codec = tensor_codec(self.spec, self.dtype, kernels)
        if out is None:
            out = torch.full(self.tensor.shape, float("nan"), dtype=torch.float32)
        codec.decode(memoryview(payload), self.kind, self.start, out)
        return out


def cache_like(shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Float32 ``[H, T, D]`` with channel means and scales of its own, as keys have them."""
    heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(seed)
    means = 20 * torch.randn(heads, 1, dim, generator=generator)
    spread = torch.rand(heads, 1, dim, generator=generator) * 3
    return means + spread * torch.randn(heads, tokens, dim, generator=generator)


def make(codec: str, dtype: DType, kind: TensorKind, shape: tuple[int, int, int, int]) -> Slice:
    heads, tokens, dim, start = shape
    tensor = cache_like((heads, tokens, dim), seed=hash(shape) % 1000)
    # Keys reach a quantizing codec in content space, as float32; all else in the cache's dtype.
    content = CODECS[codec].quantized and kind == "K"
    tensor = tensor if content else tensor.to(TORCH_DTYPES[dtype])
    return Slice(CODECS[codec], dtype, kind, tensor, start)
