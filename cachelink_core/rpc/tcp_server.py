"""The receiving end of the plane ``tcp``: a listener, tickets, and one thread a connection.

A connection carries no token. ``Reserve``, which is authenticated, hands out a ticket; whoever shows
it may send that handoff, once, as the tenant who reserved it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Final

from cachelink_core import limits
from cachelink_core.errors import (
    CacheLinkError,
    ConfigError,
    InternalError,
    PeerGone,
    RemoteProtocolError,
)
from cachelink_core.handoff.events import Open
from cachelink_core.rpc import convert_transfer as convert
from cachelink_core.rpc.handlers import Call, TransferHandler
from cachelink_core.rpc.pb.cachelink.v1.transfer_pb2 import TransferOpen
from cachelink_core.rpc.slots import Slots
from cachelink_core.rpc.status import to_info
from cachelink_core.rpc.tcp_frames import (
    FrameHeader,
    FrameKind,
    check_digest,
    decode_open,
    encode_message,
)
from cachelink_core.rpc.tcp_socket import FrameSocket
from cachelink_core.rpc.tcp_stream import TcpFrames
from cachelink_core.rpc.tcp_tickets import Tickets
from cachelink_core.rpc.tls import TlsFiles, server_context
from cachelink_core.rpc.transfer_types import Endpoint, PushReceipt
from cachelink_core.rpc.watchdog import Watchdog

_log = logging.getLogger(__name__)

_SPARE_CONNECTIONS: Final = 64
"""Connections beyond the slots: about to open, about to be told why not, or idle between handoffs."""

KEPT_S: Final = 60.0
"""How long an idle connection is kept for the next handoff of its sender."""

_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 64 * limits.MIB
"""A refused sender gets so long, and may still send so much, until it has read why."""


class TcpServer:
    """Listens beside the gRPC server.

    Attributes:
        port: the real one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: TlsFiles | None,
        handler: TransferHandler,
        slots: Slots,
        stall_s: float,
    ) -> None:
        """Binds; ``start`` takes connections.

        Args:
            host: interface, as that of the gRPC server.
            port: 0 for a free one.
            tls: as for the gRPC server; None for plain sockets.
            handler: takes the streams.
            slots: of transfers, shared with the gRPC server.
            stall_s: how long a stream may be silent.

        Raises:
            ConfigError: the address cannot be bound, or a TLS file is missing.
        """
        self._context = None if tls is None else server_context(tls)
        self._handler = handler
        self._slots = slots
        self._stall_s = stall_s
        self._tickets = Tickets()
        self._room = threading.BoundedSemaphore(slots.limit + _SPARE_CONNECTIONS)
        self._lock = threading.Lock()
        self._streams: set[_Stream] = set()
        self._stopping = threading.Event()
        self._listener = _bind(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="tcp-plane", daemon=True)

    def offer(self, handoff_id: str, tenant: str) -> Endpoint:
        """The endpoint for one admitted handoff; the sender knows the host already."""
        return Endpoint("tcp", f":{self.port}", self._tickets.issue(handoff_id, tenant))

    def start(self) -> None:
        """Takes connections."""
        self._thread.start()

    def stop(self) -> None:
        """Ends every stream at once; a second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        # A blocked accept does not notice a close; it does notice this.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("the listener was not connected")
        self._listener.close()
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            if not stream.installed:  # else it is about to send its receipt
                stream.shutdown()
        for stream in streams:
            stream.join(limits.CONNECT_DEADLINE_S)
        if self._thread.is_alive():
            self._thread.join(limits.CONNECT_DEADLINE_S)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._stopping.wait(0.1):  # out of descriptors, perhaps: not in a circle
                    return
                continue
            if not self._make_room():
                connection.close()
                continue
            self._begin(_Stream(self, connection, f"{peer[0]}:{peer[1]}"), connection)

    def _begin(self, stream: _Stream, connection: socket.socket) -> None:
        with self._lock:
            self._streams.add(stream)
        try:
            stream.start()
        except RuntimeError as error:  # no more threads: this connection is lost, not the plane
            _log.warning("no thread for a data connection of %s: %s", stream.peer, error)
            self._end(stream, connection)
        if self._stopping.is_set():  # it came after the streams were ended
            stream.shutdown()

    def _make_room(self) -> bool:
        """Room for one more connection, if need be that of an idle one."""
        if self._room.acquire(blocking=False):
            return True
        with self._lock:
            idle = sorted((stream.idle_since_s, id(stream), stream) for stream in self._streams)
        for since_s, _, stream in idle:
            if since_s and stream.claim():
                stream.shutdown()
                return self._room.acquire(timeout=_LINGER_S)
        return False

    def _serve(self, stream: _Stream, connection: socket.socket) -> None:
        """One connection, in its own thread."""
        try:
            self._converse(stream, connection)
        except (CacheLinkError, OSError) as error:
            _log.info("a data connection of %s failed: %s", stream.peer, error)
        except Exception:  # noqa: BLE001 - the end of a thread: logged, or lost
            _log.exception("a data connection of %s failed", stream.peer)
        finally:
            self._end(stream, connection)

    def _end(self, stream: _Stream, connection: socket.socket) -> None:
        connection.close()
        if stream.link is not None:  # another object under TLS
            stream.link.close()
        with self._lock:
            self._streams.discard(stream)
        self._room.release()

    def _converse(self, stream: _Stream, connection: socket.socket) -> None:
        if self._context is not None:
            connection = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        link = stream.link = FrameSocket(connection)
        while (opened := self._opened(stream, link)) is not None:
            receipt = self._taken(stream, link, *opened)
            if receipt is None:
                return
            # Its slot is free by now: whoever has the receipt may begin the next handoff at once.
            link.send(encode_message(FrameKind.RECEIPT, convert.push_receipt_to(receipt)))
            stream.rest()

    def _opened(self, stream: _Stream, link: FrameSocket) -> tuple[Open, str] | None:
        """What the next handoff begins with, and its tenant; None when there is none."""
        idle = stream.idle_since_s > 0
        if idle and (self._stopping.is_set() or not link.wait(KEPT_S) or not stream.begin()):
            return None
        # One limit for all of it: a peer without a ticket must not hold its place by dripping bytes.
        with Watchdog(limits.CONNECT_DEADLINE_S, link.end_reading) as guard:
            guard.arm()
            try:
                if not stream.served:
                    link.handshake()
                header = link.read_header()
                if header is None and stream.served:
                    return None
                opening = _opening(link, header)
                tenant = self._tickets.redeem(opening.handoff_id, opening.ticket)
            except CacheLinkError as error:
                _refuse(link, error)
                return None
        return Open(opening.handoff_id, opening.receiver_epoch), tenant

    def _taken(
        self, stream: _Stream, link: FrameSocket, opening: Open, tenant: str
    ) -> PushReceipt | None:
        """Takes one handoff; None if it was refused."""
        try:
            with (
                self._slots.take(),
                # Reading alone is ended, so that the sender can still be told why.
                Watchdog(self._stall_s, link.end_reading, stream.ended) as watchdog,
            ):
                frames = TcpFrames(link, opening, watchdog, self._stall_s)
                stream.frames = frames
                call = Call(tenant, self._stopping.is_set, stream.peer)
                receipt = self._handler.push(frames, call)
                stream.installed = True
                return receipt
        except CacheLinkError as error:
            _refuse(link, error)
        except Exception:  # noqa: BLE001 - the boundary: logged here, the peer gets no details
            _log.exception("unexpected error in a data connection")
            _refuse(link, InternalError("a bug in this daemon; its log has the details"))
        return None


def _opening(link: FrameSocket, header: FrameHeader | None) -> TransferOpen:
    """The open that a stream must begin with.

    Raises:
        CacheLinkError: it begins with something else, or is malformed.
    """
    if header is None or header.kind is not FrameKind.OPEN:
        what = "nothing" if header is None else header.kind.name.lower()
        raise RemoteProtocolError(f"the stream began with {what}, not with open")
    payload = link.read_payload(header)
    check_digest(header, payload)
    return decode_open(payload)


class _Stream(threading.Thread):
    """The thread of one connection."""

    def __init__(self, server: TcpServer, connection: socket.socket, peer: str) -> None:
        super().__init__(name="tcp-stream", daemon=True)
        self.peer = peer
        self.link: FrameSocket | None = None
        self.frames: TcpFrames | None = None
        self.installed = False
        self.served = False
        self.idle_since_s = 0.0
        self._claimed = False
        self._lock = threading.Lock()
        self._server = server
        self._connection = connection

    def run(self) -> None:
        """Serves it."""
        self._server._serve(self, self._connection)  # noqa: SLF001 - its other half

    def rest(self) -> None:
        """Its handoff is over; the connection waits for the next one."""
        self.frames, self.installed, self.served = None, False, True
        self.idle_since_s = time.monotonic()

    def begin(self) -> bool:
        """A handoff may begin; False if the connection was claimed meanwhile."""
        with self._lock:
            if not self._claimed:
                self.idle_since_s = 0.0
            return not self._claimed

    def claim(self) -> bool:
        """Takes the place of an idle connection; False if a handoff has just begun on it."""
        with self._lock:
            self._claimed = bool(self.idle_since_s)
            return self._claimed

    def ended(self) -> bool:
        """Asked by the watchdog."""
        return self.frames is not None and self.frames.ended()

    def shutdown(self) -> None:
        """Ends it, from any thread."""
        if self.link is not None:
            self.link.shutdown()
            return
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("a connection ended by itself")


def _refuse(link: FrameSocket, error: CacheLinkError) -> None:
    """Sends the reason, and waits until the peer has had the chance to read it."""
    try:
        link.set_timeout(_LINGER_S)
        link.send(encode_message(FrameKind.ERROR, to_info(error)))
        link.end_writing()
        link.discard(_LINGER_BYTES, _LINGER_S)
    except PeerGone as gone:
        _log.info("the reason could not be sent (%s): %s", gone, error)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_SPARE_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(f"data address {host}:{port} cannot be bound: {error}") from error
    return listener
