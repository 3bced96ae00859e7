"""A connection of the plane ``tcp``: whole frames in and out, plain or under TLS.

Plain sockets gather and scatter in the kernel: a chunk goes from the sender's cache to the receiver's
with no copy in either process. TLS has to encrypt, so there each view is written and read by itself.

The socket blocks without a timeout, which costs no extra system call; whoever must not wait forever
has a watchdog that calls ``shutdown``, which ends any call at once.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Final

from cachelink_core.errors import PeerGone
from cachelink_core.rpc.tcp_frames import HEADER_BYTES, FrameHeader, Outgoing, decode_header

_MOST_VECTORS: Final = 1024
"""IOV_MAX of Linux: views that one system call takes."""

_KEEPALIVE: Final = (
    ("TCP_KEEPIDLE", 20),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 2),
    ("TCP_USER_TIMEOUT", 30_000),
)
"""A peer that died silently is noticed after 30 s, idle or not. Where the system has the option."""


class FrameSocket:
    """Frames over one connected socket. One thread reads, one writes; any may shut it down."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over a connected socket."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection
        self._secured = isinstance(connection, ssl.SSLSocket)
        self._header = bytearray(HEADER_BYTES)
        self._early = 0
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def send(self, frame: Outgoing) -> None:
        """Writes a whole frame.

        Raises:
            PeerGone: the connection broke, or was shut down.
        """
        try:
            if self._secured:
                self._socket.sendall(frame.header)
                for part in frame.parts:
                    self._socket.sendall(part)
            else:
                self._send_vectors([memoryview(part) for part in (frame.header, *frame.parts)])
        except OSError as error:
            raise PeerGone(f"the connection broke while sending: {error}") from error

    def read_header(self) -> FrameHeader | None:
        """The next frame's fixed part; None if the peer has ended the connection before it.

        Raises:
            PeerGone: the connection broke.
            RemoteProtocolError: what came is no frame.
            WrongLength: the frame is larger than its kind may be.
        """
        early, self._early = self._early, 0
        if not self._read([memoryview(self._header)[early:]], ending=not early):
            return None
        return decode_header(self._header)

    def read(self, views: Sequence[memoryview]) -> None:
        """Fills writable views, one after the other.

        Raises:
            PeerGone: the connection ended or broke before they were full.
        """
        self._read(views, ending=False)

    def read_payload(self, header: FrameHeader) -> bytes:
        """A payload in memory of its own.

        Raises:
            PeerGone: as ``read``.
        """
        data = bytearray(header.payload_bytes)
        self._read([memoryview(data)], ending=False)
        return bytes(data)

    def peer_spoke(self) -> bool:
        """Whether there is something to read, without waiting: in mid-stream it can only be an end."""
        if self._early:
            return True
        if not isinstance(self._socket, ssl.SSLSocket):
            return bool(self._readable.poll(0))
        return self._socket.pending() > 0 or (bool(self._readable.poll(0)) and self._read_early())

    def _read_early(self) -> bool:
        """Whether what came under TLS is data, or an end: it may be TLS's own, such as a ticket."""
        self._socket.settimeout(0.0)
        try:
            self._early = self._socket.recv_into(memoryview(self._header))
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(None)
        return True

    def handshake(self) -> None:
        """TLS's handshake, if it is still to be made; a server makes it when it is watched.

        Raises:
            PeerGone: the peer has no part in it, or did not get to its end.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.do_handshake()
            except OSError as error:
                raise PeerGone(f"no TLS: {error}") from error

    def wait(self, seconds: float) -> bool:
        """Waits until the peer says something or ends; False if it did neither."""
        return self.peer_spoke() or bool(self._readable.poll(seconds * 1000))

    def set_timeout(self, seconds: float | None) -> None:
        """Bounds each read and write from now on; None for no bound."""
        self._socket.settimeout(seconds)

    def end_writing(self) -> None:
        """Says that nothing more will come."""
        self._quietly(socket.SHUT_WR)

    def end_reading(self) -> None:
        """Ends every read under way, from any thread; writing still works."""
        self._quietly(socket.SHUT_RD)

    def discard(self, most_bytes: int, most_s: float) -> None:
        """Reads and forgets until the peer ends, so many bytes have come, or that time has passed.

        A socket that is closed while bytes lie unread resets the connection, and the peer then loses
        what it has not read yet: the error frame that says why.
        """
        waste, until_s = bytearray(1 << 16), time.monotonic() + most_s
        try:
            while most_bytes > 0 and time.monotonic() < until_s:
                count = self._socket.recv_into(waste)
                if not count:
                    return
                most_bytes -= count
        except OSError:
            return

    def shutdown(self) -> None:
        """Ends every read and write under way, from any thread."""
        self._quietly(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it; a second call does nothing."""
        self._socket.close()

    def _quietly(self, how: int) -> None:
        try:
            # Not SSLSocket.shutdown: it takes the TLS state away from under the thread that reads.
            socket.socket.shutdown(self._socket, how)
        except OSError:
            return

    def _send_vectors(self, pending: list[memoryview]) -> None:
        while pending:
            sent = self._socket.sendmsg(pending[:_MOST_VECTORS])
            pending = _behind(pending, sent)

    def _read(self, views: Sequence[memoryview], *, ending: bool) -> bool:
        """Fills ``views``; False if the connection ended before the first byte and ``ending`` allows."""
        pending, begun = [view for view in views if view.nbytes], False
        while pending:
            try:
                count = self._read_some(pending)
            except OSError as error:
                raise PeerGone(f"the connection broke while receiving: {error}") from error
            if not count:
                if ending and not begun:
                    return False
                raise PeerGone("the connection ended inside a frame")
            begun = True
            pending = _behind(pending, count)
        return True

    def _read_some(self, pending: list[memoryview]) -> int:
        # Not MSG_WAITALL: the kernel then wakes the reader late, and the window stays closed.
        if self._secured or len(pending) == 1:
            return self._socket.recv_into(pending[0])
        return self._socket.recvmsg_into(pending[:_MOST_VECTORS])[0]


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` behind their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view.cast("B")[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []
