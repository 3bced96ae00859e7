"""Bytes between host and device without stopping either: staging buffers, streams and events.

A handoff has three kinds of work on a device, each on a stream of its own:

    model's stream     forwards: prefill and answers
    copies             host ↔ device, through a bounded ring of page-locked buffers
    work               decoding, rotating, translating, writing into the cache; gathering, encoding

Order between streams is made by events alone; the host waits for an event only where it needs what
is behind it: a ring buffer that is used again, bytes that are sent, a cache that is published. The
device as a whole is never synchronised, so a copy does not wait for a forward nor a forward for it.

A CPU needs none of this: there ``staging_for`` gives None, and chunks are copied where they belong.

Axes: B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from cachelink_core.codecs.native import Bytes

RING_SLOTS: Final = 4
"""Buffers of one ring, each as large as a chunk (1 MiB): one is filled or read by the host while the
others are under way."""

BLOCKS_AHEAD: Final = 1
"""Translated blocks whose check is still open: the host queues the next one meanwhile."""


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Returns once everything before it is done."""


class Upload(Protocol):
    """Bytes on their way to the device."""

    def tensor(self) -> Tensor:
        """The bytes ``[B]`` uint8, for work that is given to ``Staging.run``, and inside it only."""


class Download(Protocol):
    """Bytes on their way to the host."""

    def wait(self) -> Bytes:
        """The bytes, once they are there; valid until ``Staging.chunks_ahead`` further downloads."""


class Staging(Protocol):
    """Copies and work of one side of one handoff. Not for two threads at once.

    Attributes:
        chunks_ahead: downloads that may be under way at once.
        blocks_ahead: blocks that may be translated before one is checked.
    """

    chunks_ahead: int
    blocks_ahead: int

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Names tensors of others that work will read or write.

        Their memory is then not used again before the work that was queued is done, whenever they
        are freed: a handoff can end while its copies are under way.
        """

    def upload(self, raw: Bytes) -> Upload:
        """Begins a copy to the device; ``raw`` may change as soon as this returns."""

    def run(self, work: Callable[[], None]) -> None:
        """Queues work behind all that was queued before.

        Args:
            work: queues operations on the device, by calling torch; it waits for none of them. It
                may run later than this returns, so it reads nothing that may change.
        """

    def download(self, nbytes: int, make: Callable[[], Sequence[Tensor]]) -> Download:
        """Begins a copy to the host.

        Args:
            nbytes: of all parts together.
            make: gives the parts, each ``[B]`` uint8 and contiguous; runs as ``run``'s work does.
        """

    def mark(self) -> Mark:
        """A point behind everything queued so far, copies and work."""


class Ring:
    """Host buffers that are used in turn, each only after the copy before has let go of it."""

    def __init__(self, slots: int, allocate: Callable[[int], Tensor]) -> None:
        """Creates an empty ring.

        Args:
            slots: buffers.
            allocate: makes one of so many bytes, ``[B]`` uint8.
        """
        self._allocate = allocate
        self._slots = [_Slot(torch.empty(0, dtype=torch.uint8)) for _ in range(slots)]
        self._next = 0

    def take(self, nbytes: int) -> _Slot:
        """The next buffer, of ``nbytes`` at least; waits until it is free."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.busy is not None:
            slot.busy.wait()
            slot.busy = None
        if slot.buffer.numel() < nbytes:
            slot.buffer = self._allocate(nbytes)
        return slot


@dataclass(slots=True)
class _Slot:
    """One buffer, and the point at which its copy is done."""

    buffer: Tensor
    busy: Mark | None = None


class HostStaging:
    """Everything at once, in plain memory: for devices without streams, and as the reference."""

    chunks_ahead = 1
    blocks_ahead = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Binds a device."""
        self._device = torch.device(device)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Nothing is ever under way."""

    def upload(self, raw: Bytes) -> Upload:
        """A copy, made now."""
        return _Here(torch.from_numpy(raw.copy()).to(self._device))

    def run(self, work: Callable[[], None]) -> None:
        """Runs now."""
        work()

    def download(self, nbytes: int, make: Callable[[], Sequence[Tensor]]) -> Download:
        """A copy, made now."""
        whole = torch.empty(nbytes, dtype=torch.uint8)
        fill(whole, make())
        return _Here(whole)

    def mark(self) -> Mark:
        """Reached already."""
        return _Reached()


class _Reached:
    """A point behind which nothing is under way."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass(frozen=True, slots=True)
class _Here:
    """Bytes that are where they belong."""

    held: Tensor

    def tensor(self) -> Tensor:
        return self.held

    def wait(self) -> Bytes:
        raw: Bytes = self.held.numpy()
        return raw


def fill(whole: Tensor, parts: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copies parts behind each other into ``whole`` ``[B]``; together they fill it."""
    at = 0
    for part in parts:
        whole[at : at + part.numel()].copy_(part, non_blocking=non_blocking)
        at += part.numel()
    assert at == whole.numel(), f"{at} bytes were made, {whole.numel()} were announced"


def staging_for(device: torch.device) -> Staging | None:
    """How bytes get to and from a device; None for the CPU, where they are already."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        from cachelink_core.engine.cuda_staging import CudaStaging

        return CudaStaging(device)
    return HostStaging(device)


__all__ = [
    "Download",
    "HostStaging",
    "Mark",
    "Ring",
    "Staging",
    "Upload",
    "fill",
    "staging_for",
]
