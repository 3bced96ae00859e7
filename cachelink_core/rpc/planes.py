"""The data planes of a sender: how the frames of one handoff look, and who carries them.

``grpc`` is the channel of the control calls, and always there. ``tcp`` is faster, and taken where the
receiver offers it, the sender's operator allows it and a connection can be had.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Protocol

from cachelink_core import limits
from cachelink_core.errors import Denied, PeerGone
from cachelink_core.manifest import Seal
from cachelink_core.rpc import frames, tcp_frames
from cachelink_core.rpc.tcp_client import TcpPush
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.transfer_types import Endpoint, PushReceipt, Reservation, Scheme

_log = logging.getLogger(__name__)

RETRY_S: Final = 60.0
"""A plane that could not be reached (a firewall, most likely) is left alone for so long: each try may
cost ``limits.CONNECT_DEADLINE_S``."""


class Framing(Protocol):
    """How one plane writes its frames.

    Attributes:
        in_place: whether it sends views where they lie; otherwise it copies them.
    """

    in_place: bool

    def open(self, handoff_id: str, receiver_epoch: str) -> Any:
        """The first frame."""

    def chunk(
        self, block: int, run: int, digest: bytes, parts: Sequence[memoryview | bytes]
    ) -> Any:
        """One chunk."""

    def commit(self, seal: Seal) -> Any:
        """The last frame."""


class GrpcFraming:
    """Frames as gRPC takes them: ``bytes``."""

    in_place = False

    def open(self, handoff_id: str, receiver_epoch: str) -> bytes:
        """See ``frames.encode_open``."""
        return frames.encode_open(handoff_id, receiver_epoch)

    def chunk(
        self, block: int, run: int, digest: bytes, parts: Sequence[memoryview | bytes]
    ) -> bytes:
        """See ``frames.encode_chunk``."""
        return frames.encode_chunk(block, run, digest, parts)

    def commit(self, seal: Seal) -> bytes:
        """See ``frames.encode_commit``."""
        return frames.encode_commit(seal)


class TcpFraming:
    """Frames of the plane ``tcp``."""

    in_place = True

    def __init__(self, ticket: bytes) -> None:
        """Binds the ticket of one reservation."""
        self._ticket = ticket

    def open(self, handoff_id: str, receiver_epoch: str) -> tcp_frames.Outgoing:
        """See ``tcp_frames.encode_open``."""
        return tcp_frames.encode_open(handoff_id, receiver_epoch, self._ticket)

    def chunk(
        self, block: int, run: int, digest: bytes, parts: Sequence[memoryview | bytes]
    ) -> tcp_frames.Outgoing:
        """See ``tcp_frames.encode_chunk``."""
        return tcp_frames.encode_chunk(block, run, digest, parts)

    def commit(self, seal: Seal) -> tcp_frames.Outgoing:
        """See ``tcp_frames.encode_commit``."""
        return tcp_frames.encode_commit(seal)


class Plane(Protocol):
    """Carries the frames of one handoff.

    Attributes:
        scheme: which one it is.
        framing: of the frames that ``push`` takes.
    """

    scheme: Scheme
    framing: Framing

    def push(
        self, frames: Iterator[Any], *, deadline_s: float, cancelled: Callable[[], bool]
    ) -> PushReceipt:
        """Sends them and waits for the receipt; errors as ``TransferClient.push``."""

    def close(self) -> None:
        """Frees what it holds."""


class GrpcPlane:
    """The channel of the control calls."""

    scheme: Scheme = "grpc"

    def __init__(self, client: TransferClient) -> None:
        """Binds the client; it stays the caller's."""
        self.framing: Framing = GrpcFraming()
        self._client = client

    def push(
        self, frames: Iterator[Any], *, deadline_s: float, cancelled: Callable[[], bool]
    ) -> PushReceipt:
        """See ``TransferClient.push``."""
        return self._client.push(frames, deadline_s=deadline_s, cancelled=cancelled)

    def close(self) -> None:
        """Nothing: the channel is the client's."""


class TcpPlane:
    """A connection of its own, which the client keeps afterwards if it is still good."""

    scheme: Scheme = "tcp"

    def __init__(self, connection: TcpPush, ticket: bytes, client: TransferClient) -> None:
        """Takes over a connection."""
        self.framing: Framing = TcpFraming(ticket)
        self._connection = connection
        self._client = client

    def push(
        self, frames: Iterator[Any], *, deadline_s: float, cancelled: Callable[[], bool]
    ) -> PushReceipt:
        """See ``TcpPush.push``.

        A handoff that fails because of the plane is not begun anew here; the next one takes gRPC.
        """
        try:
            return self._connection.push(frames, deadline_s=deadline_s, cancelled=cancelled)
        except (PeerGone, Denied):
            # A receiver without room, or something on the way that leads to another one.
            self._client.tcp_retry_at_s = time.monotonic() + RETRY_S
            raise

    def close(self) -> None:
        """Gives the connection back, or closes it."""
        if self._connection.reusable:
            self._client.connections.keep(self._connection)
        else:
            self._connection.close()


def open_plane(
    client: TransferClient, reservation: Reservation, allowed: Collection[Scheme]
) -> Plane:
    """The first plane of the receiver's offer that is allowed and can be had.

    Args:
        client: of the receiver.
        reservation: with the endpoints on offer.
        allowed: by the sender's operator; ``grpc`` is taken when nothing else can be had.
    """
    offered = next((e for e in reservation.endpoints if e.scheme == "tcp"), None)
    if offered is None or "tcp" not in allowed or time.monotonic() < client.tcp_retry_at_s:
        return GrpcPlane(client)
    # Within the lease: what is left of it has to be enough for gRPC to begin.
    within_s = min(limits.CONNECT_DEADLINE_S, reservation.lease_s / 4)
    return _tcp(client, offered, within_s) or GrpcPlane(client)


def _tcp(client: TransferClient, endpoint: Endpoint, within_s: float) -> TcpPlane | None:
    kept = client.connections.take()
    if kept is not None:
        return TcpPlane(kept, endpoint.ticket, client)
    try:
        connection = TcpPush.connect(endpoint, client.address, client.tls, within_s)
    except PeerGone as error:
        client.tcp_retry_at_s = time.monotonic() + RETRY_S
        _log.warning("sending over grpc for the next %g s: %s", RETRY_S, error)
        return None
    return TcpPlane(connection, endpoint.ticket, client)
