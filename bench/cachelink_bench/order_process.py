"""A process that does what it is told: one JSON document a line in, one reply a line out.

The parent gives orders and waits for each reply with a deadline; the child ends when its input does,
and the kernel ends it when the parent is gone. Both halves are here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from cachelink_core.errors import CacheLinkError, ConfigError

START_DEADLINE_S: Final = 180.0
"""To import everything and to load the model on a busy machine."""

ORDER_DEADLINE_S: Final = 60.0

_END_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


class OrderProcess:
    """The other process; a context manager that ends it.

    Attributes:
        pid: of the process.
        ready: what it said when it was ready.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        """Starts it and waits until it is ready.

        Args:
            module: to run.
            arguments: of its command line.
            within: words before the command, such as those that enter a network namespace.
            environment: variables beside the caller's.
            log: where its standard error goes; None for the caller's own.
            start_deadline_s: until it is ready.

        Raises:
            ConfigError: it did not come up.
        """
        path = os.pathsep.join(filter(None, sys.path))
        variables = os.environ | {"PYTHONPATH": path} | dict(environment or {})
        errors = log.open("wb") if log else None
        try:
            self._process = subprocess.Popen(
                [*within, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                text=True,
                # Ctrl-C is for the parent: it ends its children in order, stopped ones too.
                process_group=0,
            )
        finally:
            if errors:
                errors.close()
        self.pid = self._process.pid
        try:
            self.ready: dict[str, Any] = self._read(start_deadline_s)
        except BaseException:
            self.kill()
            raise

    def ask(self, *, deadline_s: float = ORDER_DEADLINE_S, **order: object) -> dict[str, Any]:
        """Gives one order and returns the reply.

        Raises:
            ConfigError: the process has ended, or does not reply in time; it is then ended.
        """
        assert self._process.stdin is not None, "opened as a pipe"
        with suppress(BrokenPipeError):  # it has ended; reading says so
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._read(deadline_s)

    def cpu_s(self) -> float:
        """User and system seconds that the process has used, all threads; it is not asked."""
        # The clock of another process, as clock_getcpuclockid(3) encodes it on Linux.
        return time.clock_gettime((~self.pid << 3) | 2)

    def stop(self) -> None:
        """Takes it off the processor: nothing in it runs until ``go_on``."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets a stopped process run again."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it: by the end of its input, or by force."""
        assert self._process.stdin is not None, "opened as a pipe"
        self.go_on()
        try:
            self._process.stdin.close()
            self._process.wait(timeout=_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # it is ended by force
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened as a pipe"
        began_s = time.monotonic()
        with killed_after(self._process, deadline_s):
            line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise ConfigError(
                f"the other process was silent for {deadline_s:g} s"
                if status == -signal.SIGKILL and time.monotonic() - began_s >= deadline_s
                else f"the other process ended with status {status}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ConfigError(str(reply["error"]))
        return reply


@contextmanager
def killed_after(process: subprocess.Popen[Any], deadline_s: float) -> Iterator[None]:
    """Ends a process that is still waited for then: a pipe's readline has no deadline of its own."""
    late = threading.Timer(deadline_s, process.kill)
    # Ctrl-C may come while it starts, when nobody has it to cancel: it must not keep us alive.
    late.daemon = True
    try:
        late.start()
        yield
    finally:
        late.cancel()


def take_stdout() -> IO[str]:
    """Keeps standard output for replies alone; whatever else is printed goes to standard error.

    Native libraries print too, so it is the descriptor that is moved.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return replies


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however that comes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def reply(stream: IO[str], **fields: object) -> None:
    """Says one thing to the parent."""
    stream.write(json.dumps(fields) + "\n")
    stream.flush()


def serve_orders(stream: IO[str], obey: Callable[[dict[str, Any]], Mapping[str, object]]) -> None:
    """Obeys until standard input ends; an error of ours is replied, not raised."""
    for line in sys.stdin:
        try:
            done = obey(json.loads(line))
        except (CacheLinkError, OSError) as error:
            done = {"error": f"{type(error).__name__}: {error}"}
        reply(stream, **done)
