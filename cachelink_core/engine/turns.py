"""A lock whose waiters come in the order in which they asked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_POLL_S: Final = 0.05
"""How often a waiter that can be cancelled looks whether it was."""


class TurnQueue:
    """First come, first served; ``threading.Lock`` promises no order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets: deque[object] = deque()

    @property
    def waiting(self) -> int:
        """Callers in the queue, the one whose turn it is included."""
        return len(self._tickets)

    def acquire(
        self, timeout_s: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> bool:
        """Waits for the turn.

        Args:
            timeout_s: at most this long; 0 only tries, None waits for ever.
            cancelled: asked while waiting; true gives up.

        Returns:
            Whether it is the caller's turn. If so, ``release`` must follow.
        """
        ticket = object()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._tickets.append(ticket)
            while self._tickets[0] is not ticket:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or (cancelled is not None and cancelled()):
                    self._tickets.remove(ticket)
                    return False
                waits = [
                    wait for wait in (left, _POLL_S if cancelled else None) if wait is not None
                ]
                self._changed.wait(min(waits) if waits else None)
        return True

    def release(self) -> None:
        """Ends the turn; the next in the queue has it now."""
        with self._changed:
            self._tickets.popleft()
            self._changed.notify_all()
