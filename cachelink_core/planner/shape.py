"""How many bytes a cache has, and as what a codec sends it.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal, Protocol

import msgspec

from cachelink_core import limits
from cachelink_core.codec_spec import ITEM_BYTES, DType, TensorKind, encoded_bytes, parse_codec

_KINDS: Final[tuple[TensorKind, ...]] = ("K", "V")


class LayerShape(msgspec.Struct, frozen=True):
    """Layers of equal geometry.

    Attributes:
        kv_heads: H.
        head_dim: D.
        window: W of a sliding layer, 0 of a full one.
        count: how many there are.
    """

    kv_heads: int
    head_dim: int
    window: int = 0
    count: int = 1

    def first_token(self, tokens: int) -> int:
        """First position that the layer still holds of ``tokens`` tokens."""
        return max(0, tokens - self.window + 1) if self.window else 0


class CacheShape(msgspec.Struct, frozen=True):
    """A model's cache.

    Attributes:
        layers: groups of equal layers.
        dtype: of the cache.
        block_tokens: tokens of a block.
    """

    layers: tuple[LayerShape, ...]
    dtype: DType
    block_tokens: int = limits.DEFAULT_BLOCK_TOKENS

    def native_bytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens in the model's own dtype."""
        item = ITEM_BYTES[self.dtype]
        return sum(
            2 * layer.count * layer.kv_heads * layer.head_dim * item
            * (tokens - layer.first_token(tokens))
            for layer in self.layers
        )  # fmt: skip

    def encoded_bytes(self, codec: str, tokens: int) -> int:
        """Bytes after the codec and before its packing; exactly what the layout gives.

        Raises:
            UnknownCodec: there is no such codec.
            UnknownPacking: there is no such packing.
        """
        spec, _ = parse_codec(codec)
        return _encoded_bytes(self, spec.id, tokens)

    def blocks(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def chunks(self, tokens: int) -> int:
        """About how many messages carry them: runs of a full block have RUN_RAW_BYTES at most."""
        a_block = -(-self.native_bytes(self.block_tokens) // limits.RUN_RAW_BYTES)
        return self.blocks(tokens) * a_block


class LayerLike(Protocol):
    """What is read of a layer of a model's identity."""

    @property
    def kv_heads(self) -> int:
        """H."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def window(self) -> int:
        """W of a sliding layer, 0 of a full one."""


def shape_of(
    layers: Iterable[LayerLike], dtype: DType, block_tokens: int = limits.DEFAULT_BLOCK_TOKENS
) -> CacheShape:
    """The cache of a model with these layers, equal neighbours counted."""
    found: list[LayerShape] = []
    for layer in layers:
        one = LayerShape(layer.kv_heads, layer.head_dim, layer.window)
        if found and msgspec.structs.replace(found[-1], count=1) == one:
            found[-1] = msgspec.structs.replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(one)
    return CacheShape(tuple(found), dtype, block_tokens)


@lru_cache(maxsize=4096)
def _encoded_bytes(
    shape: CacheShape, codec: Literal["native", "bf16", "int8", "int4"], tokens: int
) -> int:
    spec, _ = parse_codec(codec)
    total = 0
    for layer in shape.layers:
        first = layer.first_token(tokens)
        for at in range(0, tokens, shape.block_tokens):
            start, stop = max(at, first), min(at + shape.block_tokens, tokens)
            if start >= stop:
                continue
            for kind in _KINDS:
                total += layer.count * encoded_bytes(
                    spec, kind, shape.dtype, layer.kv_heads, layer.head_dim, start, stop
                )
    return total
