"""A prefix's keys and values in preallocated buffers, with room for a query and an answer behind.

Positions are absolute everywhere: token 0 is the first of the prefix. A sliding layer of window W
shows the model the last ``W - 1`` held tokens and those of the current forward, whatever else its
buffer still holds. So a sender, whose prefill kept every token, and a receiver, which was given the
window only, compute the same thing from the same tensors.

Axes: H KV heads, C capacity of one buffer in tokens, T tokens, D head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from cachelink_core.codec_spec import DType, TensorKind
from cachelink_core.identity import LayerGeometry
from cachelink_core.kv.model_cache import model_cache

if TYPE_CHECKING:
    from cachelink_core.kv.branch import Branch

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(slots=True)
class LayerBuffer:
    """One layer's storage.

    Attributes:
        geometry: of the layer.
        origin: absolute position of row 0.
        first: first absolute position whose content may be used; at least ``origin``.
        keys: ``[H, C, D]``, as the model caches them.
        values: ``[H, C, D]``.
    """

    geometry: LayerGeometry
    origin: int
    first: int
    keys: Tensor
    values: Tensor

    def visible_from(self, length: int) -> int:
        """First position that a forward behind ``length`` tokens attends to in this layer."""
        return self.geometry.first_token(length)

    def rows(self, kind: TensorKind, start: int, stop: int) -> Tensor:
        """View ``[H, stop - start, D]`` of absolute positions.

        Raises:
            IndexError: outside the buffer.
        """
        buffer = self.keys if kind == "K" else self.values
        end = self.origin + buffer.shape[1]
        if not self.origin <= start <= stop <= end:
            raise IndexError(
                f"positions [{start}, {stop}) are not in the buffer's [{self.origin}, {end})"
            )
        return buffer[:, start - self.origin : stop - self.origin]

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.keys.nbytes + self.values.nbytes


def cache_bytes(
    layers: Sequence[LayerGeometry], dtype: DType, tokens: int, headroom: int, *, whole: bool
) -> int:
    """Bytes that ``PrefixCache.allocate`` takes for the same arguments."""
    return sum(
        layer.token_bytes(dtype) * (tokens + headroom - _origin(layer, tokens, whole=whole))
        for layer in layers
    )


def _origin(layer: LayerGeometry, tokens: int, *, whole: bool) -> int:
    return 0 if whole else layer.first_token(tokens)


class Room:
    """The room behind a prefix, where several answers take turns; see ``kv/branch.py``.

    Attributes:
        lock: over whose rows lie there.
        occupant: the answer whose rows those are, if it is one of several.
    """

    __slots__ = ("lock", "occupant")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.occupant: Branch | None = None


class PrefixCache:
    """Keys and values of tokens ``[0, length)``, and free room up to ``capacity``.

    Not locked: whoever holds the lease on the headroom is the only one to write. Reading held
    positions beside a write behind them is safe.

    Attributes:
        layers: geometry, one per layer.
        dtype: of every buffer.
        device: of every buffer.
        capacity: absolute positions that fit.
        buffers: one per layer, for ``kv/model_cache.py`` only.
        room: behind the prefix, for ``kv/branch.py`` only.
    """

    def __init__(self, dtype: DType, buffers: tuple[LayerBuffer, ...], capacity: int) -> None:
        """Wraps allocated buffers; use ``allocate``."""
        self.layers: tuple[LayerGeometry, ...] = tuple(b.geometry for b in buffers)
        self.dtype: DType = dtype
        self.device: torch.device = buffers[0].keys.device
        self.capacity = capacity
        self.buffers = buffers
        self.room = Room()
        self._length = 0

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerGeometry],
        dtype: DType,
        tokens: int,
        headroom: int,
        device: torch.device | str = "cpu",
        *,
        whole: bool,
    ) -> PrefixCache:
        """Allocates buffers and touches each of their pages, so that no later write faults.

        Args:
            layers: geometry, one per layer.
            dtype: of the cache.
            tokens: n, of the prefix.
            headroom: tokens of room behind it.
            device: where the buffers lie.
            whole: sliding layers hold every token, as a prefill needs; otherwise positions
                ``[max(0, n - W + 1), n + headroom)``, all that a continuation of n tokens sees.
        """
        capacity = tokens + headroom
        buffers = []
        for layer in layers:
            origin = _origin(layer, tokens, whole=whole)
            shape = layer.kv_heads, capacity - origin, layer.head_dim
            # empty + zero_ writes every byte now; zeros would map pages lazily.
            keys, values = (
                torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device).zero_()
                for _ in range(2)
            )
            buffers.append(LayerBuffer(layer, origin, origin, keys, values))
        return cls(dtype, tuple(buffers), capacity)

    @property
    def length(self) -> int:
        """Tokens filled, the same for all layers."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, filled or not."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def first_token(self, layer: int) -> int:
        """First absolute position that ``layer`` holds."""
        return self.buffers[layer].first

    def tensor(self, layer: int, kind: TensorKind, start: int, stop: int) -> Tensor:
        """The buffer itself at absolute positions, for reading or for decoding into.

        Args:
            layer: which layer.
            kind: keys or values.
            start: first position.
            stop: one beyond the last; may lie beyond ``length``, up to ``capacity``.

        Returns:
            A view ``[H, stop - start, D]`` with D contiguous.

        Raises:
            IndexError: a position that the layer does not hold.
        """
        buffer = self.buffers[layer]
        if start < buffer.first:
            raise IndexError(f"layer {layer} holds positions from {buffer.first}, not {start}")
        return buffer.rows(kind, start, stop)

    def set_length(self, tokens: int) -> None:
        """Declares positions ``[0, tokens)`` filled, after tensors were written directly.

        Raises:
            IndexError: beyond the capacity, or a sliding layer lacks the window before ``tokens``.
        """
        if not 0 <= tokens <= self.capacity:
            raise IndexError(f"length {tokens} is not within [0, {self.capacity}]")
        if not self.can_continue_from(tokens):
            raise IndexError(f"a sliding layer no longer holds the window before {tokens}")
        self._length = tokens

    def can_continue_from(self, tokens: int) -> bool:
        """Whether every layer holds what a forward behind ``tokens`` tokens attends to."""
        return all(b.first <= b.visible_from(tokens) for b in self.buffers)

    def use_window(self) -> None:
        """Forgets, in sliding layers, what a continuation of ``length`` tokens cannot see.

        The cache then stands for exactly what a receiver is given. What the model computes does
        not change: it is shown the window in any case.
        """
        for buffer in self.buffers:
            buffer.first = max(buffer.first, buffer.visible_from(self._length))

    def truncate(self, tokens: int) -> None:
        """Forgets positions from ``tokens`` on: drops an answer.

        Raises:
            IndexError: longer than ``length``, or a sliding layer lacks the window before it.
        """
        if tokens > self._length:
            raise IndexError(f"cannot truncate {self._length} tokens to {tokens}")
        self.set_length(tokens)

    def copy(self, tokens: int, headroom: int) -> PrefixCache:
        """An independent cache of the first ``tokens`` tokens.

        Sliding layers keep what they hold here, so a whole cache stays whole; a cache of windows
        keeps the window before ``tokens``.

        Args:
            tokens: at most ``length``.
            headroom: tokens of room behind them.

        Raises:
            IndexError: more than ``length``, or a sliding layer lacks the window before ``tokens``.
        """
        if not 0 <= tokens <= self._length:
            raise IndexError(f"cannot copy {tokens} of {self._length} tokens")
        capacity = tokens + headroom
        copied = PrefixCache(
            self.dtype, tuple(_copy_buffer(b, tokens, capacity) for b in self.buffers), capacity
        )
        copied.set_length(tokens)
        return copied

    def activate(self) -> None:
        """Before a forward, by who has the device: puts this cache's rows in place, if need be."""

    def for_model(self) -> Any:
        """A ``transformers.Cache`` over these buffers.

        A forward with it writes its keys and values at ``length`` and then raises ``length`` by the
        number of its tokens; a forward that fails half-way leaves ``length`` as it was.
        """
        return model_cache(self)


def _copy_buffer(source: LayerBuffer, tokens: int, capacity: int) -> LayerBuffer:
    first = source.first if source.first == 0 else max(source.first, source.visible_from(tokens))
    keys = _copy_rows(source.rows("K", first, tokens), capacity - first)
    values = _copy_rows(source.rows("V", first, tokens), capacity - first)
    return LayerBuffer(source.geometry, first, first, keys, values)


def _copy_rows(rows: Tensor, capacity: int) -> Tensor:
    heads, tokens, dim = rows.shape
    copy = rows.new_empty((heads, capacity, dim))
    copy[:, :tokens].copy_(rows)
    copy[:, tokens:].zero_()
    return copy


__all__ = ["TORCH_DTYPES", "LayerBuffer", "PrefixCache", "Room", "cache_bytes"]
