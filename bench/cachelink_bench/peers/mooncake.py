"""Mooncake Transfer Engine over TCP: a write into the receiver's registered buffer.

The receiver is told nothing, so the sender asks for its word once the call has returned. Protocol v2
(the default) returns when the receiver has applied the write; v1 returns earlier.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mooncake.engine import TransferEngine

from cachelink_bench.peers.buffers import BufferReceiver, BufferSender, WordClient, WordServer
from cachelink_bench.peers.place import Place, Sent
from cachelink_core.errors import InternalError

if TYPE_CHECKING:  # it would load torch
    from cachelink_core.codecs.native import Bytes


class Receiver(BufferReceiver):
    """The receiving end.

    Attributes:
        address: session, address of the buffer in memory, and of the word.
    """

    def __init__(self, place: Place) -> None:
        """Registers the buffer."""
        super().__init__(place)
        self._engine = _engine(place.host, self.buffer)
        self._word = WordServer(place.host, self.verify)
        session = f"{place.host}:{self._engine.get_rpc_port()}"
        self.address: Any = [session, self.buffer.ctypes.data, self._word.address]

    def close(self) -> None:
        """Listens no more; the engine ends with the process."""
        self._word.close()


class Sender(BufferSender):
    """The sending end."""

    def __init__(self, place: Place) -> None:
        """Registers the buffer."""
        super().__init__(place)
        self._session, self._target, word = place.to
        self._engine = _engine(place.host, self.buffer)
        self._word = WordClient(word)

    def send(self) -> Sent:
        """See ``Sending.send``."""
        began_s = time.monotonic()
        status = self._engine.transfer_sync_write(
            self._session, self.buffer.ctypes.data, self._target, self.data.nbytes
        )
        verified = self._word.ask()
        ended_s = time.monotonic()
        if status:
            raise InternalError(f"transfer_sync_write returned {status}")
        return Sent(ended_s - began_s, verified)

    def close(self) -> None:
        """Closes the word's connection; the engine ends with the process."""
        self._word.close()


def _engine(host: str, buffer: Bytes) -> Any:
    engine: Any = TransferEngine()
    if status := engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise InternalError(f"initialize returned {status}")
    if status := engine.register_memory(buffer.ctypes.data, buffer.nbytes):
        raise InternalError(f"register_memory returned {status}")
    return engine
