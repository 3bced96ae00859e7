"""The measure of all rows: one TCP connection, all bytes in one call, one digest over them at the end.

Nothing is framed, so nothing can be verified before the last byte is here: what overlaps its digest
with the transfer may be faster.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from cachelink_bench.framed_socket import receive
from cachelink_bench.peers.buffers import TIMEOUT_S, BufferReceiver, BufferSender
from cachelink_bench.peers.place import Place, Sent

_LENGTH_BYTES = 8


class Receiver(BufferReceiver):
    """The receiving end.

    Attributes:
        address: host and port.
    """

    def __init__(self, place: Place) -> None:
        """Listens at once, on a free port."""
        super().__init__(place)
        self._listener = socket.create_server((place.host, 0))
        self.address: Any = self._listener.getsockname()
        threading.Thread(target=self._serve, name="socket", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self._listener.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        length = memoryview(bytearray(_LENGTH_BYTES))
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while receive(connection, length):
                if not receive(connection, self.data.data[: int.from_bytes(length, "little")]):
                    return
                connection.sendall(b"\x01" if self.verify() else b"\x00")


class Sender(BufferSender):
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Connects."""
        super().__init__(place)
        host, port = place.to
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        view = self.data.data
        began_s = time.monotonic()
        self._socket.sendall(len(view).to_bytes(_LENGTH_BYTES, "little"))
        self._socket.sendall(view)
        word = self._socket.recv(1)
        ended_s = time.monotonic()
        if not word:
            raise ConnectionError("the receiver is gone")
        return Sent(ended_s - began_s, word == b"\x01")

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
