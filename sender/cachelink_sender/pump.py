"""Moves one cache: each block is encoded and sent as soon as it has been prefilled.

    prefill thread ─▶ encoder thread ─▶ bounded queue ─▶ gRPC's thread ─▶ wire

A native chunk is a list of views of the cache until the one join that makes its message; a
quantized one is a few small buffers. The queue holds ``limits.QUEUED_CHUNKS`` messages, so a slow
receiver stops the encoder and costs no memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachelink_core import limits
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.errors import CacheLinkError, InternalError, LinkTimeout
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.logs import logger
from cachelink_core.manifest import Header, SenderTimings
from cachelink_core.rpc import frames
from cachelink_sender.prefill_job import PrefillJob, aborted

_log = logger(__name__)

_PUT_POLL_S = 0.5


@dataclass
class PumpTimes:
    """Monotonic seconds and sums of one push, on the sender's clock."""

    reserved_at_s: float
    encode_s: float = 0.0
    encoded_at_s: list[float] = field(default_factory=list)
    sent_at_s: list[float] = field(default_factory=list)
    prefilled_at_s: list[float] = field(default_factory=list)
    first_frame_at_s: float = 0.0
    sent_raw_bytes: int = 0
    sent_wire_bytes: int = 0


class Pump:
    """The frames of one handoff, made while they are taken."""

    def __init__(
        self,
        engine: Engine,
        header: Header,
        session: HandoffSession,
        job: PrefillJob,
        cancelled: Callable[[], bool],
    ) -> None:
        """Binds one handoff.

        Args:
            engine: of the sender's model.
            header: as reserved.
            session: the sender's session, admitted.
            job: the prefill whose cache is sent.
            cancelled: whether the caller has gone.
        """
        self.times = PumpTimes(reserved_at_s=time.monotonic())
        self._header = header
        self._session = session
        self._job = job
        self._cancelled = cancelled
        self._encoder = ChunkEncoder(engine, header, job.cache)
        self._queue: queue.Queue[_Frame | CacheLinkError] = queue.Queue(limits.QUEUED_CHUNKS)
        self._stopped = threading.Event()

    def frames(self) -> Iterator[bytes]:
        """Open, chunks, commit: pulled by the stream one at a time.

        Raises:
            CacheLinkError: what went wrong while making them.
        """
        yield frames.encode_open(self._header.handoff_id, self._session.receiver_epoch)
        self._session.handle(
            events.Open(self._header.handoff_id, self._session.receiver_epoch), time.monotonic()
        )
        encoder = threading.Thread(target=self._encode_all, name="encode", daemon=True)
        encoder.start()
        try:
            yield from self._take_all()
        finally:
            self._stopped.set()

    def _take_all(self) -> Iterator[bytes]:
        while True:
            frame = self._next()
            if frame is None:
                continue
            if frame.data is None:
                break
            if not self.times.first_frame_at_s:
                self.times.first_frame_at_s = time.monotonic()
            yield frame.data
            self.times.sent_raw_bytes += frame.raw_bytes
            self.times.sent_wire_bytes += frame.wire_bytes
            if frame.ends_block:
                self.times.sent_at_s.append(time.monotonic())
        seal = self._session.make_seal(self._timings())
        self._session.handle(events.Commit(seal), time.monotonic())
        yield frames.encode_commit(seal)

    def _next(self) -> _Frame | None:
        try:
            item = self._queue.get(timeout=_PUT_POLL_S)
        except queue.Empty:
            if self._cancelled():
                raise aborted() from None
            return None
        if isinstance(item, CacheLinkError):
            raise item
        return item

    def _encode_all(self) -> None:
        try:
            for block in range(self._header.layout.block_count):
                self._encode_block(block)
            self._put(_Frame(None, 0, 0, ends_block=False))
        except _Stopped:
            return
        except CacheLinkError as error:
            self._put_last(error)
        except Exception as error:  # noqa: BLE001 - a thread's error must reach the stream
            _log.exception("encode_failed", handoff_id=self._header.handoff_id, error=str(error))
            self._put_last(InternalError("encoding failed; see the sender's log"))

    def _encode_block(self, block: int) -> None:
        while (ready_s := self._job.wait_block(block)) is None:
            if self._stopped.is_set():
                raise _Stopped
        self.times.prefilled_at_s.append(ready_s)
        if block in self._session.held_blocks:
            self.times.encoded_at_s.append(time.monotonic())
            return
        chunks = self._header.layout.block_chunks(block)
        for number, (_, run) in enumerate(chunks):
            began = time.monotonic()
            parts = self._encoder.encode(block, run)
            digest = self._session.send_chunk(block, run, parts, began)
            data = frames.encode_chunk(block, run, digest, parts)
            self.times.encode_s += time.monotonic() - began
            wire_bytes = sum(part.nbytes for part in parts)
            raw_bytes = self._header.layout.raw_bytes(block, run)
            last = number == len(chunks) - 1
            if last:
                self.times.encoded_at_s.append(time.monotonic())
            self._put(_Frame(data, raw_bytes, wire_bytes, ends_block=last))

    def _put(self, item: _Frame) -> None:
        deadline_s = time.monotonic() + limits.STALL_DEADLINE_S
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_PUT_POLL_S)
            except queue.Full:
                if time.monotonic() > deadline_s:
                    raise LinkTimeout(
                        f"the receiver took no frame for {limits.STALL_DEADLINE_S:g} s"
                    ) from None
            else:
                return
        raise _Stopped

    def _put_last(self, error: CacheLinkError) -> None:
        """Hands an error to the stream, which may have to take a few frames first."""
        while not self._stopped.is_set():
            try:
                self._queue.put(error, timeout=_PUT_POLL_S)
            except queue.Full:
                continue
            return

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
class _Frame:
    data: bytes | None
    raw_bytes: int
    wire_bytes: int
    ends_block: bool


class _Stopped(Exception):
    """The stream has ended and wants no more frames."""
