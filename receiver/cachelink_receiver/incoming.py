"""One handoff at the receiver: session, destination and clock marks, with a single owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import ChunkInstaller
from cachelink_core.engine.mapped_chunks import MappedInstaller
from cachelink_core.engine.store import Reservation
from cachelink_core.errors import CacheLinkError, PeerGone
from cachelink_core.handoff import HandoffSession, State, events
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import Header, Seal
from cachelink_core.rpc.handlers import Frame
from cachelink_core.transport.mapper import Mapper


@dataclass
class Marks:
    """Monotonic seconds on the receiver's clock."""

    opened_s: float = 0.0
    last_frame_s: float = 0.0
    decoded_s: float = 0.0
    verify_s: float = 0.0
    device_wait_s: float = 0.0
    verified_at_s: list[float] = field(default_factory=list)
    installed_at_s: list[float] = field(default_factory=list)


class BlockCounter:
    """Counts chunks down to the moment at which a block is complete.

    Making one lays out the whole plan, which takes milliseconds.
    """

    def __init__(self, header: Header) -> None:
        self._left = [len(header.layout.block_chunks(b)) for b in range(header.layout.block_count)]

    def done(self, block: int) -> bool:
        """Notes one chunk of ``block``; whether it was the last."""
        self._left[block] -= 1
        return not self._left[block]


@dataclass
class Incoming:
    """A handoff from Reserve to its end.

    ``lock`` orders the stream's thread, the lease's reaper and Abort: whoever moves the session
    holds it. The destination belongs to this object until it is published or released.
    """

    tenant: str
    session: HandoffSession
    cache: PrefixCache
    reservation: Reservation
    check_s: float
    admitted_s: float
    mapper: Mapper | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: threading.Event = field(default_factory=threading.Event)
    marks: Marks = field(default_factory=Marks)
    blocks: BlockCounter = field(init=False)

    def __post_init__(self) -> None:
        """Lays out the plan now, while the sender waits for its reservation and not for a chunk."""
        self.blocks = BlockCounter(self.header)

    @property
    def header(self) -> Header:
        """As admitted."""
        return self.session.header

    def ended_badly(self) -> bool:
        """Whether it was ended before its commit: nobody wants its frames any more."""
        return self.ended.is_set() and self.session.error is not None

    def end(self, event: events.Fail | events.Abort | events.Expire) -> int:
        """Ends it badly and frees everything; does nothing if it has ended.

        Returns:
            Bytes freed.
        """
        with self.lock:
            if self.session.state.final:
                return 0
            self.session.handle(event, time.monotonic())
            freed = self.reservation.nbytes
            self.free()
        return freed

    def free(self) -> None:
        """Gives the reservation back and wakes whoever waits for the end; idempotent."""
        self.reservation.release()
        self.ended.set()


class ChunkSink:
    """Takes verified chunks into the destination and keeps the marks."""

    def __init__(self, engine: Engine, incoming: Incoming) -> None:
        self._engine = engine
        self._incoming = incoming
        self.installer: ChunkInstaller | MappedInstaller = (
            ChunkInstaller(engine, incoming.header, incoming.cache)
            if incoming.mapper is None
            else MappedInstaller(engine, incoming.header, incoming.cache, incoming.mapper)
        )

    def watched(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        """The frames of the stream; if it breaks because the handoff has ended, that is the reason.

        Raises:
            CacheLinkError: why the handoff ended, or what broke the stream.
        """
        try:
            yield from frames
        except PeerGone:
            with self._incoming.lock:
                self._check_alive()
            raise

    def place(self, block: int, run: int, wire_bytes: int, /) -> Sequence[memoryview]:
        """Where a chunk's payload belongs; see ``handlers.Place``.

        The bytes lie there before their digest is known. That is safe: the destination is nobody
        else's until the commit, and a chunk that fails ends the handoff.

        Raises:
            CacheLinkError: the plan has no such chunk, or it is there already, or the handoff ended.
        """
        incoming = self._incoming
        with incoming.lock:
            self._check_alive()
            incoming.session.check_place(block, run, wire_bytes)
            return self.installer.place(block, run)

    def take(self, chunk: events.Chunk) -> None:
        """Verifies and installs one chunk.

        Raises:
            CacheLinkError: it is not what the plan and its digest say, or the handoff has ended.
        """
        incoming, marks = self._incoming, self._incoming.marks
        began = time.monotonic()
        with incoming.lock:
            self._check_alive()
            incoming.session.handle(chunk, began)
        verified = time.monotonic()
        marks.verify_s += verified - began
        if not chunk.placed:
            self._install(chunk)
        marks.decoded_s = time.monotonic()
        if incoming.blocks.done(chunk.block):
            marks.verified_at_s.append(verified - incoming.admitted_s)
            marks.installed_at_s.append(marks.decoded_s - incoming.admitted_s)

    def _install(self, chunk: events.Chunk) -> None:
        incoming = self._incoming
        with self._engine.device_turn(urgent=False) as turn:
            # Held over the write: Abort and expiry free the destination under the same lock.
            with incoming.lock:
                self._check_alive()
                self.installer.install(chunk.block, chunk.run, chunk.payload)
            incoming.marks.device_wait_s += turn.waited_s

    def commit(self, seal: Seal) -> None:
        """Holds the seal against what arrived; the session is then Mapped.

        Raises:
            CacheLinkError: they differ, or the handoff has ended.
        """
        incoming = self._incoming
        with incoming.lock:
            self._check_alive()
            incoming.session.handle(events.Commit(seal), time.monotonic())
        # Without the lock: on a device it waits for what is queued, and leases are looked at under it.
        self.installer.finish()
        with incoming.lock:
            self._check_alive()
            incoming.session.handle(events.Map(), time.monotonic())

    def _check_alive(self) -> None:
        session = self._incoming.session
        if session.state in (State.EXPIRED, State.FAILED) and session.error is not None:
            raise _again(session.error)


def _again(error: CacheLinkError) -> CacheLinkError:
    """A fresh copy of an error, so that two threads never raise one object."""
    return type(error)(*error.args)
