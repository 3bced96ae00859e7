"""Starts daemons as processes of their own, and ends them whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

from cachelink_core.errors import CacheLinkError, InternalError, LinkTimeout, PeerGone

START_DEADLINE_S: Final = 300.0
"""Loading torch and a small model takes seconds, a minute on a busy machine."""

STOP_DEADLINE_S: Final = 40.0
"""The daemons' own drain is bounded by 30 s."""

RECEIVER_NAME: Final = "demo"
"""Of the receiver in the sender's list."""

_ENV_PREFIX: Final = "CACHELINK_"
_TAIL_LINES: Final = 15
_READER_DEADLINE_S: Final = 1.0
_ABORT_DEADLINE_S: Final = 5.0


class DaemonProcess:
    """One daemon. It is a context manager: leaving it ends the process.

    Attributes:
        name: for messages.
        exit_status: once it has ended; negative for a signal.
    """

    def __init__(
        self,
        name: str,
        module: str,
        options: Sequence[str],
        log: Path,
        within: Sequence[str] = (),
    ) -> None:
        """Starts the process.

        Args:
            name: for messages.
            module: to run.
            options: of its command line.
            log: where its standard error goes.
            within: words before the command, such as those that enter a network namespace.
        """
        self.name = name
        self.exit_status: int | None = None
        self._log = log
        # Settings of the caller's environment are for the caller's daemons.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_ENV_PREFIX)}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [*within, sys.executable, "-m", module, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process: the words of ``within`` replace themselves by it."""
        return self._process.pid

    def configure(self, config: Mapping[str, object]) -> None:
        """Gives a daemon that was started with ``--config /dev/stdin`` its configuration."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(config).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            return  # it has ended; waiting for it says why

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> dict[str, str]:
        """Waits for the ready line; returns its addresses by scheme.

        Raises:
            PeerGone: it ended instead.
            LinkTimeout: neither within the deadline.
        """
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise LinkTimeout(
                f"{self.name} was not ready after {deadline_s:g} s{self._last_words()}"
            ) from None
        if not line:
            status = self._process.wait()
            raise PeerGone(
                f"{self.name} ended with status {status} at its start{self._last_words()}"
            )
        ready = json.loads(line)
        if ready.pop("event", "") != "ready":
            raise InternalError(f"{self.name} printed {line!r} instead of its ready line")
        return {str(scheme): str(address) for scheme, address in ready.items()}

    def terminate(self) -> None:
        """Asks it to drain."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Waits for its end; returns the exit status.

        Raises:
            LinkTimeout: it does not end; what its threads were doing is on standard error.
        """
        try:
            self.exit_status = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            last_words = self._last_words()
            self._abort()
            raise LinkTimeout(
                f"{self.name} did not end within {deadline_s:g} s of SIGTERM{last_words}"
            ) from None
        return self.exit_status

    def _abort(self) -> None:
        """Ends it so that it says what its threads were doing, and passes that on."""
        logged = self._log.stat().st_size
        self._process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ABORT_DEADLINE_S)
        stacks = self._log.read_bytes()[logged:].decode(errors="replace")
        sys.stderr.write(f"-- what the {self.name} was doing:\n{stacks}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.exit_status = self._process.wait()
        # It must not come to a pipe that is closed; a pipe that a grandchild holds open it keeps.
        self._reader.join(_READER_DEADLINE_S)
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        self._lines.put(self._process.stdout.readline())

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _last_words(self) -> str:
        line = self.tail().rpartition("\n")[2]
        return f": {line}" if line else ""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two daemons that take work.

    Attributes:
        sender: its process.
        receiver: its process.
        sender_address: of its gRPC server.
        receiver_address: of its gRPC server.
    """

    sender: DaemonProcess
    receiver: DaemonProcess
    sender_address: str
    receiver_address: str

    def drain(self) -> dict[str, int]:
        """Ends both as an operator would; returns the exit statuses.

        Raises:
            LinkTimeout: one does not end.
        """
        both = (self.sender, self.receiver)
        for daemon in both:
            daemon.terminate()
        return {daemon.name: daemon.wait() for daemon in both}


@contextmanager
def two_nodes(
    options: Sequence[str],
    *,
    sender_options: Sequence[str] = (),
    receiver_options: Sequence[str] = (),
    sender_within: Sequence[str] = (),
    receiver_within: Sequence[str] = (),
) -> Iterator[Nodes]:
    """Starts a receiver and a sender on loopback, ports picked by the system.

    The sender's list must name the receiver's port, which is known only once the receiver is there.
    So the sender reads its configuration from a pipe: it loads its libraries meanwhile.

    Args:
        options: of both command lines, such as ``--model.name``.
        sender_options: of the sender's alone.
        receiver_options: of the receiver's alone.
        sender_within: words before the sender's command, such as those that pin it to a core.
        receiver_within: words before the receiver's command.

    When anything in the ``with`` fails, the ends of both logs go to standard error.

    Raises:
        PeerGone: a daemon ended at its start.
        LinkTimeout: a daemon was not ready in time.
    """
    ports = ["--listen.port", "0", "--http.port", "0"]
    with tempfile.TemporaryDirectory(prefix="cachelink-demo-") as folder:
        logs = Path(folder)
        with (
            DaemonProcess(
                "receiver",
                "cachelink_receiver",
                [*ports, *options, *receiver_options],
                logs / "receiver.log",
                receiver_within,
            ) as receiver,
            DaemonProcess(
                "sender",
                "cachelink_sender",
                ["--config", "/dev/stdin", *ports, *options, *sender_options],
                logs / "sender.log",
                sender_within,
            ) as sender,
        ):
            try:
                receiver_address = receiver.wait_ready()["grpc"]
                sender.configure({"receivers": {RECEIVER_NAME: receiver_address}})
                sender_address = sender.wait_ready()["grpc"]
                yield Nodes(sender, receiver, sender_address, receiver_address)
            except CacheLinkError:
                for daemon in (receiver, sender):
                    sys.stderr.write(f"-- the end of the {daemon.name}'s log:\n{daemon.tail()}\n")
                raise


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exception, so that every ``with`` still ends its process."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
