"""Staging on CUDA: page-locked ring, a stream for copies, a stream for work, events between them.

Memory: what is allocated on one stream and used on another is recorded there (``record_stream``), so
that the caching allocator gives it to nobody else before that use is done.

Axes: B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.staging import (
    BLOCKS_AHEAD,
    RING_SLOTS,
    Download,
    Mark,
    Ring,
    Upload,
    fill,
)


class CudaStaging:
    """One handoff's part of its device's two streams, which all handoffs there share.

    Streams of its own would give each a share of the allocator's memory of its own: with blocks for
    the mapper, gigabytes that no other handoff can use.
    """

    chunks_ahead = RING_SLOTS
    blocks_ahead = BLOCKS_AHEAD

    def __init__(self, device: torch.device) -> None:
        """Puts both streams behind everything that the current one has been given so far.

        So tensors that were allocated and written before may be used in ``run`` at once.

        Args:
            device: a CUDA device.
        """
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._copies, self._work = streams(index)
        given = torch.cuda.current_stream(device).record_event()
        self._copies.wait_event(given)
        self._work.wait_event(given)
        self._up = Ring(RING_SLOTS, _page_locked)
        self._down = Ring(RING_SLOTS, _page_locked)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Records both streams' use."""
        for tensor in tensors:
            tensor.record_stream(self._copies)
            tensor.record_stream(self._work)

    def upload(self, raw: Bytes) -> Upload:
        """Into the ring now, from there on the copies' stream."""
        slot = self._up.take(raw.nbytes)
        slot.buffer.numpy()[: raw.nbytes] = raw
        with torch.cuda.stream(self._copies):
            # Allocated here: memory of the work's stream might still be read by earlier work.
            arriving = torch.empty(raw.nbytes, dtype=torch.uint8, device=self._device)
            arriving.copy_(slot.buffer[: raw.nbytes], non_blocking=True)
        copied = _record(self._copies)
        slot.busy = _CudaMark((copied,))
        return _CudaUpload(arriving, copied, self._work)

    def run(self, work: Callable[[], None]) -> None:
        """On the work's stream, which the calling thread then leaves."""
        with torch.cuda.stream(self._work):
            work()

    def download(self, nbytes: int, make: Callable[[], Sequence[Tensor]]) -> Download:
        """Parts are made on the work's stream and copied on the copies'."""
        slot = self._down.take(nbytes)
        with torch.cuda.stream(self._work):
            parts = make()
        self._copies.wait_event(self._work.record_event())
        with torch.cuda.stream(self._copies):
            fill(slot.buffer[:nbytes], parts, non_blocking=True)
        for part in parts:
            part.record_stream(self._copies)
        copied = _CudaMark((_record(self._copies),))
        slot.busy = copied
        return _CudaDownload(slot.buffer[:nbytes], copied)

    def mark(self) -> Mark:
        """An event in each stream."""
        return _CudaMark((_record(self._copies), _record(self._work)))


@cache
def streams(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams for copies and for work of one CUDA device."""
    copies, work = (
        torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return copies, work


@dataclass(frozen=True, slots=True)
class _CudaMark:
    events: tuple[torch.cuda.Event, ...]

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


@dataclass(frozen=True, slots=True)
class _CudaUpload:
    arriving: Tensor
    copied: torch.cuda.Event
    work: torch.cuda.Stream

    def tensor(self) -> Tensor:
        self.work.wait_event(self.copied)
        self.arriving.record_stream(self.work)
        return self.arriving


@dataclass(frozen=True, slots=True)
class _CudaDownload:
    buffer: Tensor
    copied: _CudaMark

    def wait(self) -> Bytes:
        self.copied.wait()
        raw: Bytes = self.buffer.numpy()
        return raw


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: the waiting thread sleeps, since the processor has other threads to run.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _page_locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


__all__ = ["CudaStaging", "streams"]
