"""Nodes without a model, for tests of everything between two of them.

The receiver keeps real sessions and the bytes it was sent; the answers are scripted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from cachelink_core.errors import TruncatedStream, UnknownCache
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.handoff.events import Chunk, Commit
from cachelink_core.manifest import decode_header
from cachelink_core.planner import Measurement
from cachelink_core.rpc.handlers import Call, Frame
from cachelink_core.rpc.transfer_types import HandoffStatus, PushReceipt, Reservation
from cachelink_core.rpc.types import (
    AnswerRequest,
    CacheInfo,
    CacheList,
    Delta,
    Final,
    HandoffRequest,
    NodeInfo,
    PrefixSource,
    Progress,
    Receipt,
    Role,
)
from cachelink_core.testing import handoffs


@dataclass
class ScriptedNode:
    """What both have.

    Attributes:
        role: as ping shows it.
        words: of every answer.
        word_s: time between two words.
        fails_with: raised by every method that has work to do.
        answered: requests so far, with their calls.
        stopped: set when an answer's generator was closed or ended.
        steps: words generated so far.
    """

    role: Role
    words: tuple[str, ...] = ("one ", "two ", "three")
    word_s: float = 0.0
    fails_with: BaseException | None = None
    answered: list[tuple[AnswerRequest, Call]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    steps: int = 0

    def answer(self, request: AnswerRequest, call: Call) -> Iterator[Delta | Final]:
        """Says the words."""
        self.answered.append((request, call))
        self._maybe_fail()
        try:
            for number, word in enumerate(self.words):
                if call.cancelled():
                    return
                self.steps += 1
                yield Delta(word, (number,))
                time.sleep(self.word_s)
            yield Final("exact", "scripted", 3, 2, len(self.words), 4, "stop", {"total": 0.5})
        finally:
            self.stopped.set()

    def caches(self, call: Call) -> CacheList:
        """One cache, named after the caller's tenant."""
        self._maybe_fail()
        info = CacheInfo(
            f"cache-of-{call.tenant}", "handoff-1", 3, 10, "lossy", "int4", 1.5, 0.5, 2
        )
        return CacheList((info,), 10, 20, 30)

    def evict(self, cache_id: str, call: Call) -> int:
        """Frees 10 bytes of that cache."""
        self._maybe_fail()
        if cache_id != f"cache-of-{call.tenant}":
            raise UnknownCache(f"cache {cache_id!r} is not installed")
        return 10

    def info(self, call: Call) -> NodeInfo:
        """Who this is."""
        del call
        self._maybe_fail()
        return NodeInfo(
            role=self.role,
            version="0.1.0",
            schema_version=1,
            epoch=handoffs.RECEIVER_EPOCH,
            identity=handoffs.identity(),
            model_name="planted",
            codecs=("native", "int4"),
            packings=("none",),
            receivers=("near",),
            max_positions=4096,
            transfers=1,
            transfer_slots=2,
            answers=3,
            answer_slots=4,
            measurements=(Measurement("near/link", 1.25e8, "B/s", 3),),
        )

    def _maybe_fail(self) -> None:
        if self.fails_with is not None:
            raise self.fails_with


@dataclass
class ScriptedSender(ScriptedNode):
    """A sender whose handoffs are scripted."""

    requested: list[HandoffRequest | PrefixSource] = field(default_factory=list)

    def handoff(self, request: HandoffRequest, call: Call) -> Iterator[Progress | Receipt]:
        """Two steps and a receipt."""
        self.requested.append(request)
        yield from self._steps("handoff-1", call)

    def prefill(self, prefix: PrefixSource, call: Call) -> Iterator[Progress | Receipt]:
        """The same."""
        self.requested.append(prefix)
        yield from self._steps("", call)

    def _steps(self, handoff_id: str, call: Call) -> Iterator[Progress | Receipt]:
        self._maybe_fail()
        try:
            for prefilled in (16, 32):
                if call.cancelled():
                    return
                yield Progress(handoff_id, 32, prefilled, 100, 3 * prefilled, 2 * prefilled)
                time.sleep(self.word_s)
            yield Receipt(
                handoff_id, "cache-1", "cache-0", 32, 32, "int4+zstd", "lossy", 64, 256, 4
            )
        finally:
            self.stopped.set()


@dataclass
class ScriptedReceiver(ScriptedNode):
    """A receiver that keeps what it is sent.

    Attributes:
        sessions: by handoff id.
        payloads: bytes of every chunk accepted.
        chunk_s: time that each chunk takes.
        ended_with: what the last push raised, if anything.
        pushed: set when a push has ended, however.
    """

    sessions: dict[str, HandoffSession] = field(default_factory=dict)
    payloads: dict[tuple[int, int], bytes] = field(default_factory=dict)
    chunk_s: float = 0.0
    ended_with: BaseException | None = None
    pushed: threading.Event = field(default_factory=threading.Event)

    def reserve(self, header: bytes, call: Call) -> Reservation:
        """Admits every valid header."""
        del call
        self._maybe_fail()
        decoded = decode_header(header)
        session = HandoffSession(decoded, handoffs.RECEIVER_EPOCH, time.monotonic())
        session.handle(events.Admit("cache-1"), time.monotonic())
        self.sessions[decoded.handoff_id] = session
        return Reservation(
            decoded.handoff_id, "cache-1", handoffs.RECEIVER_EPOCH, decoded.lease_s, (), "none", "x"
        )

    def push(self, frames: Iterator[Frame], call: Call) -> PushReceipt:
        """Checks every frame with the session."""
        del call
        try:
            return self._received(frames)
        except BaseException as error:
            self.ended_with = error
            raise
        finally:
            self.pushed.set()

    def status(self, handoff_id: str, call: Call) -> HandoffStatus:
        """Of the session."""
        session = self._session(handoff_id, call)
        blocks = session.complete_blocks()
        return HandoffStatus(session.state, blocks, session.cache_id, session.error, 1.5)

    def heartbeat(self, handoff_id: str, receiver_epoch: str, call: Call) -> float:
        """Renews the lease."""
        del receiver_epoch
        session = self._session(handoff_id, call)
        session.touch(time.monotonic())
        return session.header.lease_s

    def abort(self, handoff_id: str, why: str, call: Call) -> int:
        """Aborts the session."""
        self._session(handoff_id, call).handle(events.Abort(why), time.monotonic())
        return 7

    def _session(self, handoff_id: str, call: Call) -> HandoffSession:
        if handoff_id not in self.sessions:
            raise UnknownCache(f"handoff {handoff_id!r} of tenant {call.tenant!r} is unknown")
        return self.sessions[handoff_id]

    def _received(self, frames: Iterator[Frame]) -> PushReceipt:
        self._maybe_fail()
        session = next(iter(self.sessions.values()))
        for frame in frames:
            session.handle(frame, time.monotonic())
            if isinstance(frame, Chunk):
                self.payloads[frame.block, frame.run] = bytes(frame.payload)
                time.sleep(self.chunk_s)
            if isinstance(frame, Commit):
                break
        else:
            raise TruncatedStream("the stream ended without a commit")
        for event in (events.Map(), events.Install()):
            session.handle(event, time.monotonic())
        return PushReceipt(
            session.header.handoff_id,
            session.cache_id,
            session.state,
            session.header.trust,
            session.wire_bytes,
            session.recorded_chunks,
        )
