"""The second baseline: the same bytes through one TCP socket.

Frames of 1 MiB, each behind its length, are received straight into their place; one byte comes back
when all is there. No digest. It is what the machine's loopback gives to plain Python.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Final

from cachelink_core.codecs.native import Bytes
from cachelink_core.limits import MIB

_LENGTH: Final = struct.Struct("<Q")
_TIMEOUT_S: Final = 60.0


class SocketServer:
    """The receiving end: one connection, one copy after the other.

    Attributes:
        address: host and port.
        data: the destination.
    """

    def __init__(self, data: Bytes) -> None:
        """Listens at once, on a free port of loopback."""
        self.data = data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._serve, name="socket", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._listener.close()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed before anyone came
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._take(connection):
                connection.sendall(b"\x01")

    def _take(self, connection: socket.socket) -> bool:
        """Receives one copy; False when the peer has gone."""
        target, length, at = self.data.data, memoryview(bytearray(_LENGTH.size)), 0
        while at < len(target):
            if not _receive(connection, length):
                return False
            frame_bytes = _LENGTH.unpack(length)[0]
            if not _receive(connection, target[at : at + frame_bytes]):
                return False
            at += frame_bytes
        return True


class SocketClient:
    """The sending end."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Connects."""
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: Bytes) -> float:
        """Sends ``data``; returns seconds from its first byte to the acknowledgement."""
        view = data.data
        began = time.monotonic()
        for at in range(0, len(view), MIB):
            frame = view[at : at + MIB]
            self._socket.sendall(_LENGTH.pack(len(frame)))
            self._socket.sendall(frame)
        acknowledged = self._socket.recv(1)
        ended = time.monotonic()
        assert acknowledged == b"\x01", "the receiver has every byte"
        return ended - began

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def _receive(connection: socket.socket, into: memoryview) -> bool:
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            return False
        at += count
    return True
