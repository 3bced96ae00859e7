"""How much CPU time two other processes took since some moment, known only afterwards."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

LOOK_S: Final = 0.005

_CPU_CLOCK: Final = 2
"""The kernel's number of a process's scheduler clock (``CPUCLOCK_SCHED``)."""


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, ended ones too, to the nanosecond.

    ``/proc/PID/stat`` counts in steps of 10 ms, about what a short handoff takes.
    """
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


class CpuWatch:
    """Looks at processes' clocks every few milliseconds while the ``with`` lasts.

    Where a handoff's payload began within a call is told by the call's result. Reserve, which
    touches every page of the destination, would otherwise count as work of the transfer.
    """

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._pids = pids
        self._seen: list[tuple[float, tuple[float, ...]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu-watch", daemon=True)

    def since(self, at_s: float) -> tuple[float, ...]:
        """CPU seconds of each process from a monotonic moment to the end of the ``with``."""
        before = [seen for at, seen in self._seen if at <= at_s] or [self._seen[0][1]]
        last = self._seen[-1][1]
        return tuple(end - begin for end, begin in zip(last, before[-1], strict=True))

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()
        self._look()

    def _look(self) -> None:
        clocks = tuple(process_cpu_s(pid) for pid in self._pids)
        self._seen.append((time.monotonic(), clocks))
