"""Handlers of ``handlers`` as gRPC services: conversion, slots, cancellation and error mapping.

Every method runs inside ``_serving``, which turns whatever a handler raises into a status; gRPC's own
exceptions of an aborted context pass through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from cachelink_core import limits
from cachelink_core.errors import ChecksumMismatch, LinkTimeout, PeerGone
from cachelink_core.manifest import digest
from cachelink_core.rpc import convert, convert_node, convert_transfer
from cachelink_core.rpc.auth import Tokens
from cachelink_core.rpc.frames import decode_frame
from cachelink_core.rpc.handlers import (
    Call,
    Frame,
    NodeHandler,
    SenderHandler,
    TransferHandler,
)
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2, sender_pb2, transfer_pb2
from cachelink_core.rpc.pb.cachelink.v1.receiver_pb2_grpc import ReceiverServiceServicer
from cachelink_core.rpc.pb.cachelink.v1.sender_pb2_grpc import SenderServiceServicer
from cachelink_core.rpc.slots import Slots
from cachelink_core.rpc.status import abort
from cachelink_core.rpc.tcp_server import TcpServer
from cachelink_core.rpc.watchdog import Watchdog

TRANSFER_SERVICE: Final = "cachelink.v1.TransferService"


@dataclass(frozen=True, slots=True)
class Gate:
    """What every service of a daemon shares.

    Attributes:
        tokens: whose calls are let in.
        transfers: slots of streams and handoffs.
        answers: slots of answers.
        stall_s: how long a stream may be silent.
    """

    tokens: Tokens
    transfers: Slots
    answers: Slots
    stall_s: float = limits.STALL_DEADLINE_S

    def call(self, context: grpc.ServicerContext) -> Call:
        """The call as a handler sees it."""
        ended = threading.Event()
        # Never is_active(): it stays true after a disconnect that nobody has noticed yet.
        if not context.add_callback(ended.set):
            ended.set()
        return Call(self.tokens.tenant_of(context), ended.is_set, context.peer())


class NodeAdapter:
    """The methods that both node services have."""

    def __init__(self, handler: NodeHandler, gate: Gate) -> None:
        self._handler = handler
        self._gate = gate

    def Answer(  # noqa: N802 - the name in the proto
        self, request: common_pb2.AnswerRequest, context: grpc.ServicerContext
    ) -> Iterator[common_pb2.AnswerEvent]:
        """Streams one answer."""
        with _serving(context), self._gate.answers.take():
            asked = convert.answer_request_from(request)
            with _closing(self._handler.answer(asked, self._gate.call(context))) as events:
                for event in events:
                    yield convert.answer_event_to(event)

    def ListCaches(  # noqa: N802
        self, request: common_pb2.ListCachesRequest, context: grpc.ServicerContext
    ) -> common_pb2.ListCachesResponse:
        """Lists the tenant's caches."""
        del request
        with _serving(context):
            return convert_node.cache_list_to(self._handler.caches(self._gate.call(context)))

    def EvictCache(  # noqa: N802
        self, request: common_pb2.EvictCacheRequest, context: grpc.ServicerContext
    ) -> common_pb2.EvictCacheResponse:
        """Evicts one."""
        with _serving(context):
            freed_bytes = self._handler.evict(request.cache_id, self._gate.call(context))
            return common_pb2.EvictCacheResponse(freed_bytes=freed_bytes)

    def GetNodeInfo(  # noqa: N802
        self, request: common_pb2.GetNodeInfoRequest, context: grpc.ServicerContext
    ) -> common_pb2.GetNodeInfoResponse:
        """Says what this node is."""
        del request
        with _serving(context):
            return convert_node.node_info_to(self._handler.info(self._gate.call(context)))


class ReceiverAdapter(NodeAdapter, ReceiverServiceServicer):
    """``ReceiverService``."""


class SenderAdapter(NodeAdapter, SenderServiceServicer):
    """``SenderService``."""

    def __init__(self, handler: SenderHandler, gate: Gate) -> None:
        super().__init__(handler, gate)
        self._sender = handler

    def Handoff(  # noqa: N802
        self, request: sender_pb2.HandoffRequest, context: grpc.ServicerContext
    ) -> Iterator[sender_pb2.HandoffEvent]:
        """Streams the progress of one handoff."""
        with _serving(context), self._gate.transfers.take():
            asked = convert.handoff_request_from(request)
            with _closing(self._sender.handoff(asked, self._gate.call(context))) as events:
                for event in events:
                    yield convert.handoff_event_to(event)

    def Prefill(  # noqa: N802
        self, request: sender_pb2.PrefillRequest, context: grpc.ServicerContext
    ) -> Iterator[sender_pb2.HandoffEvent]:
        """Streams the progress of one prefill."""
        with _serving(context), self._gate.transfers.take():
            prefix = convert.prefix_from(request.prefix)
            with _closing(self._sender.prefill(prefix, self._gate.call(context))) as events:
                for event in events:
                    yield convert.handoff_event_to(event)


