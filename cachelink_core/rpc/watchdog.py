"""A thread that ends a stream on which nothing moves.

gRPC's own waits have no deadline between messages: an iterator of requests blocks for as long as
the peer says nothing, and a generator is simply not advanced while the peer takes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

_POLL_S: Final = 0.1


class Watchdog:
    """Calls ``end`` once when it has been armed for too long, or when ``cancelled`` says so.

    Attributes:
        stalled: whether it ended the stream because nothing moved.
        cancelled: whether it ended the stream because it was asked to.
    """

    def __init__(
        self, stall_s: float, end: Callable[[], object], cancelled: Callable[[], bool] | None = None
    ) -> None:
        self.stalled = False
        self.cancelled = False
        self._stall_s = stall_s
        self._end = end
        self._asked = cancelled
        self._armed_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cachelink-watchdog", daemon=True)

    def arm(self) -> None:
        """From now on the peer has to move."""
        self._armed_s = time.monotonic()

    def disarm(self) -> None:
        """The peer moved; what takes time now is this side's own work."""
        self._armed_s = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join(timeout=10 * _POLL_S)

    def _watch(self) -> None:
        while not self._stopped.wait(min(_POLL_S, self._stall_s / 4)):
            armed_s = self._armed_s
            self.stalled = armed_s is not None and time.monotonic() - armed_s > self._stall_s
            self.cancelled = not self.stalled and self._asked is not None and self._asked()
            if self.stalled or self.cancelled:
                self._end()
                return
