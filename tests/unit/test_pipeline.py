"""The one-slot pipeline alone: order, the bound, errors at their item, and no thread left."""

from __future__ import annotations

import threading
import time

import pytest

from cachelink_core.errors import HandoffAborted
from cachelink_core.rpc.pipeline import OneSlotPipeline, Stop

WAIT_S = 20.0


class Stages:
    """Prepares numbers; notes what is alive, and in which thread everything ran."""

    def __init__(self, broken_prepare=(), broken_answer=()):
        self.alive: set[int] = set()
        self.most_alive = 0
        self.released: list[int] = []
        self.answered: list[int] = []
        self.prepared: list[int] = []
        self.threads: set[str] = set()
        self._broken = set(broken_prepare), set(broken_answer)
        self._lock = threading.Lock()

    def prepare(self, item: int, stop: Stop) -> int:
        with self._lock:
            # Counted from the beginning, as a receiver's reservation is.
            self.alive.add(item)
            self.most_alive = max(self.most_alive, len(self.alive))
            self.threads.add(threading.current_thread().name)
        if item in self._broken[0]:
            with self._lock:
                self.alive.remove(item)
            raise ValueError(f"item {item} cannot be prepared")
        self.prepared.append(item)
        return item

    def answer(self, prepared: int, stop: Stop) -> int:
        assert threading.current_thread() is threading.main_thread()
        if prepared in self._broken[1]:
            raise ValueError(f"item {prepared} cannot be answered")
        self.answered.append(prepared)
        return prepared * prepared

    def release(self, prepared: int) -> None:
        with self._lock:
            self.alive.remove(prepared)
        self.released.append(prepared)

    def over(self, items) -> OneSlotPipeline[int, int, int]:
        return OneSlotPipeline(items, self.prepare, self.answer, self.release)


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_results_come_in_order_and_everything_is_released():
    stages = Stages()
    with stages.over(range(20)) as outcomes:
        assert [(o.index, o.item, o.value()) for o in outcomes] == [
            (i, i, i * i) for i in range(20)
        ]
    assert stages.released == list(range(20))
    assert stages.most_alive <= 2
    assert all(name.startswith("prepare") for name in stages.threads)


@pytest.mark.parametrize("items", [(), (7,)])
def test_few_items(items):
    with Stages().over(items) as outcomes:
        assert [o.value() for o in outcomes] == [i * i for i in items]
        assert list(outcomes) == []


def test_the_next_item_is_prepared_while_one_is_answered_and_never_the_one_behind_it():
    stages = Stages()
    begun = [threading.Event() for _ in range(4)]

    def prepare(item: int, stop: Stop) -> int:
        begun[item].set()
        return stages.prepare(item, stop)

    def answer(prepared: int, stop: Stop) -> int:
        if prepared < 3:
            assert begun[prepared + 1].wait(WAIT_S), "prepared only after the answer"
        if prepared < 2:
            time.sleep(0.05)
            assert not begun[prepared + 2].is_set(), "prepared too far ahead"
        return prepared

    with OneSlotPipeline(range(4), prepare, answer, stages.release) as outcomes:
        assert [o.value() for o in outcomes] == [0, 1, 2, 3]
    assert stages.most_alive == 2


def test_the_time_is_that_of_the_slower_stage():
    def wait(item, _stop):
        time.sleep(0.05)
        return item

    began = time.monotonic()
    with OneSlotPipeline(range(8), wait, wait, lambda _: None) as outcomes:
        done = list(outcomes)
    took_s = time.monotonic() - began
    serial_s = sum(o.prepare_s + o.answer_s for o in done)
    assert serial_s >= 16 * 0.05
    assert took_s < 0.8 * serial_s
    assert all(o.waited_s <= o.prepare_s + 0.05 for o in done)


def test_an_error_surfaces_at_its_own_item_and_the_later_ones_go_on():
    stages = Stages(broken_prepare=(0, 2, 5), broken_answer=(3,))
    with stages.over(range(6)) as outcomes:
        done = list(outcomes)
    assert [o.index for o in done] == list(range(6))
    assert [o.index for o in done if o.error is None] == [1, 4]
    for index, what in ((0, "prepared"), (2, "prepared"), (3, "answered"), (5, "prepared")):
        with pytest.raises(ValueError, match=f"item {index} cannot be {what}"):
            done[index].value()
    assert stages.released == [1, 3, 4]
    assert not stages.alive


def test_an_error_of_the_items_comes_when_its_turn_comes():
    def items():
        yield from (1, 2)
        raise LookupError("no third item")

    stages = Stages()
    with stages.over(items()) as outcomes, pytest.raises(LookupError, match="no third"):
        list(outcomes)
    assert stages.answered == stages.released == [1, 2]


def test_closing_in_the_middle_releases_what_was_prepared():
    stages = Stages()
    with stages.over(range(100)) as outcomes:
        assert next(outcomes).value() == 0
        assert next(outcomes).value() == 1
    assert stages.released == stages.prepared
    assert len(stages.prepared) <= 3
    assert list(outcomes) == []


def test_an_interrupted_answer_releases_both():
    stages = Stages()

    def interrupted(prepared: int, stop: Stop) -> int:
        if prepared == 1:
            raise KeyboardInterrupt
        return stages.answer(prepared, stop)

    with (
        pytest.raises(KeyboardInterrupt),
        OneSlotPipeline(range(9), stages.prepare, interrupted, stages.release) as outcomes,
    ):
        list(outcomes)
    assert not stages.alive
    assert stages.released == stages.prepared


def test_cancelling_from_another_thread_stops_both_stages():
    stages = Stages()
    busy = threading.Event()

    def prepare(item: int, stop: Stop) -> int:
        if item == 0:
            return stages.prepare(item, stop)
        return until(stop)

    def until(stop: Stop) -> int:
        busy.set()
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            stop.check()
            time.sleep(0.01)
        raise AssertionError("nobody stopped it")

    outcomes = OneSlotPipeline(
        range(9), prepare, lambda _prepared, stop: until(stop), stages.release
    )
    canceller = threading.Thread(target=lambda: busy.wait(WAIT_S) and outcomes.cancel())
    canceller.start()
    with outcomes:
        assert list(outcomes) == []
    canceller.join()
    assert stages.released == [0]


def test_a_closed_pipeline_begins_nothing():
    stages = Stages()
    outcomes = stages.over(range(3))
    outcomes.close()
    outcomes.close()
    assert list(outcomes) == []
    assert stages.prepared == []


def test_a_stopped_stage_hears_why():
    stop = Stop()
    stop.check()
    stop.set()
    assert stop.is_set()
    with pytest.raises(HandoffAborted, match="cancelled"):
        stop.check()
