"""The life of a daemon: start, serve, drain, stop.

Both daemons share it and differ in their hooks. The first SIGTERM or SIGINT drains: not ready, no new
work, what is under way may finish within a bound. The second stops at once. Signals arrive through a
``SimpleQueue``, whose ``put`` may interrupt its own ``get``: with an ``Event`` a signal between two
instructions of ``wait`` would deadlock.

Python handles signals in its main thread, but the system may give one to any thread, and then nothing
wakes the main thread: it looks up once a second.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Final

from cachelink_core import logs

EXIT_DRAINED: Final = 0
EXIT_CUT: Final = 1
"""Work under way was cut: the drain took too long, or a second signal came."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LOOK_UP_S: Final = 1.0
"""How long a signal that another thread got may go unnoticed."""

_STOP: Final = "stop"
_IDLE: Final = "idle"
_log = logs.logger(__name__)


class Readiness:
    """What a daemon still needs before it takes work. Thread-safe.

    Args:
        needs: names, such as ``model`` and ``self_check``, that ``done`` ticks off.
    """

    def __init__(self, *needs: str) -> None:
        self._lock = threading.Lock()
        self._missing = dict.fromkeys(needs)
        self._draining = False

    def done(self, need: str) -> None:
        """Ticks one need off.

        Raises:
            KeyError: it was no need, or is done already: a bug of the caller.
        """
        with self._lock:
            del self._missing[need]

    def drain(self) -> None:
        """Never ready again."""
        with self._lock:
            self._draining = True

    def missing(self) -> tuple[str, ...]:
        """What keeps the daemon from being ready; empty when it is."""
        with self._lock:
            return (*self._missing, *(("draining",) if self._draining else ()))

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing()


@dataclass(frozen=True, slots=True)
class Hooks:
    """What one daemon does at each turn of its life. Called once each, in this order.

    Attributes:
        start: loads, listens, checks itself; returns the addresses of the ready line by scheme, such
            as ``{"grpc": "127.0.0.1:7411", "http": "127.0.0.1:7412"}``.
        drain: refuses new work from now on; returns at once.
        wait_idle: waits up to so many seconds until no work is under way; whether that was reached.
        stop: closes everything and cuts what is left; also called when ``start`` raised.
    """

    start: Callable[[], Mapping[str, str]]
    drain: Callable[[], None]
    wait_idle: Callable[[float], bool]
    stop: Callable[[], None]


class Daemon:
    """Runs the hooks of one daemon until it is told to stop.

    Args:
        hooks: what to do.
        drain_s: how long work under way may take after the first signal.
        output: where the ready line goes; standard output when None.
    """

    def __init__(self, hooks: Hooks, drain_s: float, output: IO[str] | None = None) -> None:
        self._hooks = hooks
        self._drain_s = drain_s
        self._output = output
        self._news: SimpleQueue[str] = SimpleQueue()
        self._starting = False

    def run(self) -> int:
        """Lives one life, signals included when called in the main thread.

        Returns:
            The exit status: ``EXIT_DRAINED``, ``EXIT_CUT``, or 128 + signal when one came before ready.
        """
        with self._signals():
            try:
                return self._live()
            except _StoppedEarly as early:
                _log.info("stopped_before_ready", signal=early.signal_name)
                return early.exit_status
            finally:
                self._hooks.stop()
                _log.info("stopped")

    def request_stop(self) -> None:
        """Does what a signal does, from any thread: the first call drains, the second forces."""
        self._news.put(_STOP)

    def _live(self) -> int:
        self._starting = True
        addresses = self._hooks.start()
        self._starting = False
        self._announce(addresses)
        self._next(math.inf)
        drained = self._drain()
        _log.info("drained" if drained else "work_cut")
        return EXIT_DRAINED if drained else EXIT_CUT

    def _announce(self, addresses: Mapping[str, str]) -> None:
        """One JSON line for a parent process that let the system pick the ports."""
        output = self._output if self._output is not None else sys.stdout
        output.write(json.dumps({"event": "ready", **addresses}) + "\n")
        output.flush()
        _log.info("ready", **addresses)

    def _drain(self) -> bool:
        _log.info("draining", deadline_s=self._drain_s)
        self._hooks.drain()
        threading.Thread(target=self._report_idle, name="drain", daemon=True).start()
        return self._next(self._drain_s) == _IDLE

    def _next(self, deadline_s: float) -> str | None:
        """What comes next; None if nothing does within the deadline."""
        until_s = time.monotonic() + deadline_s
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                return self._news.get(timeout=min(left_s, _LOOK_UP_S))
            except Empty:
                continue
        return None

    def _report_idle(self) -> None:
        if self._hooks.wait_idle(self._drain_s):
            self._news.put(_IDLE)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._starting:
            raise _StoppedEarly(number)
        self._news.put(_STOP)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Takes the signals over and gives them back; another thread than the main one cannot.

        A parent that holds them back hands that down to its children, which would never end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        held_back = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
            for number, handler in earlier.items():
                signal.signal(number, handler)


class _StoppedEarly(BaseException):
    """A signal during ``start``, which has nothing to drain. No ``except Exception`` may keep it."""

    def __init__(self, number: int) -> None:
        self.signal_name = signal.Signals(number).name
        self.exit_status = 128 + number
        super().__init__(self.signal_name)
