"""Several processes share one pass: each reads its chunks, and the sums are added up.

Started by ``torchrun``; gloo on CPUs. Which tokens form a chunk does not depend on the number of
processes and the shift is one for all, so the results agree within float64's rounding of sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from cachelink_core.fit.measurement import Measurement
from cachelink_core.fit.moments import SPLITS, Shift
from cachelink_core.transport.card import KINDS


@dataclass(frozen=True, slots=True)
class Shards:
    """This process among those that share a pass.

    Attributes:
        rank: of this process; 0 saves and solves.
        count: of processes.
    """

    rank: int = 0
    count: int = 1

    def share_shifts(self, measured: Measurement) -> None:
        """Gives every process the shifts of process 0."""
        moments = measured.moments
        if self.count == 1:
            return
        for kind in KINDS:
            shift = moments.shifts.get(kind) or Shift(
                torch.zeros(moments.sender.total, device=moments.device),
                torch.zeros(moments.receiver.total, device=moments.device),
            )
            for tensor in (shift.x, shift.y):
                dist.broadcast(tensor, src=0)
            moments.shifts[kind] = shift

    def merge(self, measured: Measurement) -> None:
        """Adds all sums up in process 0."""
        if self.count == 1:
            return
        moments = measured.moments
        counts = torch.tensor([moments.counts[split] for split in SPLITS], dtype=torch.int64)
        self._reduce(counts)
        for sums in moments.sums.values():
            for _, tensor in sums.named():
                self._reduce(tensor)
        if self.rank == 0:
            moments.counts.update(zip(SPLITS, counts.tolist(), strict=True))

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.count > 1:
            dist.barrier()

    def _reduce(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda" and dist.get_backend() == "gloo":
            held = tensor.cpu()
            dist.reduce(held, dst=0)
            tensor.copy_(held)
        else:
            dist.reduce(tensor, dst=0)


@contextmanager
def joined() -> Iterator[Shards]:
    """The processes of this run: those of ``torchrun``, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Shards()
        return
    begun_here = not dist.is_initialized()
    if begun_here:
        dist.init_process_group("gloo")
    try:
        yield Shards(dist.get_rank(), dist.get_world_size())
    finally:
        if begun_here:
            dist.destroy_process_group()
