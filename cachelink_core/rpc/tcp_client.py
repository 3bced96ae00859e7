"""The sending end of the plane ``tcp``: connections, each for one handoff after the other.

A connection is kept for the next handoff, because a new one starts slowly: its windows grow with what
it has moved.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

from google.protobuf.message import DecodeError

from cachelink_core import limits
from cachelink_core.errors import (
    HandoffAborted,
    LinkTimeout,
    PeerGone,
    RemoteProtocolError,
)
from cachelink_core.rpc import convert_transfer as convert
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.rpc.status import from_info
from cachelink_core.rpc.tcp_frames import FrameKind, Outgoing, check_digest
from cachelink_core.rpc.tcp_socket import FrameSocket
from cachelink_core.rpc.transfer_types import Endpoint, PushReceipt
from cachelink_core.rpc.watchdog import Watchdog

KEPT_S: Final = 20.0
"""How long an idle connection is used again: shorter than a receiver keeps it, so that it is not closed
under a handoff that has just begun."""


class TcpPush:
    """One connection to a receiver, for one handoff at a time. A context manager.

    Attributes:
        reusable: whether the last handoff ended with a receipt, so that another may follow.
    """

    def __init__(self, connection: FrameSocket, address: str) -> None:
        self.reusable = False
        self._connection = connection
        self._address = address
        self._idle_since_s = time.monotonic()

    def fresh(self) -> bool:
        """Whether an idle connection can be used again: not for too long, and the peer is silent."""
        rested_s = time.monotonic() - self._idle_since_s
        return rested_s < KEPT_S and not self._connection.peer_spoke()

    @classmethod
    def connect(
        cls,
        endpoint: Endpoint,
        called: str,
        tls: ssl.SSLContext | None,
        within_s: float = limits.CONNECT_DEADLINE_S,
    ) -> TcpPush:
        """Connects.

        Args:
            endpoint: as offered in the reservation.
            called: ``host:port`` at which the receiver was called; its host is taken where the
                endpoint names none.
            tls: of ``tls.client_context``; None for plaintext.
            within_s: for the connection, and again for TLS's handshake.

        Raises:
            PeerGone: there is no connection within ``within_s``, or no trust in it.
        """
        host, _, port = endpoint.address.rpartition(":")
        host = (host or called.rpartition(":")[0]).strip("[]")
        try:
            plain = socket.create_connection((host, int(port)), within_s)
            try:
                secured = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
        except (OSError, ValueError, OverflowError) as error:
            raise PeerGone(f"no data connection to {host}:{port}: {error}") from error
        return cls(FrameSocket(secured), f"{host}:{port}")

    def push(
        self,
        frames: Iterator[Outgoing],
        *,
        deadline_s: float,
        stall_s: float = limits.STALL_DEADLINE_S,
        on_stall: Callable[[], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> PushReceipt:
        """Sends one handoff and waits for its receipt; everything as ``TransferClient.push`` does.

        Raises:
            LinkTimeout: the deadline passed, or the receiver took nothing for ``stall_s``.
            HandoffAborted: ``cancelled`` said so.
            PeerGone: the connection broke.
            CacheLinkError: the receiver's refusal, as its own class.
            Exception: what ``frames`` raised, as it was.
        """
        until_s = time.monotonic() + deadline_s
        self.reusable = False

        def ended() -> bool:
            return time.monotonic() > until_s or (cancelled is not None and cancelled())

        with Watchdog(stall_s, self._connection.shutdown, ended) as watchdog:
            try:
                self._send(frames, watchdog)
                receipt = self._receipt()
            except PeerGone:
                if watchdog.stalled:
                    if on_stall is not None:
                        on_stall()
                    raise LinkTimeout(f"{self._address} took nothing for {stall_s:g} s") from None
                if not watchdog.cancelled:
                    raise
                if cancelled is not None and cancelled():
                    raise HandoffAborted("given up by its caller") from None
                raise LinkTimeout(f"not over within {deadline_s:g} s") from None
        self.reusable, self._idle_since_s = True, time.monotonic()
        return receipt

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, frames: Iterator[Outgoing], watchdog: Watchdog) -> None:
        """Sends until the frames end or the receiver says something, which can only be its end."""
        committed = False
        for frame in frames:
            if self._connection.peer_spoke():
                return
            watchdog.arm()
            try:
                self._connection.send(frame)
            except PeerGone:
                if self._connection.peer_spoke():  # why it hung up may still be there to be read
                    return
                raise
            finally:
                watchdog.disarm()
            committed = frame.kind is FrameKind.COMMIT
        if not committed:  # a stream that was cut, and no silence
            self._connection.end_writing()

    def _receipt(self) -> PushReceipt:
        header = self._connection.read_header()
        if header is None:
            raise PeerGone(f"{self._address} ended the connection without a receipt")
        if header.kind not in (FrameKind.RECEIPT, FrameKind.ERROR):
            raise RemoteProtocolError(f"{self._address} answered with {header.kind.name.lower()}")
        payload = self._connection.read_payload(header)
        check_digest(header, payload)
        try:
            if header.kind is FrameKind.ERROR:
                raise from_info(common_pb2.ErrorInfo.FromString(payload))
            return convert.push_receipt_from(pb.PushChunksResponse.FromString(payload))
        except DecodeError as error:
            raise RemoteProtocolError(
                f"{self._address} answered with no message: {error}"
            ) from error


class IdleConnections:
    """Connections between two handoffs. Safe for threads."""

    def __init__(self) -> None:
        """Empty."""
        self._lock = threading.Lock()
        self._kept: list[TcpPush] = []
        self._closed = False

    def keep(self, connection: TcpPush) -> None:
        """Takes one that may be used again; closes those that no longer can."""
        with self._lock:
            gone = [each for each in self._kept if not each.fresh()]
            self._kept = [each for each in self._kept if each not in gone]
            (gone if self._closed else self._kept).append(connection)
        for each in gone:
            each.close()

    def take(self) -> TcpPush | None:
        """One that can be used again, the last used first; those that cannot are closed."""
        while True:
            with self._lock:
                if not self._kept:
                    return None
                connection = self._kept.pop()
            if connection.fresh():
                return connection
            connection.close()

    def close(self) -> None:
        """Closes them, and from now on each that is given back."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()
