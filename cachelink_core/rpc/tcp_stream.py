"""The receiver's view of one handoff on the plane ``tcp``: an iterator of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cachelink_core.errors import LinkTimeout, PeerGone, RemoteProtocolError
from cachelink_core.handoff.events import Chunk, Open
from cachelink_core.rpc.handlers import Frame, Place
from cachelink_core.rpc.tcp_frames import (
    FrameHeader,
    FrameKind,
    check_digest,
    decode_commit,
    decode_open,
)
from cachelink_core.rpc.tcp_socket import FrameSocket
from cachelink_core.rpc.watchdog import Watchdog


class TcpFrames:
    """The frames of one stream, as ``TransferHandler.push`` takes them."""

    def __init__(
        self, link: FrameSocket, opening: Open, watchdog: Watchdog, stall_s: float
    ) -> None:
        self._link = link
        self._opening: Open | None = opening
        self._watchdog = watchdog
        self._stall_s = stall_s
        self._place: Place | None = None
        self._ended: Callable[[], bool] = _never
        self._scratch = bytearray()

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        """The next frame.

        Raises:
            StopIteration: the peer ended the connection between two frames.
            CacheLinkError: as ``TransferHandler.push`` describes.
        """
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return opening
        self._watchdog.arm()
        try:
            return self._frame(self._next_header())
        except PeerGone:
            if self._watchdog.stalled:
                raise LinkTimeout(f"no frame came for {self._stall_s:g} s") from None
            raise
        finally:
            self._watchdog.disarm()

    def _next_header(self) -> FrameHeader:
        header = self._link.read_header()
        if header is not None:
            return header
        if self._watchdog.stalled or self._ended():
            raise PeerGone("reading was ended here")
        raise StopIteration

    def place_with(self, place: Place, ended: Callable[[], bool]) -> None:
        """See ``PlacingFrames``."""
        self._place, self._ended = place, ended

    def ended(self) -> bool:
        """Whether the handoff has ended by another way, so that nobody waits for its frames."""
        return self._ended()

    def _frame(self, header: FrameHeader) -> Frame:
        if header.kind is FrameKind.CHUNK:
            return self._chunk(header)
        payload = self._link.read_payload(header)
        check_digest(header, payload)
        if header.kind is FrameKind.COMMIT:
            return decode_commit(payload)
        if header.kind is FrameKind.OPEN:
            opening = decode_open(payload)
            return Open(opening.handoff_id, opening.receiver_epoch)
        raise RemoteProtocolError(f"a sender sent a frame of kind {header.kind.name.lower()}")

    def _chunk(self, header: FrameHeader) -> Chunk:
        placed = self._placed(header)
        if placed:
            self._link.read(placed)
            return Chunk(header.block, header.run, memoryview(b""), header.digest, tuple(placed))
        if len(self._scratch) < header.payload_bytes:
            self._scratch = bytearray(header.payload_bytes)
        payload = memoryview(self._scratch)[: header.payload_bytes]
        self._link.read([payload])
        return Chunk(header.block, header.run, payload, header.digest)

    def _placed(self, header: FrameHeader) -> Sequence[memoryview]:
        if self._place is None:
            return ()
        return self._place(header.block, header.run, header.payload_bytes)


def _never() -> bool:
    return False
