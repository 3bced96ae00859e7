"""Phases of a piece of work on a device, without a pause between them.

On a GPU each phase ends with an event in the stream, so that timing does not make the host wait; the
total is the host's clock from an idle device to an idle device. Both are independent: that phases
sum to the total is a finding, not arithmetic.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """One run.

    Attributes:
        total_s: from begin to end.
        phases_s: by name, in the order in which they first ended.
    """

    total_s: float
    phases_s: dict[str, float]

    @property
    def sum_error(self) -> float:
        """By which fraction the phases' sum differs from the total."""
        return abs(sum(self.phases_s.values()) - self.total_s) / self.total_s


class Stopwatch:
    """Times one run after the other on one device."""

    def __init__(self, device: torch.device) -> None:
        """Waits for nothing yet."""
        self._device = device
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[str, float | torch.cuda.Event]] = []
        self._began = 0.0

    def start(self) -> None:
        """Begins a run on an idle device."""
        self._laps.clear()
        settle(self._device)
        self._began = time.perf_counter()
        self.lap("")

    def lap(self, phase: str) -> None:
        """Ends a phase: what was done since the last lap; the same name adds up."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._laps.append((phase, event))
        else:
            self._laps.append((phase, time.perf_counter()))

    def stop(self) -> Timing:
        """Waits for the device and sums up."""
        settle(self._device)
        total_s = time.perf_counter() - self._began
        phases: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._laps, self._laps[1:], strict=False):
            phases[phase] = phases.get(phase, 0.0) + _seconds(before, after)
        return Timing(total_s, phases)


def settle(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    assert not isinstance(after, float)
    return float(before.elapsed_time(after)) / 1e3
