"""Who may write behind one cache now: one answer alone, or several that share the room.

A ``TurnQueue`` keeps the order of asking. Who writes alone keeps its turn to the end and begins when
nobody shares. Who shares keeps it until it has joined: at once, if the budget has room for the rows of
every sharer, else when the last of them has left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from cachelink_core.engine.turns import TurnQueue
from cachelink_core.errors import BudgetExceeded, HandoffAborted, SlotsTaken

_POLL_S: Final = 0.05
"""How often a waiter that can be cancelled looks whether it was."""


class Held(Protocol):
    """Bytes of a budget."""

    def release(self) -> None:
        """Gives them back."""


@dataclass(slots=True, eq=False)
class Share:
    """One answer among those that share a cache.

    Attributes:
        reserved: bytes for its own rows; None until a second answer comes, since an answer that is
            alone has its rows behind the prefix only.
    """

    reserved: Held | None = None


class Sharers:
    """The answers that share one cache. Safe for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shares: set[Share] = set()

    def join(self, reserve: Callable[[], Held]) -> Share | None:
        """Joins those that are there, with bytes in the budget for the rows of every one of them.

        Args:
            reserve: takes the bytes of one answer's rows; raises BudgetExceeded.

        Returns:
            The share, to be given to ``leave``; None if the budget has no room for another.
        """
        with self._changed:
            share = Share()
            if self._shares and not _reserve((*self._shares, share), reserve):
                return None
            self._shares.add(share)
        return share

    def leave(self, share: Share) -> None:
        """Ends a share and gives its bytes back."""
        with self._changed:
            self._shares.remove(share)
            if share.reserved is not None:
                share.reserved.release()
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float | None, cancelled: Callable[[], bool] | None) -> bool:
        """Waits until nobody shares the cache, and says whether that is so.

        Args:
            timeout_s: at most this long; 0 only looks, None waits for ever.
            cancelled: asked while waiting; true gives up.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._shares:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or (cancelled is not None and cancelled()):
                    return False
                self._changed.wait(_POLL_S if left is None else min(left, _POLL_S))
        return True


@contextmanager
def alone(
    name: str,
    turns: TurnQueue,
    sharers: Sharers,
    timeout_s: float | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """The turn of one answer that nobody shares with.

    Args:
        name: of the cache, for messages.
        turns: of the cache.
        sharers: of the cache.
        timeout_s: how long to wait; 0 only tries.
        cancelled: asked while waiting.

    Raises:
        SlotsTaken: others had it all that time.
        HandoffAborted: ``cancelled`` said so.
    """
    began = time.monotonic()
    with _turn(name, turns, timeout_s, cancelled):
        left = None if timeout_s is None else max(0.0, timeout_s + began - time.monotonic())
        if not sharers.wait_idle(left, cancelled):
            raise _gave_up(name, timeout_s, cancelled)
        yield


@contextmanager
def together(
    name: str,
    turns: TurnQueue,
    sharers: Sharers,
    reserve: Callable[[], Held],
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """A share of the room behind a cache, as soon as order and budget allow.

    Args:
        name: of the cache, for messages.
        turns: of the cache.
        sharers: of the cache.
        reserve: takes the bytes of one answer's rows; raises BudgetExceeded.
        cancelled: asked while waiting.

    Raises:
        HandoffAborted: ``cancelled`` said so.
    """
    with ExitStack() as turn:
        turn.enter_context(_turn(name, turns, None, cancelled))
        share = sharers.join(reserve)
        while share is None:
            # Nobody joins meanwhile: that takes the turn.
            if not sharers.wait_idle(None, cancelled):
                raise _gave_up(name, None, cancelled)
            share = sharers.join(reserve)
    try:
        yield
    finally:
        sharers.leave(share)


@contextmanager
def _turn(
    name: str,
    turns: TurnQueue,
    timeout_s: float | None,
    cancelled: Callable[[], bool] | None,
) -> Iterator[None]:
    if not turns.acquire(timeout_s, cancelled):
        raise _gave_up(name, timeout_s, cancelled)
    try:
        yield
    finally:
        turns.release()


def _gave_up(
    name: str, timeout_s: float | None, cancelled: Callable[[], bool] | None
) -> HandoffAborted | SlotsTaken:
    if timeout_s is None or (cancelled is not None and cancelled()):
        return HandoffAborted(f"cache {name}: the caller left while it waited")
    return SlotsTaken(f"cache {name} is answering another question; waited {timeout_s:g} s")


def _reserve(shares: tuple[Share, ...], reserve: Callable[[], Held]) -> bool:
    """Reserves for each that has nothing yet, or for none."""
    fresh = [share for share in shares if share.reserved is None]
    with ExitStack() as undo:
        for share in fresh:
            try:
                share.reserved = held = reserve()
            except BudgetExceeded:
                break
            undo.callback(held.release)
        else:
            undo.pop_all()
            return True
    for share in fresh:
        share.reserved = None
    return False
