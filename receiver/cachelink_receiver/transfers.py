"""The receiving end of the data plane: Reserve, PushChunks, and the leases between them.

A handoff has one owner at a time: the reservation until the stream opens it, the stream until its
commit, then the store. Every way out frees what was reserved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cachelink_core import limits, names
from cachelink_core.codec_spec import codec_name
from cachelink_core.engine.base import Engine
from cachelink_core.engine.header_memory import HeaderMemory
from cachelink_core.engine.offer import mint_id
from cachelink_core.engine.store import CacheStore, StoredCache
from cachelink_core.errors import (
    CacheLinkError,
    HandoffAborted,
    InternalError,
    RemoteProtocolError,
    StaleEpoch,
    StillInTransfer,
    TruncatedStream,
)
from cachelink_core.handoff import HandoffSession, State, events
from cachelink_core.logs import logger
from cachelink_core.manifest import MAPPER_NONE, Header, decode_header
from cachelink_core.metrics import Metrics
from cachelink_core.node.arrivals import Arriving
from cachelink_core.rpc.handlers import Call, Frame, PlacingFrames
from cachelink_core.rpc.transfer_types import HandoffStatus, PushReceipt, Reservation
from cachelink_core.transport.mapper import Mapper
from cachelink_receiver.admission import check_fits
from cachelink_receiver.handoff_table import HandoffTable
from cachelink_receiver.incoming import ChunkSink, Incoming
from cachelink_receiver.mappers import Mappers, mapper_note
from cachelink_receiver.progress import arriving
from cachelink_receiver.receipts import count_install, make_receipt

_log = logger(__name__)

_REAP_S = 0.25
"""How often leases are looked at: the precision of an expiry."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """What the operator allows.

    Attributes:
        headroom_tokens: room for query and answer in an installed cache.
        max_lease_s: the longest lease that is given.
    """

    headroom_tokens: int
    max_lease_s: float


class Transfers:
    """Every handoff of one receiver. Safe for threads."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: CacheStore,
        memory: HeaderMemory,
        metrics: Metrics,
        allowed: TransferLimits,
        mappers: Mappers,
        sink: type[ChunkSink] = ChunkSink,
    ) -> None:
        """Binds the node's parts; ``start`` begins to watch the leases."""
        self.epoch = mint_id()
        self._engine = engine
        self._store = store
        self._memory = memory
        self._metrics = metrics
        self._allowed = allowed
        self._mappers = mappers
        self._sink = sink
        self._table = HandoffTable()
        self._stopping = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="leases", daemon=True)

    def start(self) -> None:
        """Begins to watch the leases."""
        self._reaper.start()

    def stop(self) -> None:
        """Ends every handoff that is still under way and frees it."""
        self._stopping.set()
        self._table.close()
        for incoming in self._table.all_live():
            self._finish(incoming, events.Abort("the receiver is shutting down"))
        if self._reaper.is_alive():
            self._reaper.join(timeout=limits.CONTROL_DEADLINE_S)

    def reserve(self, header: bytes, call: Call) -> Reservation:
        """See ``TransferHandler.reserve``."""
        began = time.monotonic()
        try:
            offer = decode_header(header)
            self._table.check_free(offer.handoff_id)
            check_fits(self._engine, offer, self._allowed.max_lease_s)
            mapper = None
            if offer.mapper != MAPPER_NONE:
                mapper = self._mappers.pick(offer, self._engine.identity)
            check_s = time.monotonic() - began
            return self._admit(offer, mapper, call, check_s)
        except CacheLinkError as error:
            self._metrics.manifest_rejected.labels(reason=error.reason).inc()
            self._metrics.handoffs.labels(outcome="refused").inc()
            _log.warning("refused", peer=call.peer, reason=error.reason, error=str(error))
            raise

    def push(self, frames: Iterator[Frame], call: Call) -> PushReceipt:
        """See ``TransferHandler.push``."""
        first = next(frames, None)
        if not isinstance(first, events.Open):
            what = "nothing" if first is None else first.kind.value
            raise RemoteProtocolError(f"the stream began with {what}, not with open")
        incoming = self._table.must_be_live(first.handoff_id, call.tenant)
        try:
            with incoming.lock:
                incoming.session.handle(first, time.monotonic())
                incoming.marks.opened_s = time.monotonic()
            return self._receive(incoming, frames, call)
        except CacheLinkError as error:
            self._reject(incoming, error)
            raise
        except Exception as error:
            _log.exception("push_failed", handoff_id=first.handoff_id)
            failure = InternalError("the receiver failed; see its log")
            self._reject(incoming, failure)
            raise failure from error

    def status(self, handoff_id: str, call: Call) -> HandoffStatus:
        """See ``TransferHandler.status``."""
        incoming = self._table.live(handoff_id, call.tenant)
        if incoming is None:
            return self._table.ended(handoff_id, call.tenant)
        session = incoming.session
        with incoming.lock:
            left_s = session.header.lease_s - (time.monotonic() - session.touched_s)
            return HandoffStatus(
                state=session.state.value,
                verified_blocks=session.complete_blocks(),
                cache_id=session.cache_id,
                lease_left_s=max(0.0, left_s),
            )

    def heartbeat(self, handoff_id: str, receiver_epoch: str, call: Call) -> float:
        """See ``TransferHandler.heartbeat``."""
        if receiver_epoch != self.epoch:
            raise StaleEpoch(f"epoch is {receiver_epoch!r}; this receiver's is {self.epoch!r}")
        incoming = self._table.must_be_live(handoff_id, call.tenant)
        with incoming.lock:
            incoming.session.touch(time.monotonic())
        return incoming.header.lease_s

    def abort(self, handoff_id: str, why: str, call: Call) -> int:
        """See ``TransferHandler.abort``."""
        incoming = self._table.live(handoff_id, call.tenant)
        if incoming is None:
            return 0
        return self._finish(incoming, events.Abort(why))

    def wait(self, tenant: str, name: str, wait_s: float, call: Call) -> bool:
        """See ``Arrivals.wait``."""
        deadline_s = time.monotonic() + wait_s
        incoming = self._table.named(tenant, name)
        if incoming is None:
            return False
        while not incoming.ended.wait(min(_REAP_S, max(0.0, deadline_s - time.monotonic()))):
            if call.cancelled():
                raise HandoffAborted("the caller is gone")
            if time.monotonic() >= deadline_s:
                raise StillInTransfer(
                    f"in_transfer: {name!r} is {incoming.session.state} after {wait_s:g} s"
                )
        return True

    def arriving(self, tenant: str, name: str) -> Arriving | None:
        """See ``Arrivals.arriving``."""
        incoming = self._table.named(tenant, name)
        return None if incoming is None else arriving(incoming, time.monotonic())

    def failure(self, tenant: str, name: str) -> CacheLinkError | None:
        """See ``Arrivals.failure``."""
        return self._table.failure(tenant, name)

    def _admit(
        self, offer: Header, mapper: Mapper | None, call: Call, check_s: float
    ) -> Reservation:
        began = time.monotonic()
        chosen = MAPPER_NONE if mapper is None else mapper.card.digest
        name = names.cache_id(
            tenant=call.tenant,
            receiver=self._engine.identity,
            sender=offer.identity,
            block_tokens=offer.block_tokens,
            token_ids=offer.token_ids,
            codec=offer.codec,
            mapper=chosen,
        )
        codec = codec_name(offer.codec, offer.packing)
        held = self._store.find(call.tenant, name)
        if held is not None:
            self._store.alias(call.tenant, offer.handoff_id, name)
            self._table.note_ended(
                offer.handoff_id, call.tenant, HandoffStatus(State.INSTALLED.value, cache_id=name)
            )
            self._metrics.handoffs.labels(outcome="already_installed").inc()
            return Reservation(
                offer.handoff_id, name, self.epoch, offer.lease_s, mapper=chosen, codec=codec,
                already_installed=True, check_s=check_s,
            )  # fmt: skip
        room = self._allowed.headroom_tokens
        size = self._engine.cache_bytes(offer.tokens, room, whole=False)
        reservation = self._store.reserve(size)
        try:
            cache = self._engine.open_cache(offer.tokens, room, whole=False)
            now = time.monotonic()
            session = HandoffSession(offer, self.epoch, now)
            session.handle(events.Admit(name), now)
            incoming = Incoming(call.tenant, session, cache, reservation, check_s, now, mapper)
            self._table.enlist(incoming)
        except BaseException:
            reservation.release()
            raise
        _log.info(
            "admitted", handoff_id=offer.handoff_id, cache_id=name, tokens=offer.tokens,
            codec=codec, bytes=size, peer=call.peer,
        )  # fmt: skip
        return Reservation(
            offer.handoff_id, name, self.epoch, offer.lease_s, mapper=chosen, codec=codec,
            allocate_s=now - began, check_s=check_s,
        )  # fmt: skip

    def _receive(self, incoming: Incoming, frames: Iterator[Frame], call: Call) -> PushReceipt:
        sink = self._sink(self._engine, incoming)
        marks = incoming.marks
        if isinstance(frames, PlacingFrames):
            frames.place_with(sink.place, incoming.ended_badly)
        for frame in sink.watched(frames):
            marks.last_frame_s = time.monotonic()
            if isinstance(frame, events.Commit):
                sink.commit(frame.seal)
                marks.decoded_s = marks.decoded_s or time.monotonic()
                return self._publish(incoming, sink, call)
            if isinstance(frame, events.Open):
                raise RemoteProtocolError("open came twice")
            sink.take(frame)
        raise TruncatedStream(
            f"the stream ended after {incoming.session.recorded_chunks} of "
            f"{incoming.header.layout.chunk_count} chunks, without a commit"
        )

    def _publish(self, incoming: Incoming, sink: ChunkSink, call: Call) -> PushReceipt:
        header, session = incoming.header, incoming.session
        with incoming.lock:
            self._store.put(
                StoredCache(
                    tenant=call.tenant,
                    cache_id=session.cache_id,
                    handoff_id=header.handoff_id,
                    cache=incoming.cache,
                    ids=header.ids,
                    frame=header.query_frame,
                    trust=header.trust,
                    codec=codec_name(header.codec, header.packing),
                    producer=header.identity,
                    note=mapper_note(incoming.mapper),
                ),
                incoming.reservation,
            )
            session.handle(events.Install(), time.monotonic())
        installed_s = time.monotonic()
        self._table.retire(incoming)
        incoming.ended.set()
        receipt = make_receipt(incoming, sink, installed_s)
        count_install(self._metrics, receipt, incoming, installed_s)
        return receipt

    def _reject(self, incoming: Incoming, error: CacheLinkError) -> None:
        self._metrics.chunk_rejected.labels(reason=error.reason).inc()
        self._finish(incoming, events.Fail(error))

    def _finish(self, incoming: Incoming, event: events.Fail | events.Abort | events.Expire) -> int:
        freed = incoming.end(event)
        if not self._table.retire(incoming):
            return freed
        header, session = incoming.header, incoming.session
        expired = session.state is State.EXPIRED
        self._metrics.handoffs.labels(outcome="expired" if expired else "failed").inc()
        if expired:
            self._metrics.lease_expired.inc()
        names_ = (session.cache_id, header.handoff_id)
        self._memory.remember(incoming.tenant, names_, header.token_ids, header.query_frame)
        _log.warning(
            "handoff_ended", handoff_id=header.handoff_id, state=session.state.value,
            error=str(session.error), freed_bytes=freed,
        )  # fmt: skip
        return freed

    def _reap(self) -> None:
        while not self._stopping.wait(_REAP_S):
            now = time.monotonic()
            for incoming in self._table.all_live():
                if incoming.session.expired(now):
                    self._finish(incoming, events.Expire())
            self._store.sweep()
