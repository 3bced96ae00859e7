"""NIXL, UCX over TCP: a WRITE with a notification into the receiver's registered buffer.

With its progress thread (the default) an agent spins on a core of its own. Without it nothing moves
unless both sides ask, which they do every 0.2 ms while a transfer is under way.
"""

from __future__ import annotations

import base64
import socket
import threading
import time
from typing import Any, Final

from nixl_cu12._api import nixl_agent, nixl_agent_config

from cachelink_bench.peers.buffers import TIMEOUT_S, BufferReceiver, BufferSender
from cachelink_bench.peers.place import Place, Prepared, Sent
from cachelink_core.errors import InternalError, LinkTimeout

_POLL_S: Final = 0.0002
_DONE: Final = b"done"


class Receiver(BufferReceiver):
    """The receiving end.

    Attributes:
        address: of the word; what the agent says of itself; the buffer's place in memory.
    """

    def __init__(self, place: Place) -> None:
        """Registers the buffer."""
        super().__init__(place)
        self._agent = _agent("receiver", place)
        self._agent.register_memory(_described(self.buffer), "DRAM")
        self._listener = socket.create_server((place.host, 0))
        about = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.address: Any = [self._listener.getsockname(), about, self.buffer.ctypes.data]
        self._armed = threading.Event()
        threading.Thread(target=self._serve, name="nixl", daemon=True).start()

    def expect(self, prepared: Prepared, options: dict[str, str]) -> None:
        """See ``Receiving.expect``."""
        super().expect(prepared, options)
        self._armed.set()

    def close(self) -> None:
        """Listens no more; the agent ends with the process."""
        self._listener.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self._armed.wait():
            self._armed.clear()
            while not self._agent.get_new_notifs():
                time.sleep(_POLL_S)
            connection.sendall(b"\x01" if self.verify() else b"\x00")


class Sender(BufferSender):
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Registers the buffer and makes the receiver's agent known."""
        super().__init__(place)
        (host, port), about, self._target = place.to
        self._agent = _agent("sender", place)
        self._agent.register_memory(_described(self.buffer), "DRAM")
        self._peer = self._agent.add_remote_agent(base64.b64decode(about))
        self._word = socket.create_connection((host, port), timeout=TIMEOUT_S)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        agent, size = self._agent, self.data.nbytes
        began_s = time.monotonic()
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(self.buffer.ctypes.data, size, 0)], "DRAM"),
            agent.get_xfer_descs([(self._target, size, 0)], "DRAM"),
            self._peer,
            _DONE,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
            if time.monotonic() - began_s > TIMEOUT_S:
                raise LinkTimeout(f"still {state} after {TIMEOUT_S:g} s")
        if state != "DONE":
            raise InternalError(f"the transfer is {state}")
        word = self._word.recv(1)
        ended_s = time.monotonic()
        agent.release_xfer_handle(handle)
        if not word:
            raise ConnectionError("the receiver is gone")
        return Sent(ended_s - began_s, word == b"\x01")

    def close(self) -> None:
        """Closes the word's connection; the agent ends with the process."""
        self._word.close()


def _agent(name: str, place: Place) -> Any:
    threaded = place.options.get("progress_thread") == "on"
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=threaded, backends=["UCX"]))


def _described(buffer: Any) -> list[tuple[int, int, int, str]]:
    return [(buffer.ctypes.data, buffer.nbytes, 0, "")]
