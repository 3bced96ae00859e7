"""The bytes through one bare gRPC stream, then one digest over all of them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from cachelink_bench.bare_grpc import BareClient, BareServer
from cachelink_bench.peers.buffers import BufferReceiver, BufferSender, WordClient, WordServer
from cachelink_bench.peers.place import Place, Prepared, Sent


class Receiver(BufferReceiver):
    """The receiving end.

    Attributes:
        address: of the stream, and of the word.
    """

    def __init__(self, place: Place) -> None:
        """Serves at once."""
        super().__init__(place)
        self._server = BareServer(self.buffer, place.host)
        self._word = WordServer(place.host, self.verify)
        self.address: Any = [self._server.address, self._word.address]

    def close(self) -> None:
        """Ends the server."""
        self._word.close()
        self._server.close()


class Sender(BufferSender):
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Connects."""
        super().__init__(place)
        stream, word = place.to
        self._client = BareClient(stream)
        self._word = WordClient(word)

    def prepare(self, run: int, options: dict[str, str]) -> Prepared:
        """See ``Sending.prepare``. A pause can outlast the keepalive: an empty call reconnects."""
        with suppress(Exception):  # the first call after that may fail, with any status
            self._client.send(self.buffer[:0])
        self._client.send(self.buffer[:0])
        return super().prepare(run, options)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        began_s = time.monotonic()
        self._client.send(self.data)
        verified = self._word.ask()
        return Sent(time.monotonic() - began_s, verified)

    def close(self) -> None:
        """Closes the connections."""
        self._word.close()
        self._client.close()
