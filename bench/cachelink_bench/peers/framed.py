"""Frames of 1 MiB through one TCP connection, each with its digest: verified while more arrives."""

from __future__ import annotations

from typing import Any

from cachelink_bench.framed_socket import SocketClient, SocketServer
from cachelink_bench.peers.buffers import BufferReceiver, BufferSender
from cachelink_bench.peers.place import Place, Prepared, Sent
from cachelink_core.errors import ChecksumMismatch


class Receiver(BufferReceiver):
    """The receiving end.

    Attributes:
        address: host and port.
    """

    def __init__(self, place: Place) -> None:
        """Listens at once."""
        super().__init__(place)
        self._server = SocketServer(self.data, place.host, digests=True)
        self.address: Any = self._server.address

    def expect(self, prepared: Prepared, options: dict[str, str]) -> None:
        """See ``Receiving.expect``."""
        super().expect(prepared, options)
        self._server.data = self.data

    def close(self) -> None:
        """Listens no more."""
        self._server.close()


class Sender(BufferSender):
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Connects."""
        super().__init__(place)
        host, port = place.to
        self._client = SocketClient((host, port), digests=True)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        try:
            return Sent(self._client.send(self.data), verified=True)
        except ChecksumMismatch:
            return Sent(0.0, verified=False)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
