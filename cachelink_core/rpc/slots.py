"""How many transfers or answers may run at once: one too many is refused, it never queues.

A stream holds a thread of the server's pool. If streams could queue there, health and control calls
would queue behind them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachelink_core.errors import Draining, SlotsTaken


class Slots:
    """A counter with a limit, which can be closed for good.

    Attributes:
        name: of what it counts, for messages.
        limit: how many may run at once.
    """

    def __init__(
        self, name: str, limit: int, on_change: Callable[[int], None] = lambda _in_use: None
    ) -> None:
        """Opens ``limit`` slots.

        Args:
            name: of what they count, for messages.
            limit: how many may be taken at once.
            on_change: told the new count, in its order, under the slots' lock.
        """
        self.name = name
        self.limit = limit
        self._in_use = 0
        self._on_change = on_change
        self._closed = False
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        """How many run now."""
        return self._in_use

    @contextmanager
    def take(self) -> Iterator[None]:
        """Holds one slot.

        Raises:
            SlotsTaken: none is free.
            Draining: the daemon is shutting down.
        """
        with self._changed:
            if self._closed:
                raise Draining("this daemon is shutting down")
            if self._in_use >= self.limit:
                raise SlotsTaken(f"{self._in_use} of {self.limit} {self.name} are running")
            self._in_use += 1
            self._on_change(self._in_use)
        try:
            yield
        finally:
            with self._changed:
                self._in_use -= 1
                self._on_change(self._in_use)
                self._changed.notify_all()

    def close(self) -> None:
        """From now on every ``take`` raises Draining; what runs goes on."""
        with self._changed:
            self._closed = True

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until nothing runs; False if the deadline came first."""
        until_s = time.monotonic() + deadline_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._in_use, timeout=max(0.0, until_s - time.monotonic())
            )