class TransferAdapter:
    """``TransferService``, with the stream's frames as raw bytes."""

    def __init__(self, handler: TransferHandler, gate: Gate, tcp: TcpServer | None = None) -> None:
        """Binds a handler; ``tcp`` is a plane to be offered beside this one."""
        self._handler = handler
        self._gate = gate
        self._tcp = tcp

    def service(self) -> Any:
        """The generic handler to register."""
        pb = transfer_pb2
        unary: dict[str, tuple[Callable[..., object], Any]] = {
            "Reserve": (self._reserve, pb.ReserveRequest),
            "GetHandoff": (self._status, pb.GetHandoffRequest),
            "Heartbeat": (self._heartbeat, pb.HeartbeatRequest),
            "Abort": (self._abort, pb.AbortRequest),
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialized)
            for name, (method, request) in unary.items()
        }
        methods["PushChunks"] = grpc.stream_unary_rpc_method_handler(
            self._push, response_serializer=_serialized
        )
        return grpc.method_handlers_generic_handler(TRANSFER_SERVICE, methods)

    def _reserve(
        self, request: transfer_pb2.ReserveRequest, context: grpc.ServicerContext
    ) -> transfer_pb2.ReserveResponse:
        # Allocating takes time too: without a slot, many offers would hold all control threads.
        with _serving(context), self._gate.transfers.take():
            _check_digest(request)
            call = self._gate.call(context)
            reservation = self._handler.reserve(request.manifest, call)
            if self._tcp is not None and not reservation.already_installed:
                faster = self._tcp.offer(reservation.handoff_id, call.tenant)
                reservation = replace(reservation, endpoints=(faster, *reservation.endpoints))
            return convert_transfer.reservation_to(reservation)

    def _push(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> transfer_pb2.PushChunksResponse:
        with (
            _serving(context),
            self._gate.transfers.take(),
            Watchdog(self._gate.stall_s, context.cancel) as watchdog,
        ):
            frames = _frames(requests, watchdog, self._gate.stall_s)
            receipt = self._handler.push(frames, self._gate.call(context))
            return convert_transfer.push_receipt_to(receipt)

    def _status(
        self, request: transfer_pb2.GetHandoffRequest, context: grpc.ServicerContext
    ) -> transfer_pb2.GetHandoffResponse:
        with _serving(context):
            call = self._gate.call(context)
            return convert_transfer.status_to(self._handler.status(request.handoff_id, call))

    def _heartbeat(
        self, request: transfer_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> transfer_pb2.HeartbeatResponse:
        with _serving(context):
            lease_s = self._handler.heartbeat(
                request.handoff_id, request.receiver_epoch, self._gate.call(context)
            )
            return transfer_pb2.HeartbeatResponse(lease_s=lease_s)

    def _abort(
        self, request: transfer_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> transfer_pb2.AbortResponse:
        with _serving(context):
            freed_bytes = self._handler.abort(
                request.handoff_id, request.why, self._gate.call(context)
            )
            return transfer_pb2.AbortResponse(freed_bytes=freed_bytes)


def _frames(requests: Iterator[bytes], watchdog: Watchdog, stall_s: float) -> Iterator[Frame]:
    """Decoded frames; the watchdog runs while the peer is waited for, not while frames are used."""
    while True:
        watchdog.arm()
        try:
            data = next(requests)
        except (StopIteration, grpc.RpcError) as ended:
            # A call that is cancelled here ends its requests in either way: it is a race.
            if watchdog.stalled:
                raise LinkTimeout(f"no frame came for {stall_s:g} s") from None
            if isinstance(ended, StopIteration):
                return
            raise PeerGone(
                "the stream broke: its sender died, gave up or ran out of time"
            ) from None
        finally:
            watchdog.disarm()
        yield decode_frame(data)


def _check_digest(request: transfer_pb2.ReserveRequest) -> None:
    actual = digest(request.manifest)
    if actual != request.manifest_digest:
        raise ChecksumMismatch(
            f"manifest: digest {actual.hex()}, claimed {request.manifest_digest.hex()}"
        )


@contextmanager
def _serving(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call with the status of whatever its handler raises."""
    try:
        yield
    except GeneratorExit:  # the call ended while its answer was being sent
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: logged there, or sent to the peer
        abort(context, error)


def _closing(events: Iterator[Any]) -> AbstractContextManager[Iterator[Any]]:
    """Closes a generator at the end of its call, however that comes."""
    return closing(events)  # type: ignore[type-var]


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
