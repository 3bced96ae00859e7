"""Ends that move the bytes of one buffer into another one, whatever carries them.

Every run's payload is another: its number is stamped into each MiB, so that bytes that were left over
from an earlier run are never taken for those of this one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from xxhash import xxh3_128_hexdigest

from cachelink_bench.peers.place import Place, Prepared
from cachelink_core.limits import MIB

if TYPE_CHECKING:  # it would load torch
    from cachelink_core.codecs.native import Bytes

TIMEOUT_S: Final = 60.0
"""For whatever a peer may wait for."""

_STAMP_BYTES: Final = 8


class BufferSender:
    """The sender's half of a buffer pair; a way of sending derives from it.

    Attributes:
        data: the payload of this run, the first part of ``buffer``.
        buffer: as large as the largest payload.
    """

    def __init__(self, place: Place) -> None:
        """Allocates."""
        self.buffer: Bytes = np.zeros(place.most_bytes, np.uint8)
        self.data: Bytes = self.buffer[:0]

    def load(self, stem: Path) -> None:
        """See ``Sending.load``."""
        payload = np.fromfile(stem.with_suffix(".payload"), np.uint8)
        self.data = self.buffer[: payload.nbytes]
        self.data[:] = payload

    def prepare(self, run: int, options: dict[str, str]) -> Prepared:
        """See ``Sending.prepare``."""
        del options
        stamp = np.frombuffer(run.to_bytes(_STAMP_BYTES, "little"), np.uint8)
        for at in range(0, self.data.nbytes - _STAMP_BYTES, MIB):
            self.data[at : at + _STAMP_BYTES] = stamp
        return Prepared(xxh3_128_hexdigest(self.data.data), self.data.nbytes)


class BufferReceiver:
    """The receiver's half of a buffer pair; a way of receiving derives from it.

    Attributes:
        data: where this run's payload must lie, the first part of ``buffer``.
        buffer: as large as the largest payload.
    """

    def __init__(self, place: Place) -> None:
        """Allocates, and touches every page."""
        self.buffer: Bytes = np.empty(place.most_bytes, np.uint8)
        self.buffer.fill(0)
        self.data: Bytes = self.buffer[:0]
        self._wanted = ""

    def expect(self, prepared: Prepared, options: dict[str, str]) -> None:
        """See ``Receiving.expect``."""
        del options
        self.data = self.buffer[: prepared.payload_bytes]
        self.data.fill(0)
        self._wanted = prepared.digest

    def verify(self) -> bool:
        """Whether what must arrive is here: XXH3-128 over all of it. This is on the clock."""
        return self.found("") == self._wanted

    def found(self, name: str) -> str:
        """See ``Receiving.found``."""
        del name
        return xxh3_128_hexdigest(self.data.data)


class WordServer:
    """Answers a sender that has been told "done" with whether it is true.

    For ways of which the receiver hears nothing, and those that must be told to fetch.

    Attributes:
        address: host and port.
    """

    def __init__(self, host: str, verify: Callable[[], bool]) -> None:
        """Listens at once; every byte that comes is answered by what ``verify`` says."""
        self._verify = verify
        self._listener = socket.create_server((host, 0))
        self.address: Any = self._listener.getsockname()
        threading.Thread(target=self._serve, name="word", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self._listener.close()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed before anyone came
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(b"\x01" if self._verify() else b"\x00")


class WordClient:
    """The asking end of a ``WordServer``."""

    def __init__(self, address: Any) -> None:
        """Connects."""
        host, port = address
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> bool:
        """Says that all was sent; returns whether the receiver has verified all of it.

        Raises:
            OSError: the receiver is gone, or took ``TIMEOUT_S``.
        """
        self._socket.sendall(b"\x01")
        answer = self._socket.recv(1)
        if not answer:
            raise ConnectionError("the receiver is gone")
        return answer == b"\x01"

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
