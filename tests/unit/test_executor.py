"""Turns at one device: order, fairness, measured and bounded waits."""

from __future__ import annotations

import threading
import time

import pytest

from cachelink_core.engine.executor import DeviceExecutor
from cachelink_core.errors import ResourceExhausted

PATIENCE_S = 10.0


def _queue(executor: DeviceExecutor, order: list[str], name: str, *, urgent: bool):
    """Starts a thread that takes one turn, and returns once it waits."""

    def work() -> None:
        with executor.turn(urgent=urgent):
            order.append(name)

    before = executor.waiting(urgent=urgent)
    thread = threading.Thread(target=work)
    thread.start()
    _until(lambda: executor.waiting(urgent=urgent) == before + 1)
    return thread


def _until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _join(threads) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def _order(arrivals: list[tuple[str, bool]], **settings) -> list[str]:
    executor, order = DeviceExecutor(**settings), []
    with executor.turn(urgent=False):
        threads = [_queue(executor, order, name, urgent=urgent) for name, urgent in arrivals]
    _join(threads)
    return order


def test_urgent_goes_first_and_each_class_keeps_its_order():
    arrivals = [("block 1", False), ("token 1", True), ("block 2", False), ("token 2", True)]
    assert _order(arrivals) == ["token 1", "token 2", "block 1", "block 2"]


def test_an_ordinary_turn_comes_after_a_streak_of_urgent_ones():
    arrivals = [("block", False), *((f"token {i}", True) for i in range(5))]
    assert _order(arrivals, urgent_streak=2) == [
        "token 0",
        "token 1",
        "block",
        "token 2",
        "token 3",
        "token 4",
    ]


def test_only_one_turn_at_a_time():
    executor, inside, most = DeviceExecutor(), [0], [0]

    def work(urgent: bool) -> None:
        for _ in range(200):
            with executor.turn(urgent=urgent):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    _join(threads)
    assert most == [1]


def test_the_wait_is_measured_and_reported():
    seen: list[tuple[bool, float]] = []
    executor = DeviceExecutor(on_turn=lambda urgent, waited_s: seen.append((urgent, waited_s)))
    order: list[str] = []
    with executor.turn(urgent=False) as turn:
        thread = _queue(executor, order, "token", urgent=True)
        time.sleep(0.05)
    _join([thread])
    assert turn.waited_s < 0.05
    assert [urgent for urgent, _ in seen] == [False, True]
    assert seen[1][1] >= 0.05


def test_a_bounded_wait_ends_and_leaves_no_trace():
    executor, errors = DeviceExecutor(), []

    def work() -> None:
        try:
            with executor.turn(urgent=True, timeout_s=0.02):
                errors.append(AssertionError("the device was taken"))
        except ResourceExhausted as error:
            errors.append(error)

    with executor.turn(urgent=False):
        thread = threading.Thread(target=work)
        thread.start()
        _join([thread])
        assert executor.waiting(urgent=True) == 0
    assert [type(error) for error in errors] == [ResourceExhausted]
    assert "0.02 s" in str(errors[0])
    with executor.turn(urgent=True, timeout_s=0.0) as turn:
        assert turn.waited_s < PATIENCE_S


def test_an_error_inside_a_turn_frees_the_device():
    executor = DeviceExecutor()
    with pytest.raises(ZeroDivisionError), executor.turn(urgent=True):
        _ = 1 / 0
    with executor.turn(urgent=False, timeout_s=0.0):
        pass


def test_a_turn_inside_a_turn_is_a_bug_that_shows():
    executor = DeviceExecutor()
    with executor.turn(urgent=False), pytest.raises(AssertionError, match="inside a turn"):
        executor.acquire(urgent=True)
