"""One handoff at the sender: prefix, reservation, pump, receipt."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from cachelink_core import limits
from cachelink_core.codec_spec import codec_name, parse_codec
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.store import CacheStore
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.logs import logger
from cachelink_core.manifest import MAPPER_NONE, Header, encode_header
from cachelink_core.metrics import Metrics
from cachelink_core.node.queries import prefix_of
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.transfer_client import TransferClient, push_deadline_s
from cachelink_core.rpc.transfer_types import PushReceipt, Reservation
from cachelink_core.rpc.types import (
    HandoffRequest,
    HeldCache,
    PrefixSource,
    Progress,
    Receipt,
    Timeline,
)
from cachelink_sender.peers import Peers
from cachelink_sender.prefill_job import PrefillJob, aborted
from cachelink_sender.prefixes import Prefixes
from cachelink_sender.pump import Pump

_log = logger(__name__)
_PROGRESS_S = 0.2
"""Seconds between two progress events."""

Events = Iterator[Progress | Receipt]


@dataclass(frozen=True, slots=True)
class HandoffDefaults:
    """What a request may leave open.

    Attributes:
        codec: of a handoff that names none.
        stream: whether blocks are sent as they are prefilled, unless the request says otherwise.
        block_tokens: the prefill schedule.
        lease_s: asked of the receiver.
        link_bytes_per_s: the slowest link to expect; deadlines follow from it.
    """

    codec: str
    stream: bool
    block_tokens: int
    lease_s: float
    link_bytes_per_s: float


class Handoffs:
    """Runs handoffs and prefills. Safe for threads."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: CacheStore,
        prefixes: Prefixes,
        peers: Peers,
        metrics: Metrics,
        defaults: HandoffDefaults,
    ) -> None:
        """Binds the node's parts."""
        self.epoch = mint_id()
        self._engine = engine
        self._store = store
        self._prefixes = prefixes
        self._peers = peers
        self._metrics = metrics
        self._defaults = defaults

    def handoff(self, request: HandoffRequest, call: Call) -> Events:
        """See ``SenderHandler.handoff``."""
        client = self._peers.client(request.receiver)
        codec, packing = parse_codec(request.codec or self._defaults.codec)
        prefix = self._prefix(request.prefix, call)
        header = make_header(
            self._engine,
            prefix.ids,
            codec,
            packing,
            sender_epoch=self.epoch,
            block_tokens=self._defaults.block_tokens,
            frame=prefix.frame,
            lease_s=request.lease_s or self._defaults.lease_s,
            mapper=request.mapper or MAPPER_NONE,
        )
        attempt = _Attempt(header, time.monotonic())
        try:
            yield from self._run(attempt, client, prefix, request.stream, call)
        except CacheLinkError as error:
            self._metrics.handoffs.labels(
                outcome="failed" if attempt.reservation else "refused"
            ).inc()
            _log.warning(
                "handoff_failed", handoff_id=header.handoff_id, receiver=request.receiver,
                reason=error.reason, error=str(error),
            )  # fmt: skip
            raise

    def prefill(self, source: PrefixSource, call: Call) -> Events:
        """See ``SenderHandler.prefill``."""
        prefix = self._prefix(source, call)
        tokens = len(prefix.ids)
        with self._prefixes.follow(prefix, call.tenant) as (name, job):
            yield from _until_prefilled(job, Progress("", tokens, job.ready_tokens), call)
            self._count_prefill(job)
            yield Receipt(
                handoff_id="",
                cache_id=name,
                sender_cache_id=name,
                tokens=tokens,
                prefilled_tokens=job.fresh_tokens,
                codec="",
                trust="exact",
                phases={"prefill": job.prefill_s},
            )

    def _prefix(self, source: PrefixSource, call: Call) -> Prefix:
        if isinstance(source, HeldCache):
            with self._store.pin(call.tenant, source.cache_id) as entry:
                return Prefix(entry.ids, entry.frame)
        return prefix_of(self._engine.tokens, source)

    def _run(
        self, attempt: _Attempt, client: TransferClient, prefix: Prefix, stream: bool, call: Call
    ) -> Events:
        with ExitStack() as stack:
            name, job = stack.enter_context(self._prefixes.follow(prefix, call.tenant))
            header = attempt.header
            if not stream:
                blank = Progress(header.handoff_id, header.tokens, 0, header.layout.encoded_bytes)
                yield from _until_prefilled(job, blank, call)
            began = time.monotonic()
            reservation = client.reserve(encode_header(header))
            attempt.reserve_s = time.monotonic() - began
            attempt.reservation = reservation
            if reservation.already_installed:
                yield self._already(attempt, reservation, name)
                return
            session = HandoffSession(header, reservation.receiver_epoch, time.monotonic())
            session.handle(
                events.Admit(reservation.cache_id, frozenset(reservation.held_blocks)),
                time.monotonic(),
            )
            pump = Pump(self._engine, header, session, job, call.cancelled)
            push = _Push(client, pump, self._deadline_s(header, job), call)
            stack.callback(push.close, header.handoff_id)
            yield from push.progress(header, job)
            self._count_prefill(job)
            yield self._receipt(attempt, push, job, name)

    def _deadline_s(self, header: Header, job: PrefillJob) -> float:
        """For the link, and for the prefill that the stream follows, at a token in 0.1 s."""
        link_s = push_deadline_s(header.layout.encoded_bytes, self._defaults.link_bytes_per_s)
        return link_s + 0.1 * job.fresh_tokens

    def _already(self, attempt: _Attempt, reservation: Reservation, name: str) -> Receipt:
        header = attempt.header
        self._metrics.handoffs.labels(outcome="already_installed").inc()
        return Receipt(
            handoff_id=header.handoff_id,
            cache_id=reservation.cache_id,
            sender_cache_id=name,
            tokens=header.tokens,
            prefilled_tokens=0,
            codec=codec_name(header.codec, header.packing),
            trust=header.trust,
            native_bytes=header.layout.native_bytes,
            phases={
                "reserve": attempt.reserve_s,
                "total": time.monotonic() - attempt.began_s,
            },
            already_installed=True,
        )

    def _receipt(self, attempt: _Attempt, push: _Push, job: PrefillJob, name: str) -> Receipt:
        header, pushed, pump = attempt.header, push.receipt, push.pump
        assert pushed is not None, "the push has ended well"
        assert attempt.reservation is not None, "it was reserved"
        ended_s = push.ended_s
        first_s = pump.times.first_frame_at_s or ended_s
        codec = codec_name(header.codec, header.packing)
        send_s = max(0.0, ended_s - first_s - pushed.tail_s)
        self._metrics.handoffs.labels(outcome="installed").inc()
        self._metrics.transfer_seconds.labels(role="sender", codec=codec).observe(ended_s - first_s)
        self._metrics.serialize_seconds.labels(codec=codec).observe(pump.times.encode_s)
        self._metrics.wire_bytes.inc(pushed.wire_bytes)
        self._metrics.raw_bytes.inc(header.layout.encoded_bytes)
        self._metrics.handoff_bytes.observe(pushed.wire_bytes)
        _log.info(
            "handed_over", handoff_id=header.handoff_id, cache_id=pushed.cache_id, codec=codec,
            tokens=header.tokens, wire_bytes=pushed.wire_bytes, send_s=round(send_s, 6),
        )  # fmt: skip
        zero_s = pump.times.reserved_at_s
        return Receipt(
            handoff_id=header.handoff_id,
            cache_id=pushed.cache_id,
            sender_cache_id=name,
            tokens=header.tokens,
            prefilled_tokens=job.fresh_tokens,
            codec=codec,
            trust=pushed.trust,
            wire_bytes=pushed.wire_bytes,
            native_bytes=header.layout.native_bytes,
            chunk_count=pushed.chunk_count,
            phases={
                "prefill": job.prefill_s,
                "reserve": attempt.reserve_s,
                "allocate": attempt.reservation.allocate_s,
                "encode": pump.times.encode_s,
                "send": send_s,
                "load": pushed.load_s,
                "load_busy": pushed.load_busy_s,
                "install": pushed.install_s,
                "transform": pushed.transform_s,
                "device_wait": pushed.device_wait_s,
                "tail": pushed.tail_s,
                "total": ended_s - attempt.began_s,
            },
            timeline=Timeline(
                prefilled_at_s=tuple(at - zero_s for at in pump.times.prefilled_at_s),
                encoded_at_s=tuple(at - zero_s for at in pump.times.encoded_at_s),
                sent_at_s=tuple(at - zero_s for at in pump.times.sent_at_s),
                verified_at_s=pushed.verified_at_s,
                installed_at_s=pushed.installed_at_s,
            ),
        )

    def _count_prefill(self, job: PrefillJob) -> None:
        if job.fresh_tokens:
            self._metrics.prefill_seconds.observe(job.prefill_s)
            self._metrics.tokens.labels(kind="prefix").inc(job.fresh_tokens)


