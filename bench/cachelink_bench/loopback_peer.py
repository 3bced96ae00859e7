"""Starts the receiving process, talks to it, and leaves none behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from cachelink_core.errors import ConfigError

START_DEADLINE_S: Final = 180.0
"""To import everything and to load the model on a busy machine."""

ORDER_DEADLINE_S: Final = 60.0


class ReceiverProcess:
    """The other process; a context manager that ends it.

    Attributes:
        ends: where each arm is served, by name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        """Starts it and waits until it serves.

        Raises:
            ConfigError: it did not come up; its own message is on standard error.
        """
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cachelink_bench.loopback_receiver", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            self.ends: dict[str, Any] = self._read(START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def ask(self, **order: str) -> dict[str, Any]:
        """Gives one order and returns the reply.

        Raises:
            ConfigError: the process has ended, or does not reply within ``ORDER_DEADLINE_S``.
        """
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read(ORDER_DEADLINE_S)

    def close(self) -> None:
        """Ends it: by the end of its input, or by force."""
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
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
        # A pipe's readline has no deadline of its own; killing the writer ends it.
        late = threading.Timer(deadline_s, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise ConfigError(f"the receiving process ended, or was silent for {deadline_s:g} s")
        reply: dict[str, Any] = json.loads(line)
        return reply
