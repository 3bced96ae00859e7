"""The synchronous client; import it from ``cachelink_core.rpc.client``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachelink_core import limits
from cachelink_core.codec_spec import Trust
from cachelink_core.errors import PeerGone
from cachelink_core.rpc import convert, convert_node
from cachelink_core.rpc.auth import bearer
from cachelink_core.rpc.channel import KEEPALIVE, Keepalive, open_channel
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

OnProgress = Callable[[Progress], None]


class Answer:
    """An answer as it is generated: iterate over its deltas, then read ``final``.

    Attributes:
        final: how it ended; None while it runs, and after ``cancel``.
    """

    def __init__(self, call: Any) -> None:
        self.final: Final | None = None
        self._call = call
        self._cancelled = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self.final is not None or self._cancelled:
            raise StopIteration
        try:
            event = convert.answer_event_from(next(self._call))
        except StopIteration:
            raise PeerGone("the answer ended without its final event") from None
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            raise error_from(error) from error
        if isinstance(event, Delta):
            return event
        self.final = event
        raise StopIteration

    def text(self) -> str:
        """Reads it to its end; returns the rest of its text.

        Raises:
            CacheLinkError: the call failed.
        """
        return "".join(delta.text for delta in self)

    def cancel(self) -> None:
        """Stops it, from any thread; the node stops within a token."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.final is None:
            self.cancel()


class _NodeClient:
    """What sender and receiver have in common. Threads may share it; it is a context manager."""

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
        self._channel = open_channel(address, tls, keepalive=keepalive)
        self._stub: Any = self.make_stub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

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
    ) -> Answer:
        """Asks a question; the deltas arrive while the returned answer is iterated.

        Args:
            context: what it is answered from.
            query: what is asked.
            sampling: greedy by default.
            least_trust: the least that is good enough.
            on_failure: whether the node re-reads the prefix when the cache cannot be used.
            keep: commit prefix, query and answer as a new cache, named in the final event.
            wait_s: how long to wait for a handoff that is still arriving; None for the node's default.
            policy: ``auto`` for whatever gives the first token first, waiting or reading again.
            max_error: largest expected next-token KL of a cache in nats; None for any.
            deadline_s: for the whole answer.

        Raises:
            InvalidRequest: an argument is beyond its limits. Everything else is raised while
                iterating.
        """
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
        return Answer(self._stub.Answer(message, timeout=deadline_s, metadata=self._metadata))

    def caches(self, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> CacheList:
        """Caches of the caller's tenant, and the bytes of the store.

        Raises:
            CacheLinkError: the call failed.
        """
        request = common_pb2.ListCachesRequest()
        return convert_node.cache_list_from(self._unary(self._stub.ListCaches, request, deadline_s))

    def evict(self, cache_id: str, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> int:
        """Evicts a cache; returns the bytes freed at once (the rest when its last answer ends).

        Raises:
            UnknownCache: there is none of that name.
            CacheLinkError: the call failed.
        """
        request = common_pb2.EvictCacheRequest(cache_id=cache_id)
        freed_bytes: int = self._unary(self._stub.EvictCache, request, deadline_s).freed_bytes
        return freed_bytes

    def ping(self, *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> NodeInfo:
        """What the node is.

        Raises:
            CacheLinkError: the call failed.
        """
        request = common_pb2.GetNodeInfoRequest()
        return convert_node.node_info_from(self._unary(self._stub.GetNodeInfo, request, deadline_s))

    def health(self, service: str = "", *, deadline_s: float = limits.CONTROL_DEADLINE_S) -> bool:
        """Whether the node, or one of its services by full name, takes work.

        Raises:
            CacheLinkError: the call failed.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        reply = self._unary(self._health.Check, request, deadline_s)
        serving: bool = reply.status == health_pb2.HealthCheckResponse.SERVING
        return serving

    def close(self) -> None:
        """Closes the channel; running calls end."""
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

    def _unary(self, method: Any, request: object, deadline_s: float) -> Any:
        try:
            return method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from(error) from error


class ReceiverClient(_NodeClient):
    """Asks a receiver."""

    make_stub = ReceiverServiceStub


class SenderClient(_NodeClient):
    """Asks a sender, and has it hand over."""

    make_stub = SenderServiceStub

    def handoff(
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
        """Hands a prefix over, and returns when the cache is installed.

        Args:
            prefix: what to hand over.
            receiver: a name of the sender's list.
            codec: ``native``, ``int8``, ``int4+zstd`` and the like; ``auto`` for the fastest that is
                good enough, which may be to send nothing; the sender's default if empty.
            stream: send each block as soon as it is prefilled, rather than all afterwards.
            lease_s: the sender's default if None.
            mapper: digest of a mapper, ``any`` or ``none``.
            least_trust: the least that is good enough.
            max_error: largest expected next-token KL of the cache in nats; None for any.
            questions: that will be asked about the prefix, for ``auto``.
            on_progress: called with each progress event; if it raises, the handoff is given up.
            deadline_s: for all of it, prefill included.

        Raises:
            CacheLinkError: the handoff failed.
        """
        request = HandoffRequest(
            prefix, receiver, codec, stream, lease_s, mapper, least_trust, max_error, questions
        )
        return _receipt(self.handoff_events(request, deadline_s=deadline_s), on_progress)

    def handoff_events(
        self, request: HandoffRequest, *, deadline_s: float = limits.HANDOFF_DEADLINE_S
    ) -> Generator[Progress | Receipt, None, None]:
        """The same as an iterator; the last item is the receipt. Closing it cancels the handoff.

        Raises:
            CacheLinkError: the handoff failed.
        """
        return self._events(self._stub.Handoff, convert.handoff_request_to(request), deadline_s)

    def prefill(
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
        return _receipt(self._events(self._stub.Prefill, request, deadline_s), on_progress)

    def _events(
        self, method: Any, request: object, deadline_s: float
    ) -> Generator[Progress | Receipt, None, None]:
        call = method(request, timeout=deadline_s, metadata=self._metadata)
        try:
            for message in call:
                yield convert.handoff_event_from(message)
        except grpc.RpcError as error:
            raise error_from(error) from error
        finally:
            call.cancel()  # nothing, when it has ended


def _receipt(
    events: Generator[Progress | Receipt, None, None], on_progress: OnProgress | None
) -> Receipt:
    # Closed at once when on_progress raises: the call must not outlive whoever wanted it.
    with closing(events):
        for event in events:
            if isinstance(event, Receipt):
                return event
            if on_progress is not None:
                on_progress(event)
    raise PeerGone("the handoff ended without its receipt")