@dataclass
class _Attempt:
    header: Header
    began_s: float
    reserve_s: float = 0.0
    reservation: Reservation | None = None


class _Push:
    """A push in a thread of its own, so that the caller hears of its progress meanwhile."""

    def __init__(self, client: TransferClient, pump: Pump, deadline_s: float, call: Call) -> None:
        self.pump = pump
        self.receipt: PushReceipt | None = None
        self.ended_s = 0.0
        self._client = client
        self._deadline_s = deadline_s
        self._call = call
        self._given_up = threading.Event()
        self._result: queue.Queue[PushReceipt | CacheLinkError] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="push", daemon=True)

    def progress(self, header: Header, job: PrefillJob) -> Iterator[Progress]:
        """Starts, and yields now and then until the end; then ``receipt`` is set.

        Raises:
            CacheLinkError: why it failed.
        """
        self._thread.start()
        while True:
            try:
                result = self._result.get(timeout=_PROGRESS_S)
            except queue.Empty:
                yield self._now(header, job)
                continue
            if isinstance(result, CacheLinkError):
                raise result
            self.receipt = result
            yield self._now(header, job)
            return

    def close(self, handoff_id: str) -> None:
        """Ends a push that is still under way and frees its reservation at the receiver."""
        if self.receipt is not None:
            return
        self._given_up.set()
        try:
            self._client.abort(
                handoff_id, "the sender gave up", deadline_s=limits.CONNECT_DEADLINE_S
            )
        except CacheLinkError as error:
            _log.info("abort_failed", handoff_id=handoff_id, error=str(error))
        if self._thread.ident is not None:
            self._thread.join(limits.CONTROL_DEADLINE_S)

    def _now(self, header: Header, job: PrefillJob) -> Progress:
        times = self.pump.times
        return Progress(
            header.handoff_id,
            header.tokens,
            job.ready_tokens,
            header.layout.encoded_bytes,
            times.sent_raw_bytes,
            times.sent_wire_bytes,
        )

    def _run(self) -> None:
        try:
            receipt: PushReceipt | CacheLinkError = self._client.push(
                self.pump.frames(), deadline_s=self._deadline_s, cancelled=self._cancelled
            )
        except CacheLinkError as error:
            receipt = error
        except Exception:  # noqa: BLE001 - a thread's error must reach its caller
            _log.exception("push_failed")
            receipt = InternalError("the push failed; see the sender's log")
        self.ended_s = time.monotonic()
        self._result.put(receipt)

    def _cancelled(self) -> bool:
        return self._given_up.is_set() or self._call.cancelled()


def _until_prefilled(job: PrefillJob, blank: Progress, call: Call) -> Iterator[Progress]:
    while not job.wait_end():
        if call.cancelled():
            raise aborted()
        yield replace(blank, prefilled_tokens=job.ready_tokens)
