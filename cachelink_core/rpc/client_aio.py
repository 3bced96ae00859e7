"""The asynchronous client, over ``grpc.aio``; import it from ``cachelink_core.rpc.client``.

It has the verbs of the synchronous one. It carries control calls and answers; chunks travel over
``transfer_client`` only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachelink_core import limits
from cachelink_core.codec_spec import Trust
from cachelink_core.errors import PeerGone
from cachelink_core.rpc import convert, convert_node
from cachelink_core.rpc.auth import bearer
from cachelink_core.rpc.channel import KEEPALIVE, Keepalive, open_aio_channel
from cachelink_core.rpc.client_sync import OnProgress
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2, sender_pb2
from cachelink_core.rpc.pb.cachelink.v1.receiver_pb2_grpc import ReceiverServiceStub
from cachelink_core.rpc.pb.cachelink.v1.sender_pb2_grpc import SenderServiceStub
from cachelink_core.rpc.status import error_from
from cachelink_core.rpc.tls import TlsFiles
from cachelink_core.rpc.types import (
    AnswerRequest,
    CacheList,
    Context,
    Delta,
    Final,
    HandoffRequest,
    NodeInfo,
    OnFailure,
    Policy,
    PrefixSource,
    Progress,
    Query,
    Receipt,
    Sampling,
)


class AsyncAnswer:
    """An answer as it is generated: ``async for`` over its deltas, then read ``final``.

    Attributes:
        final: how it ended; None while it runs, and after ``cancel``.
    """

    def __init__(self, call: Any) -> None:
        self.final: Final | None = None
        self._call = call
        self._cancelled = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self.final is not None or self._cancelled:
            raise StopAsyncIteration
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise error_from(error) from error
        if self._cancelled:
            raise StopAsyncIteration
        if message is grpc.aio.EOF:
            raise PeerGone("the answer ended without its final event")
        event = convert.answer_event_from(message)
        if isinstance(event, Delta):
            return event
        self.final = event
        raise StopAsyncIteration

    async def text(self) -> str:
        """Reads it to its end; returns the rest of its text.

        Raises:
            CacheLinkError: the call failed.
        """
        return "".join([delta.text async for delta in self])

    def cancel(self) -> None:
        """Stops it; the node stops within a token."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.final is None:
            self.cancel()


