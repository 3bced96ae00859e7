"""Moves one cache: each block is encoded and sent as soon as it has been prefilled.

    native over gRPC: prefill thread ─▶ stream's thread (copy, digest) ─▶ wire
    otherwise:        prefill thread ─▶ encoder thread ─▶ bounded queue ─▶ stream's thread ─▶ wire

What computes runs ahead of the wire in a thread of its own: codecs, packings, and the digests of native
chunks that the plane ``tcp`` sends from where they lie. The queue holds ``limits.QUEUED_CHUNKS`` messages,
so a slow receiver stops the encoder and costs no memory. Only a native message of gRPC, which is a copy,
is over sooner than it could be handed from thread to thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cachelink_core import limits
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.logs import logger
from cachelink_core.manifest import Header, SenderTimings
from cachelink_core.rpc.planes import Framing, GrpcFraming
from cachelink_sender.prefill_job import PrefillJob, aborted

_log = logger(__name__)

_POLL_S = 0.5


@dataclass
class PumpTimes:
    """Monotonic seconds and sums of one push, on the sender's clock."""

    reserved_at_s: float
    lead_wait_s: float = 0.0
    """Waits for the prefill before the first chunk."""
    encode_s: float = 0.0
    idle_s: float = 0.0
    """The wire's waits for its next frame, after the first."""
    encoded_at_s: list[float] = field(default_factory=list)
    sent_at_s: list[float] = field(default_factory=list)
    prefilled_at_s: list[float] = field(default_factory=list)
    first_frame_at_s: float = 0.0
    sent_raw_bytes: int = 0
    sent_wire_bytes: int = 0


