"""A daemon's life with real signals."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachelink_core.lifecycle import EXIT_CUT, EXIT_DRAINED, Daemon, Hooks, Readiness
from cachelink_core.rpc.slots import Slots

ROOT = Path(__file__).parents[2]
ADDRESSES = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}


class Recorder:
    """Hooks over one slot that write down what was called."""

    def __init__(self, at_start: object = None) -> None:
        self.slots = Slots("answers", 1)
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
        self.slots.close()
        self.draining.set()

    def stop(self) -> None:
        self.calls.append("stop")

    def hooks(self) -> Hooks:
        return Hooks(self.start, self.drain, self.slots.wait_idle, self.stop)


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
    recorder = Recorder()
    output = SignalOnReady(number)
    assert Daemon(recorder.hooks(), 5.0, output).run() == EXIT_DRAINED
    assert recorder.calls == ["start", "drain", "stop"]
    assert json.loads(output.getvalue()) == {"event": "ready", **ADDRESSES}
    assert output.getvalue().count("\n") == 1
    assert signal.getsignal(number) is before


def test_work_under_way_is_finished() -> None:
    recorder = Recorder()
    begun, finished = threading.Event(), threading.Event()

    def work() -> None:
        with recorder.slots.take():
            begun.set()
            recorder.draining.wait(5)
            finished.set()

    worker = threading.Thread(target=work)
    worker.start()
    begun.wait(5)
    assert Daemon(recorder.hooks(), 5.0, SignalOnReady(signal.SIGTERM)).run() == EXIT_DRAINED
    assert finished.is_set()
    worker.join()


def test_a_second_signal_forces() -> None:
    recorder = Recorder()
    daemon = Daemon(recorder.hooks(), 60.0, SignalOnReady(signal.SIGTERM))

    def insist() -> None:
        recorder.draining.wait(5)
        os.kill(os.getpid(), signal.SIGTERM)

    worker = threading.Thread(target=insist)
    worker.start()
    with recorder.slots.take():
        assert daemon.run() == EXIT_CUT
    worker.join()
    assert recorder.calls[-1] == "stop"


def test_the_drain_is_bounded() -> None:
    recorder = Recorder()
    with recorder.slots.take():
        assert Daemon(recorder.hooks(), 0.05, SignalOnReady(signal.SIGTERM)).run() == EXIT_CUT
    assert recorder.calls == ["start", "drain", "stop"]


def test_a_signal_before_ready_stops_at_once() -> None:
    recorder = Recorder(at_start=lambda: signal.raise_signal(signal.SIGTERM))
    output = io.StringIO()
    assert Daemon(recorder.hooks(), 5.0, output).run() == 128 + signal.SIGTERM
    assert recorder.calls == ["start", "stop"]
    assert output.getvalue() == ""


def test_a_failed_start_is_cleaned_up() -> None:
    def fail() -> None:
        raise OSError("no model")

    recorder = Recorder(at_start=fail)
    with pytest.raises(OSError, match="no model"):
        Daemon(recorder.hooks(), 5.0, io.StringIO()).run()
    assert recorder.calls == ["start", "stop"]


def test_outside_the_main_thread_it_is_stopped_by_a_call() -> None:
    recorder = Recorder()
    daemon = Daemon(recorder.hooks(), 5.0, io.StringIO())
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(daemon.run()))
    thread.start()
    daemon.request_stop()
    thread.join(5)
    assert status == [EXIT_DRAINED]


CHILD = """
import sys
from cachelink_core.lifecycle import Daemon, Hooks
hooks = Hooks(lambda: {"grpc": "g"}, lambda: None, lambda deadline_s: True, lambda: None)
daemon = Daemon(hooks, 5.0)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_got_is_noticed(number: signal.Signals) -> None:
    """The handler of the system runs there; nothing interrupts what the main thread waits in."""
    recorder, output = Recorder(), io.StringIO()

    def hit() -> None:
        while not output.getvalue():
            time.sleep(0.001)
        time.sleep(0.2)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), number)
        other_ended.wait(10)

    other_ended = threading.Event()
    other = threading.Thread(target=hit)
    other.start()
    try:
        assert Daemon(recorder.hooks(), 5.0, output).run() == EXIT_DRAINED
    finally:
        other_ended.set()
        other.join()


def test_signals_that_its_parent_held_back_reach_it() -> None:
    held_back = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15, 2})\n"
    child = subprocess.Popen(
        [sys.executable, "-c", held_back + CHILD], cwd=ROOT, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["event"] == "ready"
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == EXIT_DRAINED


def test_readiness() -> None:
    readiness = Readiness("model")
    assert (readiness.ready, readiness.missing()) == (False, ("model",))
    readiness.done("model")
    assert readiness.ready
    with pytest.raises(KeyError):
        readiness.done("model")
    readiness.drain()
    assert readiness.missing() == ("draining",)
