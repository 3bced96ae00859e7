"""Staging as late as can be: every copy and all work happen only when somebody waits for them.

A device runs what it was given some time between now and the moment at which somebody waits. This
is the other end of that range from ``HostStaging``: nothing runs before. Code that reads what it has
not waited for, uses a buffer of the ring too early, or publishes a cache whose last block is not
there gets the wrong bytes here every time, and on a device only now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.staging import Download, Mark, Ring, Upload, fill

NOT_YET: Final = 0xA5
"""Every byte of memory whose copy has not happened."""


class DelayedStaging:
    """Two streams on the CPU as two queues; waiting for a point runs its queue up to there.

    Attributes:
        slots: of each ring.
        pending: operations that were queued and not run.
    """

    def __init__(self, slots: int = 2, *, blocks_ahead: int = 1) -> None:
        """Creates empty queues.

        Args:
            slots: of each ring: the fewer, the earlier one is used again.
            blocks_ahead: as ``Staging``.
        """
        self.chunks_ahead = slots
        self.blocks_ahead = blocks_ahead
        self._copies = _Queue()
        self._work = _Queue()
        self._up = Ring(slots, _not_yet)
        self._down = Ring(slots, _not_yet)

    @property
    def pending(self) -> int:
        """Operations that nobody has waited for."""
        return self._copies.left + self._work.left

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Closures keep what they use."""

    def upload(self, raw: Bytes) -> Upload:
        """Into the ring now, from there when its event is waited for."""
        slot = self._up.take(raw.nbytes)
        slot.buffer.numpy()[: raw.nbytes] = raw
        arriving = _not_yet(raw.nbytes)
        # The ring's memory is read then, not now: as a device does.
        source = slot.buffer[: raw.nbytes]
        copied = self._copies.add(lambda: _copy(arriving, source))
        slot.busy = copied
        return _DelayedUpload(arriving, copied)

    def run(self, work: Callable[[], None]) -> None:
        """Queued."""
        self._work.add(work)

    def download(self, nbytes: int, make: Callable[[], Sequence[Tensor]]) -> Download:
        """Queued: made and copied when it is waited for."""
        slot = self._down.take(nbytes)
        slot.buffer.fill_(NOT_YET)
        target, parts = slot.buffer[:nbytes], list[Tensor]()
        made = self._work.add(lambda: parts.extend(make()))

        def copy() -> None:
            made.wait()
            fill(target, parts)

        copied = self._copies.add(copy)
        slot.busy = copied
        return _DelayedDownload(target, copied)

    def mark(self) -> Mark:
        """Both queues as they are."""
        return _Both(self._copies.end(), self._work.end())


@dataclass(slots=True)
class _Queue:
    """Operations in order; ``done`` of them have run."""

    operations: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.operations) - self.done

    def add(self, operation: Callable[[], object]) -> _Point:
        self.operations.append(operation)
        return self.end()

    def end(self) -> _Point:
        return _Point(self, len(self.operations))

    def run_to(self, index: int) -> None:
        while self.done < index:
            operation = self.operations[self.done]
            self.operations[self.done] = _nothing
            self.done += 1
            operation()


@dataclass(frozen=True, slots=True)
class _Point:
    queue: _Queue
    index: int

    def wait(self) -> None:
        self.queue.run_to(self.index)


@dataclass(frozen=True, slots=True)
class _Both:
    first: _Point
    second: _Point

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


@dataclass(frozen=True, slots=True)
class _DelayedUpload:
    arriving: Tensor
    copied: _Point

    def tensor(self) -> Tensor:
        self.copied.wait()
        return self.arriving


@dataclass(frozen=True, slots=True)
class _DelayedDownload:
    buffer: Tensor
    copied: _Point

    def wait(self) -> Bytes:
        self.copied.wait()
        raw: Bytes = self.buffer.numpy()
        return raw


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _nothing() -> None:
    """In the place of an operation that has run, so that nothing it used is kept alive."""


def _not_yet(nbytes: int) -> Tensor:
    return torch.full((nbytes,), NOT_YET, dtype=torch.uint8)


__all__ = ["NOT_YET", "DelayedStaging"]
