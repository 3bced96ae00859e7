"""A daemon's life with real signals, and the gate that its work passes."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachelink_core.errors import Draining, SlotsTaken
from cachelink_core.lifecycle import (
    EXIT_CUT,
    EXIT_DRAINED,
    Daemon,
    Gate,
    Hooks,
    Readiness,
    wait_all_idle,
)

ROOT = Path(__file__).parents[2]
ADDRESSES = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}


class Recorder:
    """Hooks over a gate that write down what was called, and act when ready."""

    def __init__(self, gate: Gate, at_start: object = None) -> None:
        self.gate = gate
        self.calls: list[str] = []
        self.draining = threading.Event()
        self._at_start = at_start

    def start(self) -> Mapping[str, str]:
        self.calls.append("start")
        if callable(self._at_start):
            self._at_start()
        return ADDRESSES

    def drain(self) -> None:
        self.calls.append("drain")
        self.gate.close()
        self.draining.set()

    def stop(self) -> None:
        self.calls.append("stop")

    def hooks(self) -> Hooks:
        return Hooks(self.start, self.drain, self.gate.wait_idle, self.stop)


class SignalOnReady(io.StringIO):
    """Standard output of a parent that stops the daemon as soon as it is ready."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def flush(self) -> None:
        signal.raise_signal(self._number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    recorder = Recorder(Gate("answers", 1))
    output = SignalOnReady(number)
    assert Daemon(recorder.hooks(), 5.0, output).run() == EXIT_DRAINED
    assert recorder.calls == ["start", "drain", "stop"]
    assert json.loads(output.getvalue()) == {"event": "ready", **ADDRESSES}
    assert output.getvalue().count("\n") == 1
    assert signal.getsignal(number) is before


def test_work_under_way_is_finished() -> None:
    gate = Gate("answers", 1)
    gate.acquire()
    recorder = Recorder(gate)

    def finish() -> None:
        recorder.draining.wait(5)
        gate.release()

    worker = threading.Thread(target=finish)
    worker.start()
    assert Daemon(recorder.hooks(), 5.0, SignalOnReady(signal.SIGTERM)).run() == EXIT_DRAINED
    worker.join()


def test_a_second_signal_forces() -> None:
    gate = Gate("answers", 1)
    gate.acquire()
    recorder = Recorder(gate)
    daemon = Daemon(recorder.hooks(), 60.0, SignalOnReady(signal.SIGTERM))

    def insist() -> None:
        recorder.draining.wait(5)
        os.kill(os.getpid(), signal.SIGTERM)

    worker = threading.Thread(target=insist)
    worker.start()
    assert daemon.run() == EXIT_CUT
    worker.join()
    assert recorder.calls[-1] == "stop"
    gate.release()


def test_the_drain_is_bounded() -> None:
    gate = Gate("answers", 1)
    gate.acquire()
    recorder = Recorder(gate)
    assert Daemon(recorder.hooks(), 0.05, SignalOnReady(signal.SIGTERM)).run() == EXIT_CUT
    assert recorder.calls == ["start", "drain", "stop"]


def test_a_signal_before_ready_stops_at_once() -> None:
    recorder = Recorder(Gate("x", 1), at_start=lambda: signal.raise_signal(signal.SIGTERM))
    output = io.StringIO()
    assert Daemon(recorder.hooks(), 5.0, output).run() == 128 + signal.SIGTERM
    assert recorder.calls == ["start", "stop"]
    assert output.getvalue() == ""


def test_a_failed_start_is_cleaned_up() -> None:
    def fail() -> None:
        raise OSError("no model")

    recorder = Recorder(Gate("x", 1), at_start=fail)
    with pytest.raises(OSError, match="no model"):
        Daemon(recorder.hooks(), 5.0, io.StringIO()).run()
    assert recorder.calls == ["start", "stop"]


def test_outside_the_main_thread_it_is_stopped_by_a_call() -> None:
    recorder = Recorder(Gate("x", 1))
    daemon = Daemon(recorder.hooks(), 5.0, io.StringIO())
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(daemon.run()))
    thread.start()
    daemon.request_stop()
    thread.join(5)
    assert status == [EXIT_DRAINED]


CHILD = """
import sys
from cachelink_core.lifecycle import Daemon, Gate, Hooks
gate = Gate("x", 1)
daemon = Daemon(Hooks(lambda: {"grpc": "g"}, gate.close, gate.wait_idle, lambda: None), 5.0)
sys.exit(daemon.run())
"""


def test_a_process_says_ready_and_ends_on_sigterm() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == {"event": "ready", "grpc": "g"}
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == EXIT_DRAINED


def test_a_gate_bounds_and_counts() -> None:
    seen: list[int] = []
    gate = Gate("transfers", 2, seen.append)
    with gate.enter(), gate.enter():
        assert gate.inside == 2
        with pytest.raises(SlotsTaken, match="transfers: 2 of 2"):
            gate.acquire()
        assert not gate.wait_idle(0)
    assert gate.wait_idle(0)
    with pytest.raises(ZeroDivisionError), gate.enter():
        1 / 0  # noqa: B018
    assert gate.inside == 0
    assert seen == [1, 2, 1, 0, 1, 0]


def test_a_closed_gate_lets_nobody_in_but_everybody_out() -> None:
    gate = Gate("answers", 2)
    with gate.enter():
        gate.close()
        with pytest.raises(Draining, match="answers"):
            gate.acquire()
    assert wait_all_idle((gate, Gate("transfers", 1)), 0)


def test_waiting_for_all_has_one_deadline() -> None:
    busy = Gate("a", 1)
    busy.acquire()
    assert not wait_all_idle((busy, busy), 0.05)


def test_readiness() -> None:
    readiness = Readiness("model")
    assert (readiness.ready, readiness.missing()) == (False, ("model",))
    readiness.done("model")
    assert readiness.ready
    with pytest.raises(KeyError):
        readiness.done("model")
    readiness.drain()
    assert readiness.missing() == ("draining",)
