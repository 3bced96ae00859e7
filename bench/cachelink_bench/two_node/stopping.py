"""Runs work in a thread of its own, so that a signal's exception never comes into the middle of it.

Ctrl-C and SIGTERM raise between any two lines of the main thread. Within gRPC's client that leaves a
lock taken or a count of calls wrong: about one in fifty such signals left a channel that could not be
closed any more. So the main thread only waits, signals are held back, and the work is asked to end.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from cachelink_core.errors import HandoffAborted

T = TypeVar("T")

_POLL_S: Final = 0.02
END_S: Final = 15.0
"""For work that was asked to end: an answer stops within a token, a handoff within a block."""


class Stop:
    """Asks work in another thread to end.

    It has no lock, which a signal could leave taken: what is asked, and what to cancel, are one
    assignment each.
    """

    def __init__(self) -> None:
        self._asked = False
        self._cancel: Callable[[], object] | None = None

    def ask(self) -> None:
        """Has the work end soon; from any thread."""
        self._asked = True
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def check(self, _event: object = None) -> None:
        """Ends the work here if that was asked for.

        Raises:
            HandoffAborted: it was.
        """
        if self._asked:
            raise HandoffAborted("stopped")

    @contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Within it, ``cancel`` is called when the work shall end.

        Raises:
            HandoffAborted: it shall.
        """
        self._cancel = cancel
        try:
            self.check()
            yield
        finally:
            self._cancel = None
            self.check()


def run_stoppable(work: Callable[[Stop], T]) -> T:
    """Runs ``work`` in a thread and waits for it; a signal takes effect when it has ended.

    A second signal does not wait.

    Args:
        work: asks its argument now and then whether to go on.

    Raises:
        Exception: what the work raised.
        BaseException: what a signal's handler raises.
    """
    stop, running = Stop(), _Running(work)
    thread = threading.Thread(target=running.run, args=(stop,), name="measure", daemon=True)
    with _held_back() as came:
        thread.start()
        until_s = math.inf
        while thread.is_alive() and len(came) < 2 and time.monotonic() < until_s:
            if came and until_s == math.inf:
                until_s = time.monotonic() + END_S
                stop.ask()
            time.sleep(_POLL_S)
    return running.result()


@contextmanager
def _held_back() -> Iterator[list[int]]:
    """Collects signals within it; the first one is raised at its end, for the handler from before."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signals are not its business
        yield came
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, lambda got, _frame: came.append(got))
    try:
        yield came
    finally:
        for number in heard:
            signal.signal(number, handlers[number])
        if came:
            signal.raise_signal(came[0])


class _Running(Generic[T]):
    def __init__(self, work: Callable[[Stop], T]) -> None:
        self._work = work
        self._values: list[T] = []
        self._error: Exception | None = None

    def run(self, stop: Stop) -> None:
        try:
            self._values.append(self._work(stop))
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        (value,) = self._values
        return value
