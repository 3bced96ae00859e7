"""Several answers behind one prefix, each with rows of its own and none with a copy of the prefix.

A device runs one forward at a time, so answers can take turns in the room behind a prefix as they do
at the device. A branch has its own length. Before its forward its rows are put back, if another's lie
there; what that one has written since is saved first. Every forward therefore reads the tensors that it
would read alone, at the same addresses: the answer is the same, bit for bit. An answer that is alone
copies nothing.

Axes: L layers, H KV heads, R rows of room, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.kv.prefix_cache import PrefixCache

_KINDS: Final[tuple[TensorKind, ...]] = ("K", "V")


class Branch(PrefixCache):
    """A prefix with one answer's rows behind it. Close it when the answer has ended."""

    def __init__(self, base: PrefixCache) -> None:
        """Begins behind the prefix; allocates nothing.

        Args:
            base: holding the prefix. While it has branches, only they may write behind its length.
        """
        # Records of its own over the same tensors: what a branch forgets, the others keep.
        super().__init__(base.dtype, tuple(replace(b) for b in base.buffers), base.capacity)
        self.room = base.room
        self._prefix = base.length
        self._saved = self._prefix
        self._rows: list[Tensor] = []
        super().set_length(self._prefix)

    def activate(self) -> None:
        """Puts this answer's rows behind the prefix. The caller has the device."""
        with self.room.lock:
            occupant = self.room.occupant
            if occupant is self:
                return
            if occupant is not None:
                occupant.save()
            self._restore()
            self.room.occupant = self

    def set_length(self, tokens: int) -> None:
        """See ``PrefixCache``.

        Raises:
            IndexError: within the prefix, which others read, or beyond the capacity.
        """
        if tokens < self._prefix:
            raise IndexError(f"length {tokens} is within the shared prefix of {self._prefix}")
        super().set_length(tokens)
        self._saved = min(self._saved, tokens)

    def copy(self, tokens: int, headroom: int) -> PrefixCache:
        """See ``PrefixCache``: an independent cache, whoever's rows lie behind the prefix now."""
        if tokens <= self._prefix:
            return super().copy(tokens, headroom)
        if tokens > self.length:
            raise IndexError(f"cannot copy {tokens} of {self.length} tokens")
        with self.room.lock:
            if self.room.occupant is self:
                return super().copy(tokens, headroom)
        # Not in the room: its rows are all saved, and only its own turn at the device changes that.
        copied = super().copy(self._prefix, tokens - self._prefix + headroom)
        for rows, (layer, kind) in zip(self._rows, self._tensors(), strict=True):
            target = copied.tensor(layer, kind, self._prefix, tokens)
            target.copy_(rows[:, : tokens - self._prefix])
        copied.set_length(tokens)
        return copied

    def close(self) -> None:
        """Leaves the room; its rows are forgotten."""
        with self.room.lock:
            if self.room.occupant is self:
                self.room.occupant = None
            self._rows.clear()

    def save(self) -> None:
        """Copies what was written since the last time to rows of its own. Holds the room's lock."""
        if not self._rows:
            room = self.capacity - self._prefix
            rows: list[Tensor] = []
            for layer, kind in self._tensors():
                sample = self.tensor(layer, kind, self._prefix, self._prefix)
                # On a CPU no page is touched before it is written: memory follows the tokens.
                rows.append(sample.new_empty((sample.shape[0], room, sample.shape[2])))
            self._rows = rows  # all of them, or none if there was no memory
        self._exchange(self._saved, into_room=False)
        self._saved = self.length

    def _restore(self) -> None:
        assert self._saved == self.length, "rows that were not saved are lost"
        if self._rows:
            self._exchange(self._prefix, into_room=True)

    def _exchange(self, start: int, *, into_room: bool) -> None:
        """Copies rows from position ``start`` to the end between the room and this branch's own."""
        low, high = start - self._prefix, self.length - self._prefix
        if low == high:
            return
        room = [self.tensor(layer, kind, start, self.length) for layer, kind in self._tensors()]
        own = [rows[:, low:high] for rows in self._rows]
        # One call: a launch for each of 2 L tensors would cost more than the bytes.
        torch._foreach_copy_(room if into_room else own, own if into_room else room)

    def _tensors(self) -> Iterator[tuple[int, TensorKind]]:
        return ((layer, kind) for layer in range(len(self.layers)) for kind in _KINDS)


def room_bytes(cache: PrefixCache, tokens: int) -> int:
    """Bytes that one branch's own rows may take behind a prefix of ``tokens``."""
    room = cache.capacity - tokens
    return sum(layer.token_bytes(cache.dtype) for layer in cache.layers) * room


__all__ = ["Branch", "room_bytes"]
