"""One-slot pipeline: while one item is answered, the next one is prepared, and never one beyond it.

It is how the paper runs its evaluation (CacheLink, appendix A, *Execution*): the sender prepares the
next cache while the receiver works on the current item. With a stage each, n items take about
``n · max(prepare, answer)`` instead of ``n · (prepare + answer)``.

    caller's thread  answer 0 · release 0 · answer 1 · release 1 · answer 2 …
    prepare thread   prepare 1              prepare 2             prepare 3 …

The preparation of item i + 1 begins when the answer of item i does, which is after item i − 1 was
released: so at most two prepared things are alive, the one being answered and the next one.

Nothing here knows what is prepared; ``client_pipeline.py`` has the two nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from cachelink_core.errors import HandoffAborted

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class Stop:
    """Tells both stages that nobody wants their result any more; any thread may set it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Asks both stages to give up."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether they were asked."""
        return self._event.is_set()

    def check(self) -> None:
        """For a stage to call often.

        Raises:
            HandoffAborted: it was asked to give up.
        """
        if self._event.is_set():
            raise HandoffAborted("the pipeline was cancelled")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Item, Result]):
    """What became of one item.

    Attributes:
        index: of the item, from 0.
        item: as given.
        result: of its answer; None if ``error`` is there.
        error: what its preparation or its answer raised.
        prepare_s: seconds that its preparation took.
        waited_s: of these, what the answers' thread spent waiting.
        answer_s: seconds that its answer took; 0 if it was not prepared.
    """

    index: int
    item: Item
    result: Result | None
    error: Exception | None
    prepare_s: float
    waited_s: float = 0.0
    answer_s: float = 0.0

    def value(self) -> Result:
        """The result.

        Raises:
            Exception: the item's error.
        """
        if self.error is not None:
            raise self.error
        assert self.result is not None, "an item without an error has a result"
        return self.result


@dataclass(frozen=True, slots=True)
class _Preparation(Generic[Prepared]):
    """How one preparation ended."""

    prepared: Prepared | None
    error: Exception | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Slot(Generic[Item, Prepared]):
    """The one item that is ahead."""

    index: int
    item: Item
    future: Future[_Preparation[Prepared]]


class OneSlotPipeline(Generic[Item, Prepared, Result]):
    """Iterates over the outcomes of items, in their order. A context manager, for one use.

    An error of a stage becomes the outcome of its own item, and the later items go on. Iterating,
    ``close`` and the ``with`` belong to one thread; ``cancel`` may come from any.
    """

    def __init__(
        self,
        items: Iterable[Item],
        prepare: Callable[[Item, Stop], Prepared],
        answer: Callable[[Prepared, Stop], Result],
        release: Callable[[Prepared], None],
    ) -> None:
        """Binds the stages; iterating begins them.

        Args:
            items: advanced in the iterating thread, one ahead of the answers.
            prepare: runs in a thread of its own, one item at a time.
            answer: runs in the iterating thread.
            release: called once for everything that ``prepare`` returned: after its answer, or when
                the pipeline is closed before. It should not raise.
        """
        self._items = iter(items)
        self._prepare = prepare
        self._answer = answer
        self._release = release
        self._stop = Stop()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._slot: _Slot[Item, Prepared] | None = None
        self._began = False
        self._items_error: Exception | None = None
        self._next_index = 0

    def __iter__(self) -> Iterator[Outcome[Item, Result]]:
        return self

    def __next__(self) -> Outcome[Item, Result]:
        """The next item's outcome; the one behind it is being prepared meanwhile.

        Raises:
            Exception: what ``items`` raised, at the place of the item that it did not give.
        """
        if not (self._began or self._stop.is_set()):
            self._fill()
        slot = self._slot
        if slot is None or self._stop.is_set():
            self.close()
            raise self._items_error or StopIteration
        began = time.monotonic()
        preparation = slot.future.result()
        waited_s = time.monotonic() - began
        self._slot = None
        outcome = self._finish(slot, preparation, waited_s)
        if self._stop.is_set() and outcome.error is not None:
            # Cancelled in the middle: the item has no outcome of its own.
            self.close()
            raise StopIteration
        return outcome

    def cancel(self) -> None:
        """Makes both stages give up and the iteration end; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """Gives up what is under way, releases what is prepared and ends the thread; idempotent."""
        self._stop.set()
        slot, self._slot = self._slot, None
        try:
            if slot is not None and not slot.future.cancel():
                prepared = slot.future.result().prepared
                if prepared is not None:
                    self._release(prepared)
        finally:
            self._worker.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self) -> None:
        """Begins the preparation of the next item, if there is one."""
        self._began = True
        try:
            item = next(self._items)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            self._items_error = error
            return
        future = self._worker.submit(self._prepared, item)
        self._slot = _Slot(self._next_index, item, future)
        self._next_index += 1

    def _prepared(self, item: Item) -> _Preparation[Prepared]:
        began = time.monotonic()
        try:
            self._stop.check()
            prepared = self._prepare(item, self._stop)
        except Exception as error:  # noqa: BLE001 - it belongs to its item, not to this thread
            return _Preparation(None, error, time.monotonic() - began)
        return _Preparation(prepared, None, time.monotonic() - began)

    def _finish(
        self, slot: _Slot[Item, Prepared], preparation: _Preparation[Prepared], waited_s: float
    ) -> Outcome[Item, Result]:
        """Answers one prepared item, and begins the preparation of the next."""
        result, error, answer_s = None, preparation.error, 0.0
        try:
            self._fill()
            if preparation.prepared is not None:
                began = time.monotonic()
                try:
                    result = self._answer(preparation.prepared, self._stop)
                except Exception as failed:  # noqa: BLE001 - the later items go on
                    error = failed
                answer_s = time.monotonic() - began
        finally:
            if preparation.prepared is not None:
                self._release(preparation.prepared)
        return Outcome(
            slot.index, slot.item, result, error, preparation.seconds, waited_s, answer_s
        )


__all__ = ["OneSlotPipeline", "Outcome", "Stop"]
