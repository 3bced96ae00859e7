"""One handoff at the sender: prefix, reservation, pump, receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypedDict

import msgspec

from cachelink_core.codec_spec import codec_name, parse_codec
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.store import CacheStore
from cachelink_core.errors import CacheLinkError
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.logs import logger
from cachelink_core.manifest import MAPPER_NONE, Header, encode_header
from cachelink_core.metrics import Metrics
from cachelink_core.node.measured import Measured
from cachelink_core.node.queries import prefix_of
from cachelink_core.planner import Plan
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.planes import open_plane
from cachelink_core.rpc.transfer_client import TransferClient, push_deadline_s
from cachelink_core.rpc.transfer_types import SCHEMES, Reservation, Scheme
from cachelink_core.rpc.types import (
    DataPlane,
    HandoffRequest,
    HeldCache,
    PrefixSource,
    Progress,
    Receipt,
    Recommendation,
    Timeline,
)
from cachelink_sender.peers import Peers
from cachelink_sender.phases import HandoffClock, handoff_phases
from cachelink_sender.planning import AUTO, HandoffPlanner, check_wanted
from cachelink_sender.prefill_job import PrefillJob, aborted
from cachelink_sender.prefixes import Prefixes
from cachelink_sender.pump import Pump
from cachelink_sender.push import Push
from cachelink_sender.samples import sent_sample

_log = logger(__name__)
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
        data_planes: that chunks may take where a receiver offers them.
    """

    codec: str
    stream: bool
    block_tokens: int
    lease_s: float
    link_bytes_per_s: float
    data_planes: tuple[Scheme, ...] = SCHEMES


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
        measured: Measured,
        answers: Callable[[], int],
        defaults: HandoffDefaults,
        pump: type[Pump] = Pump,
    ) -> None:
        """Binds the node's parts; ``answers`` says how many are under way here."""
        self.epoch = mint_id()
        self._engine = engine
        self._store = store
        self._prefixes = prefixes
        self._peers = peers
        self._metrics = metrics
        self._measured = measured
        self._defaults = defaults
        self._pump = pump
        self._planner = HandoffPlanner(
            engine=engine,
            prefixes=prefixes,
            measured=measured,
            answers=answers,
            block_tokens=defaults.block_tokens,
            expected_bytes_per_s=defaults.link_bytes_per_s,
        )

    def handoff(self, request: HandoffRequest, call: Call) -> Events:
        """See ``SenderHandler.handoff``."""
        began = time.monotonic()
        client = self._peers.client(request.receiver)
        prefix = self._prefix(request.prefix, call)
        named, plan = request.codec or self._defaults.codec, None
        if named == AUTO:
            plan = self._planner.plan(request, prefix, call.tenant, client)
            if plan.text:
                yield self._re_read(prefix, plan, call, began)
                return
            named = plan.chosen.removeprefix("mapped:")
        else:
            check_wanted(request, named, self._engine.identity.dtype)
        codec, packing = parse_codec(named)
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
        attempt = _Attempt(header, HandoffClock(began), request.receiver, plan)
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

    def _re_read(self, prefix: Prefix, plan: Plan, call: Call, began: float) -> Receipt:
        """Says that nothing was sent, because the receiver is faster when it reads by itself."""
        self._metrics.handoffs.labels(outcome="re_read").inc()
        _log.info("re_read_recommended", tokens=len(prefix.ids), why=plan.why)
        name = self._prefixes.name_of(prefix.ids, call.tenant)
        held = self._store.find(call.tenant, name) is not None
        return Receipt(
            handoff_id="",
            cache_id="",
            sender_cache_id=name if held else "",
            tokens=len(prefix.ids),
            prefilled_tokens=0,
            codec="",
            trust="exact",
            phases={"total": time.monotonic() - began},
            plan=plan,
            recommendation="re_read",
        )

    def prefill(self, source: PrefixSource, call: Call) -> Events:
        """See ``SenderHandler.prefill``."""
        prefix = self._prefix(source, call)
        tokens = len(prefix.ids)
        with self._prefixes.follow(prefix, call.tenant) as (name, job):
            yield from _until_prefilled(job, Progress("", tokens, job.ready_tokens), call)
            while not job.wait_closed():
                yield _heard(Progress("", tokens, tokens), call)
            self._count_prefill(job)
            yield Receipt(
                handoff_id="",
                cache_id=name,
                sender_cache_id=name,
                tokens=tokens,
                prefilled_tokens=job.fresh_tokens,
                codec="",
                trust="exact",
                phases={"prefill": job.prefill_s, "restore": job.restore_s},
                prefix_origin=job.origin,
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
                began = time.monotonic()
                blank = Progress(header.handoff_id, header.tokens, 0, header.layout.encoded_bytes)
                yield from _until_prefilled(job, blank, call)
                attempt.clock.waited_s = time.monotonic() - began
            attempt.clock.reserving(time.monotonic())
            reservation = client.reserve(encode_header(header))
            attempt.clock.reserved(time.monotonic())
            attempt.reservation = reservation
            if reservation.already_installed:
                yield self._already(attempt, reservation, name)
                return
            session = HandoffSession(header, reservation.receiver_epoch, time.monotonic())
            session.handle(
                events.Admit(reservation.cache_id, frozenset(reservation.held_blocks)),
                time.monotonic(),
            )
            plane = open_plane(client, reservation, self._defaults.data_planes)
            stack.callback(plane.close)
            pump = self._pump(self._engine, header, session, job, call.cancelled, plane.framing)
            push = Push(client, plane, pump, self._deadline_s(header, job), call)
            attempt.plane = plane.scheme
            stack.callback(push.close, header.handoff_id)
            yield from push.progress(header, job)
            self._count_prefill(job)
            yield self._receipt(attempt, push, job, name)

    def _deadline_s(self, header: Header, job: PrefillJob) -> float:
        """For the link, and for the prefill that the stream follows, at a token in 0.1 s.

        A codec gets the time of the bytes that it saves: on a busy machine it can be the slower stage.
        """
        link_s = push_deadline_s(header.layout.native_bytes, self._defaults.link_bytes_per_s)
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
            phases=attempt.clock.phases(),
            already_installed=True,
            **attempt.planned(time.monotonic()),
        )

    def _receipt(self, attempt: _Attempt, push: Push, job: PrefillJob, name: str) -> Receipt:
        header, pushed, pump = attempt.header, push.receipt, push.pump
        assert pushed is not None, "the push has ended well"
        assert attempt.reservation is not None, "it was reserved"
        ended_s = push.ended_s
        codec = codec_name(header.codec, header.packing)
        phases = handoff_phases(
            attempt.clock,
            pump.times,
            attempt.reservation,
            pushed,
            prefill_s=job.prefill_s,
            ended_s=ended_s,
        )
        self._metrics.handoffs.labels(outcome="installed").inc()
        self._metrics.transfer_seconds.labels(role="sender", codec=codec).observe(
            phases["send"] + phases["tail"]
        )
        self._metrics.serialize_seconds.labels(codec=codec).observe(pump.times.encode_s)
        self._metrics.wire_bytes.inc(pushed.wire_bytes)
        self._metrics.raw_bytes.inc(header.layout.encoded_bytes)
        self._metrics.handoff_bytes.observe(pushed.wire_bytes)
        _log.info(
            "handed_over", handoff_id=header.handoff_id, cache_id=pushed.cache_id, codec=codec,
            tokens=header.tokens, wire_bytes=pushed.wire_bytes, send_s=round(phases["send"], 6),
        )  # fmt: skip
        sample = sent_sample(
            header, attempt.reservation, attempt.clock.reserve_s, pump.times, pushed, ended_s
        )
        self._measured.sent(attempt.receiver, sample)
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
            phases=phases,
            timeline=Timeline(
                prefilled_at_s=tuple(at - zero_s for at in pump.times.prefilled_at_s),
                encoded_at_s=tuple(at - zero_s for at in pump.times.encoded_at_s),
                sent_at_s=tuple(at - zero_s for at in pump.times.sent_at_s),
                verified_at_s=pushed.verified_at_s,
                installed_at_s=pushed.installed_at_s,
            ),
            data_plane=attempt.plane,
            prefix_origin=job.origin,
            **attempt.planned(ended_s),
        )

    def _count_prefill(self, job: PrefillJob) -> None:
        if job.fresh_tokens:
            self._metrics.prefill_seconds.observe(job.prefill_s)
            self._metrics.tokens.labels(kind="prefix").inc(job.fresh_tokens)


class _Planned(TypedDict, total=False):
    plan: Plan
    recommendation: Recommendation


@dataclass
class _Attempt:
    header: Header
    clock: HandoffClock
    receiver: str
    plan: Plan | None
    reservation: Reservation | None = None
    plane: DataPlane = ""

    def planned(self, ended_s: float) -> _Planned:
        """What the receipt says of the plan, if there was one."""
        if self.plan is None:
            return {}
        took_s = ended_s - self.clock.began_s
        plan = msgspec.structs.replace(self.plan, took_s=took_s)
        return {"plan": plan, "recommendation": "transfer"}


def _until_prefilled(job: PrefillJob, blank: Progress, call: Call) -> Iterator[Progress]:
    while not job.wait_end():
        yield _heard(replace(blank, prefilled_tokens=job.ready_tokens), call)


def _heard(progress: Progress, call: Call) -> Progress:
    """Progress for a caller who is still there.

    Raises:
        HandoffAborted: the caller has gone.
    """
    if call.cancelled():
        raise aborted()
    return progress