class _AsyncNodeClient:
    """What sender and receiver have in common. One event loop uses it; ``async with`` closes it."""

    make_stub: ClassVar[Any]
    """The generated stub of the service."""

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
            token: bearer token, if the daemon asks for one.
            keepalive: when a silent daemon is given up.

        Raises:
            ConfigError: a TLS file is missing.
        """
        self.address = address
        self._metadata = bearer(token)
        self._channel = open_aio_channel(address, tls, keepalive=keepalive)
        self._stub: Any = self.make_stub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def answer(
        self,
        context: Context,
        query: Query,
        *,
        sampling: Sampling | None = None,
        least_trust: Trust = "mapped",
        on_failure: OnFailure = "fail",
        keep: bool = False,
        wait_s: float | None = None,
        policy: Policy = "cache",
        max_error: float | None = None,
        deadline_s: float = limits.ANSWER_DEADLINE_S,
    ) -> AsyncAnswer:
        """Asks a question; arguments and errors as in ``ReceiverClient.answer``."""
        request = AnswerRequest(
            context,
            query,
            sampling or Sampling(),
            least_trust,
            on_failure,
            keep,
            wait_s,
            policy,
            max_error,
        )
        message = convert.answer_request_to(request)
        return AsyncAnswer(self._stub.Answer(message, timeout=deadline_s, metadata=self._metadata))

    async def caches(self, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> CacheList:
        """Caches of the caller's tenant, and the bytes of the store.

        Raises:
            CacheLinkError: the call failed.
        """
        request = common_pb2.ListCachesRequest()
        reply = await self._unary(self._stub.ListCaches, request, deadline_s)
        return convert_node.cache_list_from(reply)

    async def evict(self, cache_id: str, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> int:
        """Evicts a cache; returns the bytes freed at once.

        Raises:
            UnknownCache: there is none of that name.
            CacheLinkError: the call failed.
        """
        request = common_pb2.EvictCacheRequest(cache_id=cache_id)
        reply = await self._unary(self._stub.EvictCache, request, deadline_s)
        freed_bytes: int = reply.freed_bytes
        return freed_bytes

    async def ping(self, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> NodeInfo:
        """What the node is.

        Raises:
            CacheLinkError: the call failed.
        """
        request = common_pb2.GetNodeInfoRequest()
        reply = await self._unary(self._stub.GetNodeInfo, request, deadline_s)
        return convert_node.node_info_from(reply)

    async def health(
        self, service: str = "", *, deadline_s: float = limits.CONTROL_DEADLINE_S
    ) -> bool:
        """Whether the node, or one of its services by full name, takes work.

        Raises:
            CacheLinkError: the call failed.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await self._unary(self._health.Check, request, deadline_s)
        serving: bool = reply.status == health_pb2.HealthCheckResponse.SERVING
        return serving

    async def close(self) -> None:
        """Closes the channel; running calls end."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _unary(self, method: Any, request: object, deadline_s: float) -> Any:
        try:
            return await method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from(error) from error


class AsyncReceiverClient(_AsyncNodeClient):
    """Asks a receiver."""

    make_stub = ReceiverServiceStub


class AsyncSenderClient(_AsyncNodeClient):
    """Asks a sender, and has it hand over."""

    make_stub = SenderServiceStub

    async def handoff(
        self,
        prefix: PrefixSource,
        receiver: str,
        *,
        codec: str = "",
        stream: bool = True,
        lease_s: float | None = None,
        mapper: str = "",
        least_trust: Trust = "mapped",
        max_error: float | None = None,
        questions: int = 1,
        on_progress: OnProgress | None = None,
        deadline_s: float = limits.HANDOFF_DEADLINE_S,
    ) -> Receipt:
        """Hands a prefix over; arguments and errors as in ``SenderClient.handoff``."""
        request = HandoffRequest(
            prefix, receiver, codec, stream, lease_s, mapper, least_trust, max_error, questions
        )
        return await _receipt(self.handoff_events(request, deadline_s=deadline_s), on_progress)

    def handoff_events(
        self, request: HandoffRequest, *, deadline_s: float = limits.HANDOFF_DEADLINE_S
    ) -> AsyncIterator[Progress | Receipt]:
        """The same as an iterator; the last item is the receipt.

        Raises:
            CacheLinkError: the handoff failed.
        """
        return self._events(self._stub.Handoff, convert.handoff_request_to(request), deadline_s)

    async def prefill(
        self,
        prefix: PrefixSource,
        *,
        on_progress: OnProgress | None = None,
        deadline_s: float = limits.HANDOFF_DEADLINE_S,
    ) -> Receipt:
        """Reads a prefix at the sender and keeps its cache there.

        Raises:
            CacheLinkError: the prefill failed.
        """
        request = sender_pb2.PrefillRequest(prefix=convert.prefix_to(prefix))
        return await _receipt(self._events(self._stub.Prefill, request, deadline_s), on_progress)

    async def _events(
        self, method: Any, request: object, deadline_s: float
    ) -> AsyncIterator[Progress | Receipt]:
        call = method(request, timeout=deadline_s, metadata=self._metadata)
        try:
            async for message in call:
                yield convert.handoff_event_from(message)
        except grpc.RpcError as error:
            raise error_from(error) from error
        finally:
            call.cancel()  # nothing, when it has ended


async def _receipt(
    events: AsyncIterator[Progress | Receipt], on_progress: OnProgress | None
) -> Receipt:
    async for event in events:
        if isinstance(event, Receipt):
            return event
        if on_progress is not None:
            on_progress(event)
    raise PeerGone("the handoff ended without its receipt")
