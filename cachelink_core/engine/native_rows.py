"""Native chunks as plain copies: a cache's tensors seen as NumPy bytes, without torch on the way.

A chunk of a small model is dozens of short runs of rows. A view of each made through torch costs as
much as copying its bytes; a slice of an array that was made once costs a tenth.

Axes: H KV heads, C capacity, T tokens, B bytes of one head's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from cachelink_core.codec_spec import TensorKind, wire_dtype
from cachelink_core.codecs.native import Bytes
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.layout import TensorSlice
from cachelink_core.manifest import Header

_KINDS: Final[tuple[TensorKind, TensorKind]] = ("K", "V")


class NativeRows:
    """The tensors of one cache, by position, as bytes."""

    def __init__(self, cache: PrefixCache, tokens: int) -> None:
        """Takes views of every buffer.

        Args:
            cache: on the CPU. A prefill may end meanwhile, and hide what has slid past.
            tokens: of the prefix; from its window on both before and after that.
        """
        self._buffers: dict[tuple[int, TensorKind], tuple[int, Bytes]] = {}
        self._heads: dict[tuple[int, TensorKind], tuple[memoryview, ...]] = {}
        for layer, geometry in enumerate(cache.layers):
            first = geometry.first_token(tokens)
            for kind in _KINDS:
                rows = cache.tensor(layer, kind, first, cache.capacity).view(torch.uint8).numpy()
                self._buffers[layer, kind] = first, rows
                self._heads[layer, kind] = tuple(memoryview(head).cast("B") for head in rows)

    @classmethod
    def of(cls, header: Header, cache: PrefixCache) -> NativeRows | None:
        """The rows, if the header's payloads are exactly the bytes that ``cache`` holds.

        They are not when the codec quantizes or casts, when keys travel without their rotation, or
        when the cache lies on a device.
        """
        dtypes = {wire_dtype(header.codec, kind, header.identity.dtype) for kind in ("K", "V")}
        plain = not header.codec.quantized and header.space == "rotated"
        if plain and dtypes == {cache.dtype} and cache.device.type == "cpu":
            return cls(cache, header.tokens)
        return None

    def gather(self, slices: Sequence[TensorSlice], payload: Bytes) -> None:
        """Copies the rows of ``slices`` from the cache to their offsets in ``payload``."""
        for piece in slices:
            rows = self._rows(piece)
            end = piece.offset + piece.length
            np.copyto(payload[piece.offset : end].reshape(rows.shape), rows)

    def scatter(self, slices: Sequence[TensorSlice], payload: Bytes) -> None:
        """Copies ``payload`` to the rows of ``slices`` in the cache."""
        for piece in slices:
            rows = self._rows(piece)
            end = piece.offset + piece.length
            np.copyto(rows, payload[piece.offset : end].reshape(rows.shape))

    def views(self, slices: Sequence[TensorSlice]) -> list[memoryview]:
        """The rows of ``slices`` where they lie, one view a head, in the order of a payload's bytes.

        They are writable, and keep the cache's memory alive.
        """
        found: list[memoryview] = []
        for piece in slices:
            rows = self._rows(piece)
            begin = (piece.start - self._buffers[piece.layer, piece.kind][0]) * rows.shape[2]
            end = begin + rows.shape[1] * rows.shape[2]
            found += [head[begin:end] for head in self._heads[piece.layer, piece.kind]]
        return found

    def _rows(self, piece: TensorSlice) -> Bytes:
        """View ``[H, T, B]``.

        Raises:
            IndexError: positions that the cache does not hold; a slice beyond would be cut short.
        """
        first, buffer = self._buffers[piece.layer, piece.kind]
        if not first <= piece.start <= piece.stop <= first + buffer.shape[1]:
            raise IndexError(
                f"layer {piece.layer} holds positions [{first}, {first + buffer.shape[1]}), "
                f"not [{piece.start}, {piece.stop})"
            )
        return buffer[:, piece.start - first : piece.stop - first]


__all__ = ["NativeRows"]
