"""The same bytes over the same link through one plain TCP connection, on the same clock.

iperf3 begins every run with a new connection; this one, like a channel between two nodes, stays. It
is what a long link gives when nothing has to grow first. No digest, and the destination is one buffer.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np

from cachelink_bench.emulation.namespaces import ADDRESSES, EmulatedLink, Side
from cachelink_bench.framed_socket import SocketClient, SocketServer
from cachelink_bench.link.caller import Moved
from cachelink_bench.link.cpu_watch import process_cpu_s
from cachelink_core.errors import InternalError

NAME: Final = "socket"


class SocketPair:
    """One process in each namespace and a connection between them; a context manager."""

    def __init__(self, link: EmulatedLink, payload_bytes: int) -> None:
        """Starts both; the connection is made when it is entered.

        Args:
            link: between them.
            payload_bytes: of one copy; both ends hold so many, their pages touched.
        """
        self._payload_bytes = payload_bytes
        self._link = link
        self._stack = ExitStack()
        self._receiver: subprocess.Popen[str] | None = None
        self._sender: subprocess.Popen[str] | None = None

    def copy(self) -> Moved:
        """Sends every byte once; the clock runs from the first one to the acknowledgement.

        Raises:
            InternalError: a process has ended.
        """
        assert self._sender is not None, "it was entered"
        assert self._receiver is not None, "it was entered"
        assert self._sender.stdin is not None, "it is a pipe"
        pids = self._sender.pid, self._receiver.pid
        before = [process_cpu_s(pid) for pid in pids]
        self._sender.stdin.write("go\n")
        self._sender.stdin.flush()
        seconds = float(_line(self._sender))
        cpu_s = [process_cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
        return Moved(seconds, self._payload_bytes, 0.0, 0.0, 0.0, cpu_s[0], cpu_s[1], NAME)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._receiver = stack.enter_context(self._started("receiver", ADDRESSES["receiver"]))
            stack.callback(self._receiver.kill)
            self._sender = stack.enter_context(self._started("sender", _line(self._receiver)))
            stack.callback(self._sender.kill)
            _line(self._sender)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _started(self, side: Side, place: str) -> subprocess.Popen[str]:
        arguments = ["-m", __name__, side, place, str(self._payload_bytes)]
        return subprocess.Popen(
            [*self._link.within(side), sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for the parent, which ends it
        )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "it is a pipe"
    line = process.stdout.readline().strip()
    if not line:
        raise InternalError(f"a process of the plain socket ended with {process.wait()}")
    return line


def main() -> int:
    """One end: its side, the place to listen at or to connect to, and how many bytes."""
    side, place, count = sys.argv[1:]
    data = np.ones(int(count), np.uint8)
    if side == "receiver":
        host, port = SocketServer(data, place).address
        print(f"{host}:{port}", flush=True)
        sys.stdin.read()  # until the parent has gone
        return 0
    host, _, number = place.partition(":")
    client = SocketClient((host, int(number)))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(client.send(data), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