class Pump:
    """The frames of one handoff, made while they are taken.

    Attributes:
        sends_in_place: whether a plane that can may be given views of the cache.
        times: so far.
    """

    sends_in_place = True

    def __init__(
        self,
        engine: Engine,
        header: Header,
        session: HandoffSession,
        job: PrefillJob,
        cancelled: Callable[[], bool],
        framing: Framing | None = None,
    ) -> None:
        """Binds one handoff.

        Args:
            engine: of the sender's model.
            header: as reserved.
            session: the sender's session, admitted.
            job: the prefill whose cache is sent.
            cancelled: whether the caller has gone.
            framing: of the plane that carries it; None for gRPC's.
        """
        self.times = PumpTimes(reserved_at_s=time.monotonic())
        self._header = header
        self._session = session
        self._job = job
        self._cancelled = cancelled
        self._framing = framing or GrpcFraming()
        self._in_place = self.sends_in_place and self._framing.in_place
        self._encoder = ChunkEncoder(engine, header, job.cache)
        self._stopped = threading.Event()

    def frames(self) -> Iterator[Any]:
        """Open, chunks, commit: pulled by the stream one at a time.

        Raises:
            CacheLinkError: what went wrong while making them.
        """
        yield self._framing.open(self._header.handoff_id, self._session.receiver_epoch)
        self._session.handle(
            events.Open(self._header.handoff_id, self._session.receiver_epoch), time.monotonic()
        )
        try:
            yield from self._sent(self._paced(self._made()))
        finally:
            self._stopped.set()
        seal = self._session.make_seal(self._timings())
        self._session.handle(events.Commit(seal), time.monotonic())
        yield self._framing.commit(seal)

    def stop(self) -> None:
        """Ends what works ahead of the wire; the frames are of no use any more."""
        self._stopped.set()

    @property
    def _computes(self) -> bool:
        """Whether a chunk is more than a copy."""
        return self._header.codec.quantized or self._header.packing.id != "none"

    def _paced(self, made: Iterator[Frame]) -> Iterator[Frame]:
        """Decides how far ahead of the wire frames are made."""
        if self._computes or self._in_place:
            return _ahead(made, self._stopped, self._cancelled)
        return made

    def _sent(self, made: Iterator[Frame]) -> Iterator[Any]:
        taken_s = time.monotonic()
        for frame in made:
            now = time.monotonic()
            if self.times.first_frame_at_s:
                self.times.idle_s += now - taken_s
            else:
                self.times.first_frame_at_s = now
            yield frame.data
            taken_s = time.monotonic()
            self.times.sent_raw_bytes += frame.raw_bytes
            self.times.sent_wire_bytes += frame.wire_bytes
            if frame.ends_block:
                self.times.sent_at_s.append(taken_s)

    def _made(self) -> Iterator[Frame]:
        layout = self._header.layout
        for block in range(layout.block_count):
            self._await_block(block)
            if block in self._session.held_blocks:
                self.times.encoded_at_s.append(time.monotonic())
                continue
            chunks = layout.block_chunks(block)
            for index in chunks:
                yield self._encoded(*index, ends_block=index == chunks[-1])

    def _await_block(self, block: int) -> None:
        began = time.monotonic()
        while (ready_s := self._job.wait_block(block)) is None:
            if self._stopped.is_set() or self._cancelled():
                raise aborted()
        if not self.times.encode_s:
            self.times.lead_wait_s += time.monotonic() - began
        self.times.prefilled_at_s.append(ready_s)

    def _encoded(self, block: int, run: int, *, ends_block: bool) -> Frame:
        began = time.monotonic()
        placed = self._encoder.place(block, run) if self._in_place else []
        parts = placed or self._encoder.encode(block, run)
        digest = self._session.send_chunk(block, run, parts, began)
        if self._framing.in_place and not placed:
            # Views of the cache are good for as long as it is pinned; those of an encoder's buffers
            # only until it is asked again, and frames are made ahead of the wire.
            parts = [memoryview(b"".join(parts))]
        data = self._framing.chunk(block, run, digest, parts)
        ended_s = time.monotonic()
        self.times.encode_s += ended_s - began
        if ends_block:
            self.times.encoded_at_s.append(ended_s)
        wire_bytes = sum(part.nbytes for part in parts)
        return Frame(data, self._header.layout.raw_bytes(block, run), wire_bytes, ends_block)

    def _timings(self) -> SenderTimings:
        zero_s = self.times.reserved_at_s
        return SenderTimings(
            prefill_s=self._job.prefill_s,
            encode_s=self.times.encode_s,
            prefilled_at_s=tuple(at - zero_s for at in self.times.prefilled_at_s),
            encoded_at_s=tuple(at - zero_s for at in self.times.encoded_at_s),
            sent_at_s=tuple(at - zero_s for at in self.times.sent_at_s),
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """One encoded chunk, as the stream takes it."""

    data: Any
    raw_bytes: int
    wire_bytes: int
    ends_block: bool


def _ahead(
    made: Iterator[Frame], stopped: threading.Event, cancelled: Callable[[], bool]
) -> Iterator[Frame]:
    """What ``made`` gives, made a few frames ahead in a thread of its own.

    Args:
        made: advanced by that thread alone.
        stopped: set by whoever takes the frames, when it wants no more.
        cancelled: asked while no frame comes.

    Raises:
        HandoffAborted: ``cancelled`` said so.
        CacheLinkError: what ``made`` raised.
    """
    ready: queue.Queue[Frame | CacheLinkError | None] = queue.Queue(limits.QUEUED_CHUNKS)
    threading.Thread(target=_fill, args=(ready, made, stopped), name="encode", daemon=True).start()
    while True:
        try:
            item = ready.get(timeout=_POLL_S)
        except queue.Empty:
            if cancelled():
                raise aborted() from None
            continue
        if item is None:
            return
        if isinstance(item, CacheLinkError):
            raise item
        yield item


def _fill(
    ready: queue.Queue[Frame | CacheLinkError | None],
    made: Iterator[Frame],
    stopped: threading.Event,
) -> None:
    last: CacheLinkError | None = None
    try:
        for frame in made:
            if not _put(ready, frame, stopped):
                return
    except CacheLinkError as error:
        last = error
    except Exception as error:  # noqa: BLE001 - a thread's error must reach the stream
        _log.exception("encode_failed", error=str(error))
        last = InternalError("encoding failed; see the sender's log")
    _put(ready, last, stopped)


def _put(
    ready: queue.Queue[Frame | CacheLinkError | None],
    item: Frame | CacheLinkError | None,
    stopped: threading.Event,
) -> bool:
    """Waits for room; False if the stream has ended meanwhile."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
