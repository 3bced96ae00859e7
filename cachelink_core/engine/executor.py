"""One device, many threads: whose turn it is.

A turn is one forward, or one block's worth of translation. Urgent turns (an answer's next token)
go before ordinary ones (the next block of a prefill or an install); within a class the order is
first come, first served. A turn is handed over directly, so that no thread can slip in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from cachelink_core.errors import ResourceExhausted

URGENT_STREAK: Final = 64
"""Urgent turns in a row after which a waiting ordinary one goes first: busy answers slow a transfer
down, but never beyond its lease."""


class Turn:
    """A turn at the device: a context manager, for one use.

    Attributes:
        waited_s: how long entering took.
    """

    __slots__ = ("_executor", "_timeout_s", "_urgent", "waited_s")

    def __init__(self, executor: DeviceExecutor, *, urgent: bool, timeout_s: float | None) -> None:
        """Asks for nothing yet; entering does."""
        self._executor = executor
        self._urgent = urgent
        self._timeout_s = timeout_s
        self.waited_s = 0.0

    def __enter__(self) -> Self:
        self.waited_s = self._executor.acquire(urgent=self._urgent, timeout_s=self._timeout_s)
        return self

    def __exit__(self, *exc: object) -> None:
        self._executor.release()


class _Ticket:
    """A waiting thread."""

    __slots__ = ("granted", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.granted = threading.Event()


class DeviceExecutor:
    """Orders the turns of all threads at one device."""

    def __init__(
        self,
        *,
        on_turn: Callable[[bool, float], None] | None = None,
        urgent_streak: int = URGENT_STREAK,
    ) -> None:
        """Creates a free device.

        Args:
            on_turn: called with (urgent, waited_s) at the begin of each turn, for a metric.
            urgent_streak: urgent turns in a row after which a waiting ordinary one goes first.
        """
        self._on_turn = on_turn
        self._urgent_streak = urgent_streak
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._queues: dict[bool, deque[_Ticket]] = {True: deque(), False: deque()}
        self._streak = 0

    def turn(self, *, urgent: bool, timeout_s: float | None = None) -> Turn:
        """A turn to be entered.

        Args:
            urgent: an answer, not a prefill or an install.
            timeout_s: the longest wait; None for as long as it takes.
        """
        return Turn(self, urgent=urgent, timeout_s=timeout_s)

    def waiting(self, *, urgent: bool) -> int:
        """Threads that wait in one class."""
        with self._lock:
            return len(self._queues[urgent])

    def acquire(self, *, urgent: bool, timeout_s: float | None = None) -> float:
        """Waits for the device; ``release`` must follow in the same thread.

        Returns:
            Seconds waited.

        Raises:
            ResourceExhausted: not free within ``timeout_s``.
        """
        began = time.monotonic()
        ticket = self._take_or_queue(urgent)
        if ticket is not None:
            self._wait(ticket, urgent, timeout_s)
        waited_s = time.monotonic() - began
        if self._on_turn is not None:
            self._on_turn(urgent, waited_s)
        return waited_s

    def release(self) -> None:
        """Ends the turn and begins the next one, if a thread waits."""
        with self._lock:
            assert self._owner == threading.get_ident(), "released by a thread without a turn"
            self._pass_on()

    def _take_or_queue(self, urgent: bool) -> _Ticket | None:
        with self._lock:
            assert self._owner != threading.get_ident(), "a turn inside a turn would never begin"
            if self._owner is None:
                self._owner = threading.get_ident()
                return None
            ticket = _Ticket()
            self._queues[urgent].append(ticket)
            return ticket

    def _wait(self, ticket: _Ticket, urgent: bool, timeout_s: float | None) -> None:
        try:
            if ticket.granted.wait(timeout_s):
                return
        except BaseException:
            self._give_up(ticket, urgent)
            raise
        self._give_up(ticket, urgent)
        raise ResourceExhausted(f"the device was not free within {timeout_s} s")

    def _give_up(self, ticket: _Ticket, urgent: bool) -> None:
        """Leaves the queue, or passes on a turn that was granted at the same moment."""
        with self._lock:
            if ticket.granted.is_set():
                self._pass_on()
            else:
                self._queues[urgent].remove(ticket)

    def _pass_on(self) -> None:
        urgent, ordinary = self._queues[True], self._queues[False]
        first = urgent
        if not urgent or (ordinary and self._streak >= self._urgent_streak):
            first = ordinary
        self._streak = self._streak + 1 if first is urgent and ordinary else 0
        if not first:
            self._owner = None
            return
        ticket = first.popleft()
        self._owner = ticket.thread
        ticket.granted.set()
