"""The sending end of the data plane, synchronous.

One channel, one stream a handoff. Every call has a deadline, and a stream has a watchdog besides: a
deadline alone does not end a call whose bytes are stuck in a socket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

import grpc

from cachelink_core import limits
from cachelink_core.errors import HandoffAborted, LinkError, LinkTimeout, LocalProtocolError
from cachelink_core.manifest import digest
from cachelink_core.rpc import convert_node
from cachelink_core.rpc import convert_transfer as convert
from cachelink_core.rpc.auth import bearer
from cachelink_core.rpc.channel import KEEPALIVE, Keepalive, open_channel, wait_until_ready
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.rpc.pb.cachelink.v1.receiver_pb2_grpc import ReceiverServiceStub
from cachelink_core.rpc.pb.cachelink.v1.transfer_pb2_grpc import TransferServiceStub
from cachelink_core.rpc.status import error_from
from cachelink_core.rpc.tcp_client import IdleConnections
from cachelink_core.rpc.tls import TlsFiles, client_context
from cachelink_core.rpc.transfer_types import HandoffStatus, PushReceipt, Reservation
from cachelink_core.rpc.types import NodeInfo
from cachelink_core.rpc.watchdog import Watchdog

PUSH_METHOD: Final = "/cachelink.v1.TransferService/PushChunks"


def push_deadline_s(wire_bytes: int, expected_bytes_per_s: float) -> float:
    """How long a stream of known size may take."""
    return limits.PUSH_BASE_DEADLINE_S + wire_bytes / (
        limits.PUSH_RATE_SHARE * expected_bytes_per_s
    )


class TransferClient:
    """Calls one receiver's ``TransferService``. Threads may share it; it is a context manager.

    Attributes:
        address: as given.
        tls: for connections of the plane ``tcp``; made once, so that a file that is gone later is no
            matter.
        connections: idle ones of the plane ``tcp``, for ``open_plane``.
        tcp_retry_at_s: until then, monotonic, the plane ``tcp`` is not tried; set by ``open_plane``.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None = None,
        token: str | None = None,
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        """Opens the channel; it connects on the first call.

        Args:
            address: ``host:port``.
            tls: None for plaintext.
            token: bearer token of this sender at that receiver.
            keepalive: when a silent receiver is given up.

        Raises:
            ConfigError: a TLS file is missing.
        """
        self.address = address
        self.tls = None if tls is None else client_context(tls)
        self.tcp_retry_at_s = 0.0
        self.connections = IdleConnections()
        self._metadata = bearer(token)
        # After a failure of the link the next Reserve waits for a new connection, so that a
        # receiver which was restarted is found again; while all is well it costs no round trip.
        self._connected = False
        self._channel = open_channel(address, tls, data=True, keepalive=keepalive)
        self._stub = TransferServiceStub(self._channel)
        self._node = ReceiverServiceStub(self._channel)
        # No serializer: frames are bytes already, and the hot path stays free of protobuf.
        self._push: Any = self._channel.stream_unary(
            PUSH_METHOD, response_deserializer=pb.PushChunksResponse.FromString
        )

    def reserve(
        self, header: bytes, *, deadline_s: float = limits.CONTROL_DEADLINE_S
    ) -> Reservation:
        """Offers a handoff.

        Args:
            header: canonical msgpack of the manifest's header.
            deadline_s: for the receiver to check it and to allocate the destination.

        Raises:
            PeerGone: no connection within ``limits.CONNECT_DEADLINE_S``.
            CacheLinkError: the receiver's refusal, as its own class.
        """
        self._connect()
        request = pb.ReserveRequest(manifest=header, manifest_digest=digest(header))
        return convert.reservation_from(self._unary(self._stub.Reserve, request, deadline_s))

    def push(
        self,
        frames: Iterator[bytes],
        *,
        deadline_s: float,
        stall_s: float = limits.STALL_DEADLINE_S,
        on_stall: Callable[[], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> PushReceipt:
        """Streams one handoff and waits for its receipt.

        ``frames`` is advanced on a thread of gRPC, one frame at a time and only as fast as the
        receiver takes them. When this method raises, that thread may still wait in ``frames``: the
        caller makes it end.

        Args:
            frames: of ``frames.encode_open``, ``encode_chunk`` and ``encode_commit``.
            deadline_s: for all of it; ``push_deadline_s`` for a cache that is ready.
            stall_s: how long the receiver may take none of the frames offered.
            on_stall: called when it did.
            cancelled: asked ten times a second; the stream is cancelled when it says so.

        Raises:
            LinkTimeout: the deadline passed, or no frame was taken for ``stall_s``.
            HandoffAborted: ``cancelled`` said so.
            PeerGone: the connection broke.
            CacheLinkError: the receiver's refusal, as its own class.
            Exception: what ``frames`` raised, as it was.
        """
        stream = _Stream(self._push, frames, self._metadata, deadline_s)
        with Watchdog(stall_s, stream.cancel, cancelled) as watchdog:
            reply = stream.run(watchdog)
        if watchdog.stalled and on_stall is not None:
            on_stall()
        if isinstance(reply, pb.PushChunksResponse):
            return convert.push_receipt_from(reply)
        if stream.failure is not None:
            raise stream.failure
        self._connected = False
        if watchdog.stalled:
            raise LinkTimeout(f"{self.address} took no frame for {stall_s:g} s")
        if watchdog.cancelled:
            raise HandoffAborted("given up by its caller")
        raise error_from(reply) from reply

    def node_info(self, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> NodeInfo:
        """What the receiver is, what it measured, and how busy it is.

        Raises:
            PeerGone: no connection within ``limits.CONNECT_DEADLINE_S``.
            CacheLinkError: the call failed.
        """
        self._connect()
        request = common_pb2.GetNodeInfoRequest()
        return convert_node.node_info_from(self._unary(self._node.GetNodeInfo, request, deadline_s))

    def status(
        self, handoff_id: str, *, deadline_s: float = limits.CONTROL_DEADLINE_S
    ) -> HandoffStatus:
        """Where a handoff stands, and which of its blocks are verified.

        Raises:
            CacheLinkError: the call failed.
        """
        request = pb.GetHandoffRequest(handoff_id=handoff_id)
        return convert.status_from(self._unary(self._stub.GetHandoff, request, deadline_s))

    def heartbeat(
        self,
        handoff_id: str,
        receiver_epoch: str,
        *,
        deadline_s: float = limits.CONTROL_DEADLINE_S,
    ) -> float:
        """Renews a lease; returns its seconds.

        Raises:
            StaleEpoch: the receiver was restarted since Reserve.
            CacheLinkError: the call failed.
        """
        request = pb.HeartbeatRequest(handoff_id=handoff_id, receiver_epoch=receiver_epoch)
        lease_s: float = self._unary(self._stub.Heartbeat, request, deadline_s).lease_s
        return lease_s

    def abort(
        self, handoff_id: str, why: str = "", *, deadline_s: float = limits.CONTROL_DEADLINE_S
    ) -> int:
        """Gives a handoff up; returns the bytes that the receiver freed.

        Raises:
            CacheLinkError: the call failed.
        """
        request = pb.AbortRequest(handoff_id=handoff_id, why=why)
        freed_bytes: int = self._unary(self._stub.Abort, request, deadline_s).freed_bytes
        return freed_bytes

    def close(self) -> None:
        """Closes the channel and idle connections; running calls end with PeerGone."""
        self.connections.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self) -> None:
        if not self._connected:
            wait_until_ready(self._channel, self.address, limits.CONNECT_DEADLINE_S)

    def _unary(self, method: Any, request: object, deadline_s: float) -> Any:
        try:
            reply = method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            failure = error_from(error)
            self._connected = not isinstance(failure, LinkError)
            raise failure from error
        self._connected = True
        return reply


class _Stream:
    """One running PushChunks.

    Attributes:
        failure: what the frames raised. gRPC would log it and report only UNKNOWN, so it is kept
            here and the call is cancelled.
    """

    def __init__(
        self, method: Any, frames: Iterator[bytes], metadata: Any, deadline_s: float
    ) -> None:
        self.failure: BaseException | None = None
        self._method = method
        self._frames = frames
        self._metadata = metadata
        self._deadline_s = deadline_s
        self._call: Any = None
        self._started = threading.Event()

    def run(self, watchdog: Watchdog) -> Any:
        """Runs it to its end; returns the reply, or the ``grpc.RpcError`` in its place."""
        self._call = self._method.future(
            self._taken(watchdog), timeout=self._deadline_s, metadata=self._metadata
        )
        self._started.set()
        try:
            return self._call.result()
        except grpc.FutureCancelledError:
            return self._call
        except grpc.RpcError as error:
            return error

    def cancel(self) -> None:
        """Ends it, from any thread."""
        if self._started.wait(limits.CONNECT_DEADLINE_S):
            self._call.cancel()

    def _taken(self, watchdog: Watchdog) -> Iterator[bytes]:
        """The frames, watched: gRPC asks for the next one when it has taken the last."""
        try:
            for frame in self._frames:
                watchdog.arm()
                yield _only_bytes(frame)
                watchdog.disarm()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.failure = error
            self.cancel()


def _only_bytes(frame: object) -> bytes:
    """Refuses a bytearray or a view: gRPC hangs on those until the deadline, then raises KeyError."""
    if type(frame) is not bytes:
        raise LocalProtocolError(f"a frame is {type(frame).__name__}, not bytes")
    return frame


__all__ = ["TransferClient", "push_deadline_s"]
