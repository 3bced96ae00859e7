"""What can happen to a cache on its way: the project's codecs, the usual first try, a key bias.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cachelink_bench.codec_quality import Subject
from cachelink_core.codec_spec import NO_PACKING, CodecSpec, PackingSpec, TensorKind
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.offer import make_header
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import Header

BIASED_CHANNELS = 4
"""Channels of each head that get a constant, evenly spread, as in models with a key bias."""


@dataclass(frozen=True)
class Handover:
    """The real path: every chunk encoded, packed, unpacked, decoded and re-rotated.

    Attributes:
        codec: with its parameters.
        packing: of the chunks.
        key_bias: added to ``BIASED_CHANNELS`` channels of the content-space keys before the codec
            and subtracted after it.
    """

    codec: CodecSpec
    packing: PackingSpec = NO_PACKING
    key_bias: float = 0.0

    def __call__(self, engine: TransformersEngine, subject: Subject, out: PrefixCache) -> int:
        """Hands the subject's cache over; returns the wire bytes."""
        header = self.header(engine, subject)
        path = cast("Engine", _KeyBias(engine, self.key_bias)) if self.key_bias else engine
        encoder = ChunkEncoder(path, header, subject.native)
        installer = ChunkInstaller(path, header, out)
        sent = 0
        for block, run in header.layout.chunks():
            wire = b"".join(encoder.encode(block, run))
            installer.install(block, run, memoryview(wire))
            sent += len(wire)
        installer.finish()
        return sent

    def header(self, engine: TransformersEngine, subject: Subject) -> Header:
        """The manifest header of this handover."""
        return make_header(
            engine,
            subject.prefix,
            self.codec,
            self.packing,
            sender_epoch="benchmark",
            block_tokens=subject.block_tokens,
        )


@dataclass(frozen=True)
class PerToken:
    """The usual first try: one scale per token and head, symmetric, keys in rotated space.

    Attributes:
        bits: of a code.
        key_bias: as in ``Handover``, rotated with the keys.
    """

    bits: int
    key_bias: float = 0.0

    def __call__(self, engine: TransformersEngine, subject: Subject, out: PrefixCache) -> int:
        """Rounds the whole cache; returns codes and bfloat16 scales in bytes."""
        tokens, sent = len(subject.prefix), 0
        kinds: tuple[TensorKind, ...] = ("K", "V")
        for layer, geometry in enumerate(subject.native.layers):
            for kind in kinds:
                source = subject.native.tensor(layer, kind, 0, tokens)
                bias = self._rotated_bias(engine, layer, source) if kind == "K" else None
                out.tensor(layer, kind, 0, tokens).copy_(self._round(source.float(), bias))
                sent += geometry.kv_heads * tokens * (geometry.head_dim * self.bits // 8 + 2)
        return sent

    def _round(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        shifted = rows if bias is None else rows + bias
        top = 2 ** (self.bits - 1) - 1
        scale = (shifted.abs().amax(-1, keepdim=True) / top).bfloat16().float().clamp_min(1e-30)
        rounded: Tensor = (shifted / scale).round().clamp(-top - 1, top) * scale
        return rounded if bias is None else rounded - bias

    def _rotated_bias(self, engine: TransformersEngine, layer: int, keys: Tensor) -> Tensor | None:
        if not self.key_bias:
            return None
        content = bias_like(keys, self.key_bias).expand(keys.shape).contiguous()
        rotated = torch.empty_like(content)
        engine.rotate_into(layer, content, 0, rotated)
        return rotated


def bias_like(keys: Tensor, constant: float) -> Tensor:
    """Float32 ``[1, 1, D]``: the constant on a few channels, 0 elsewhere."""
    dim = keys.shape[-1]
    bias = torch.zeros(1, 1, dim, device=keys.device)
    step = max(1, dim // BIASED_CHANNELS)
    bias[..., step // 2 :: step] = constant
    return bias


class _KeyBias:
    """An engine whose content-space keys carry a constant that its cache does not have."""

    def __init__(self, engine: TransformersEngine, constant: float) -> None:
        self._engine = engine
        self._constant = constant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def to_content(self, layer: int, keys: Tensor, start: int) -> Tensor:
        """Adds the constant."""
        return self._engine.to_content(layer, keys, start) + bias_like(keys, self._constant)

    def rotate_into(self, layer: int, content: Tensor, start: int, out: Tensor) -> None:
        """Takes it away again."""
        self._engine.rotate_into(layer, content - bias_like(content, self._constant), start, out)
