"""The receivers that this sender may push to: those of its configuration and no others."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cachelink_core.errors import Denied
from cachelink_core.rpc.tls import TlsFiles
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_sender.config import Peer


class Peers:
    """Opens one channel a receiver, on first use. Safe for threads."""

    def __init__(self, configured: Mapping[str, Peer]) -> None:
        """Takes the configured receivers; nothing is connected yet."""
        self._configured = dict(configured)
        self._lock = threading.Lock()
        self._clients: dict[str, TransferClient] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a request may give."""
        return tuple(sorted(self._configured))

    def client(self, name: str) -> TransferClient:
        """The channel to a receiver.

        Raises:
            Denied: it is not in the configuration.
        """
        with self._lock:
            if name not in self._configured:
                raise Denied(
                    f"receiver {name!r} is not in this sender's list: "
                    f"{', '.join(self.names) or 'the list is empty'}"
                )
            if name not in self._clients:
                self._clients[name] = _open(self._configured[name])
            return self._clients[name]

    def close(self) -> None:
        """Closes every channel."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


def _open(peer: Peer) -> TransferClient:
    tls = None
    if peer.tls is not None:
        tls = TlsFiles(certificate=peer.tls.certificate, key=peer.tls.key, ca=peer.tls.ca)
    return TransferClient(
        peer.address, tls=tls, token=peer.token.read() if peer.token is not None else None
    )
