"""One handoff as a pure state machine: events in, state and ledger out; no IO, no clock, no torch.

Both sides hold a ``HandoffSession``. The sender's records what it sent and makes the seal from it;
the receiver's records what arrived and holds the seal against it. Who calls what, and in which
order, is the table in ``states.py``. An event that the table does not allow, or whose content
contradicts the header, raises and leaves the session exactly as it was.

Times are seconds of any one monotonic clock, passed in by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_128

from cachelink_core.errors import (
    CacheLinkError,
    ChecksumMismatch,
    DuplicateChunk,
    HandoffAborted,
    HandoffExpired,
    LocalProtocolError,
    MissingChunk,
    RemoteProtocolError,
    SealMismatch,
    StaleEpoch,
    UnexpectedChunk,
    WrongLength,
)
from cachelink_core.handoff import events
from cachelink_core.handoff.events import Event
from cachelink_core.handoff.states import TRANSITIONS, State
from cachelink_core.layout import ChunkIndex
from cachelink_core.manifest import (
    ChunkRecord,
    Header,
    Seal,
    SenderTimings,
    digest,
    encode_header,
    seal_root,
)


def chunk_digest(block: int, run: int, *parts: memoryview | bytes) -> bytes:
    """XXH3-128 over the chunk's indices (two little-endian u32) and its wire bytes.

    The indices are part of it, so that a chunk that arrives in another's place is refused.
    It guards against faults, not against people: it has no key. Against people there is TLS.
    """
    hasher = xxh3_128(block.to_bytes(4, "little") + run.to_bytes(4, "little"))
    for part in parts:
        hasher.update(part)
    return hasher.digest()


@dataclass
class HandoffSession:
    """The protocol of one handoff.

    Attributes:
        header: as decoded and checked.
        receiver_epoch: the life of the receiver that admitted it.
        state: where it stands; set by ``handle`` alone.
        touched_s: when it last made progress.
        cache_id: known from Admit on.
        held_blocks: blocks that are not sent.
        error: why it ended, for Refused, Failed and Expired.
    """

    header: Header
    receiver_epoch: str
    touched_s: float
    state: State = State.OFFERED
    cache_id: str = ""
    held_blocks: frozenset[int] = frozenset()
    error: CacheLinkError | None = None
    _ledger: dict[ChunkIndex, ChunkRecord] = field(default_factory=dict)
    _manifest_digest: bytes = b""

    def __post_init__(self) -> None:
        self._manifest_digest = digest(encode_header(self.header))

    def handle(self, event: Event, now_s: float) -> None:
        """Applies one event.

        Raises:
            RemoteProtocolError: the state does not allow it, or its content contradicts the header;
                the session is unchanged. A subclass names what is wrong with a chunk or a seal.
            DataLoss: a digest does not fit; the session is unchanged.
        """
        target = TRANSITIONS[self.state].get(event.kind)
        if target is None:
            raise RemoteProtocolError(
                f"{event.kind.value} is not allowed in state {self.state} "
                f"of handoff {self.header.handoff_id}"
            )
        match event:
            case events.Admit(cache_id, held):
                self.cache_id, self.held_blocks = cache_id, held
            case events.Open(handoff_id, epoch):
                self._check_open(handoff_id, epoch)
            case events.Chunk():
                self._receive(event)
            case events.Commit(seal):
                self._check_seal(seal)
            case events.Refuse(error) | events.Fail(error):
                self.error = error
            case events.Abort(why):
                self.error = HandoffAborted(why or "given up by its caller")
            case events.Expire():
                self.error = HandoffExpired(
                    f"handoff {self.header.handoff_id} made no progress for "
                    f"{self.header.lease_s:g} s"
                )
            case _:
                pass
        self.state = target
        self.touched_s = now_s

    def send_chunk(self, block: int, run: int, parts: Sequence[memoryview], now_s: float) -> bytes:
        """Records a chunk of the sender and returns its digest.

        Args:
            block: index of its block.
            run: index of its run.
            parts: views whose concatenation are the wire bytes.
            now_s: the time.

        Raises:
            LocalProtocolError: the state does not allow it.
            RemoteProtocolError: a subclass, when the chunk is not one of the plan.
        """
        target = TRANSITIONS[self.state].get(events.Chunk.kind)
        if target is None:
            raise LocalProtocolError(
                f"a chunk cannot be sent in state {self.state} of {self.header.handoff_id}"
            )
        wire_bytes = sum(part.nbytes for part in parts)
        raw_bytes = self.check_place(block, run, wire_bytes)
        claimed = chunk_digest(block, run, *parts)
        self._ledger[block, run] = ChunkRecord(block, run, raw_bytes, wire_bytes, claimed)
        self.state, self.touched_s = target, now_s
        return claimed

    def touch(self, now_s: float) -> None:
        """Notes progress that is no event: a heartbeat."""
        self.touched_s = now_s

    def expired(self, now_s: float) -> bool:
        """Whether the lease has run out; the caller then sends ``Expire``."""
        return not self.state.final and now_s - self.touched_s > self.header.lease_s

    def needed_chunks(self) -> Iterator[ChunkIndex]:
        """Chunks that are neither held nor recorded, in the order of the plan."""
        for index in self.header.layout.chunks():
            if index[0] not in self.held_blocks and index not in self._ledger:
                yield index

    @property
    def recorded_chunks(self) -> int:
        """Chunks recorded so far."""
        return len(self._ledger)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes recorded so far."""
        return sum(record.wire_bytes for record in self._ledger.values())

    def complete_blocks(self) -> tuple[int, ...]:
        """Blocks of which every chunk is recorded or held: where a new stream need not begin."""
        layout = self.header.layout
        return tuple(
            block
            for block in range(layout.block_count)
            if block in self.held_blocks
            or all(index in self._ledger for index in layout.block_chunks(block))
        )

    def make_seal(self, timings: SenderTimings) -> Seal:
        """The seal over what this session recorded: the sender's last message.

        Raises:
            MissingChunk: not every chunk was recorded.
        """
        self._check_complete()
        records = self._records()
        return Seal(
            handoff_id=self.header.handoff_id,
            manifest_digest=self._manifest_digest,
            chunk_count=len(records),
            chunks=records,
            root=seal_root(self._manifest_digest, [record.digest for record in records]),
            timings=timings,
        )

    def _records(self) -> tuple[ChunkRecord, ...]:
        return tuple(self._ledger[i] for i in self.header.layout.chunks() if i in self._ledger)

    def _check_open(self, handoff_id: str, epoch: str) -> None:
        if handoff_id != self.header.handoff_id:
            raise RemoteProtocolError(
                f"open names handoff {handoff_id!r}; this is {self.header.handoff_id!r}"
            )
        if epoch != self.receiver_epoch:
            raise StaleEpoch(
                f"open has epoch {epoch!r}; this receiver's is {self.receiver_epoch!r}"
            )

    def _receive(self, chunk: events.Chunk) -> None:
        wire_bytes = sum(part.nbytes for part in chunk.parts)
        raw_bytes = self.check_place(chunk.block, chunk.run, wire_bytes)
        actual = chunk_digest(chunk.block, chunk.run, *chunk.parts)
        if actual != chunk.digest:
            raise ChecksumMismatch(
                f"{_name(chunk.block, chunk.run)}: digest {actual.hex()}, "
                f"claimed {chunk.digest.hex()}"
            )
        self._ledger[chunk.block, chunk.run] = ChunkRecord(
            chunk.block, chunk.run, raw_bytes, wire_bytes, actual
        )

    def check_place(self, block: int, run: int, wire_bytes: int) -> int:
        """Checks a chunk's place and length against the plan, before its payload is taken.

        Returns:
            Its raw bytes.

        Raises:
            UnexpectedChunk: the plan has no such chunk.
            DuplicateChunk: it was recorded or held already.
            WrongLength: it cannot have that many wire bytes.
        """
        layout = self.header.layout
        name = _name(block, run)
        if not (0 <= block < layout.block_count and 0 <= run < len(layout.runs)):
            raise UnexpectedChunk(
                f"{name} is outside {layout.block_count} blocks of {len(layout.runs)} runs"
            )
        raw_bytes = layout.raw_bytes(block, run)
        if not raw_bytes:
            raise UnexpectedChunk(f"{name} holds no tokens: its layers have slid past it")
        if (block, run) in self._ledger or block in self.held_blocks:
            raise DuplicateChunk(f"{name} is there already")
        if self.header.packing.id == "none":
            if wire_bytes != raw_bytes:
                raise WrongLength(f"{name} has {wire_bytes} bytes; the plan says {raw_bytes}")
        elif not 0 < wire_bytes <= raw_bytes + 1:
            raise WrongLength(f"{name} has {wire_bytes} wire bytes for {raw_bytes} raw bytes")
        return raw_bytes

    def _check_complete(self) -> None:
        missing = next(self.needed_chunks(), None)
        if missing is not None:
            count = sum(1 for _ in self.needed_chunks())
            raise MissingChunk(
                f"{count} chunks are missing, the first is (block {missing[0]}, run {missing[1]})"
            )

    def _check_seal(self, seal: Seal) -> None:
        if seal.handoff_id != self.header.handoff_id:
            raise SealMismatch(
                f"seal.handoff_id is {seal.handoff_id!r}, not {self.header.handoff_id!r}"
            )
        if seal.manifest_digest != self._manifest_digest:
            raise SealMismatch(
                f"seal.manifest_digest is {seal.manifest_digest.hex()}, "
                f"not {self._manifest_digest.hex()}"
            )
        self._check_complete()
        if seal.chunk_count != len(self._ledger) or len(seal.chunks) != seal.chunk_count:
            raise SealMismatch(
                f"seal.chunk_count is {seal.chunk_count} with {len(seal.chunks)} records; "
                f"{len(self._ledger)} chunks arrived"
            )
        # In the order of the plan: a seal that names one chunk twice would otherwise hide another.
        for arrived, record in zip(self._records(), seal.chunks, strict=True):
            if arrived != record:
                raise SealMismatch(
                    f"seal's record of chunk (block {record.block}, run {record.run}) is not that "
                    f"of chunk (block {arrived.block}, run {arrived.run}), which arrived"
                )
        root = seal_root(self._manifest_digest, [record.digest for record in seal.chunks])
        if root != seal.root:
            raise SealMismatch(f"seal.root is {seal.root.hex()}, not {root.hex()}")


def _name(block: int, run: int) -> str:
    return f"chunk (block {block}, run {run})"
