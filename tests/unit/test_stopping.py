"""A signal reaches work in another thread as a wish to end, and leaves when that has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cachelink_bench.two_node.stopping import Stop, run_stoppable
from cachelink_core.cli.demo.daemons import ended_by_sigterm
from cachelink_core.errors import ConfigError, HandoffAborted

SIGNALS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


def send(number: int) -> None:
    """To this process, from a thread of its own."""
    threading.Thread(target=os.kill, args=(os.getpid(), number)).start()


def test_work_gives_its_result_or_its_error():
    assert run_stoppable(lambda _stop: threading.current_thread().name) == "measure"

    def fail(_stop: Stop) -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        run_stoppable(fail)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_work_that_asks(number):
    ended = []

    def work(stop: Stop) -> None:
        send(number)
        try:
            while True:
                stop.check()
                time.sleep(0.001)
        except HandoffAborted as error:
            time.sleep(0.05)  # it has something to clean up
            ended.append(error)
            raise

    with ended_by_sigterm(), pytest.raises(SIGNALS[number]):
        run_stoppable(work)
    assert len(ended) == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_a_call_that_does_not_ask(number):
    cancelled = threading.Event()

    def work(stop: Stop) -> None:
        with stop.cancelling(cancelled.set):
            send(number)
            assert cancelled.wait(30)

    with ended_by_sigterm(), pytest.raises(SIGNALS[number]):
        run_stoppable(work)
    assert cancelled.is_set()


def test_no_call_begins_after_it_was_asked_to_end():
    stop = Stop()
    with stop.cancelling(stop.ask):
        pass
    stop.ask()
    with pytest.raises(HandoffAborted), stop.cancelling(stop.ask):
        raise AssertionError("it began")


def test_a_deadline_that_nobody_cancelled_does_not_keep_the_program_alive():
    """Ctrl-C may come between the timer's start and whatever would cancel it."""
    script = (
        "import subprocess, sys, threading\n"
        "from cachelink_bench.order_process import killed_after\n"
        "threading.Timer.cancel = lambda _timer: None\n"
        "child = subprocess.Popen([sys.executable, '-c', ''])\n"
        "with killed_after(child, 60.0):\n"
        "    child.wait()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment, timeout=30, check=False).returncode == 0
