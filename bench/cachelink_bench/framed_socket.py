"""The second baseline: the same bytes through one TCP socket.

Frames of 1 MiB, each behind its length, are received straight into their place; one byte comes back
when all is there. It is what the machine's loopback gives to plain Python. With ``digests`` a frame
also carries XXH3-128 of its bytes, and the byte that comes back says whether all of them fit.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_128_digest

from cachelink_core.errors import ChecksumMismatch
from cachelink_core.limits import MIB

if TYPE_CHECKING:  # it would load torch
    from cachelink_core.codecs.native import Bytes

_LENGTH: Final = struct.Struct("<Q")
_DIGEST_BYTES: Final = 16
_TIMEOUT_S: Final = 60.0


class SocketServer:
    """The receiving end: one connection, one copy after the other.

    Attributes:
        address: host and port.
        data: the destination; another one may be put in its place between two copies.
    """

    def __init__(self, data: Bytes, host: str = "127.0.0.1", *, digests: bool = False) -> None:
        """Listens at once, on a free port."""
        self.data = data
        self._digests = digests
        self._listener = socket.create_server((host, 0))
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
            while (fits := self._take(connection)) is not None:
                connection.sendall(b"\x01" if fits else b"\x00")

    def _take(self, connection: socket.socket) -> bool | None:
        """Receives one copy; whether every digest fits, or None when the peer has gone."""
        head = memoryview(bytearray(_LENGTH.size + self._digests * _DIGEST_BYTES))
        at, fits = 0, True
        while True:
            if not receive(connection, head):
                return None
            target = self.data.data  # only now: the first frame says that it is in place
            frame = target[at : at + _LENGTH.unpack_from(head)[0]]
            if not receive(connection, frame):
                return None
            if self._digests:
                fits = fits and xxh3_128_digest(frame) == head[_LENGTH.size :]
            at += len(frame)
            if at == len(target):
                return fits


class SocketClient:
    """The sending end."""

    def __init__(self, address: tuple[str, int], *, digests: bool = False) -> None:
        """Connects."""
        self._digests = digests
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: Bytes) -> float:
        """Sends ``data``; returns seconds from its first byte to the acknowledgement.

        Raises:
            ChecksumMismatch: a frame arrived that was not sent.
        """
        view = data.data
        began = time.monotonic()
        for at in range(0, len(view), MIB):
            frame = view[at : at + MIB]
            head = _LENGTH.pack(len(frame))
            self._socket.sendall(head + xxh3_128_digest(frame) if self._digests else head)
            self._socket.sendall(frame)
        acknowledged = self._socket.recv(1)
        ended = time.monotonic()
        if acknowledged != b"\x01":
            raise ChecksumMismatch(f"the receiver said {acknowledged!r} to what it received")
        return ended - began

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills ``into``; False when the peer has gone."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            return False
        at += count
    return True
