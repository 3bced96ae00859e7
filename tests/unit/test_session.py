"""The session: what it allows, what it refuses, and that a refusal leaves it as it was."""

import copy
import dataclasses

import pytest

from cachelink_core.codec_spec import ZSTD
from cachelink_core.errors import (
    ChecksumMismatch,
    DuplicateChunk,
    HandoffAborted,
    HandoffExpired,
    HandoffFailed,
    MissingChunk,
    RemoteProtocolError,
    SealMismatch,
    StaleEpoch,
    UnexpectedChunk,
    WrongLength,
)
from cachelink_core.handoff import (
    TRANSITIONS,
    EventKind,
    HandoffSession,
    State,
    chunk_digest,
    events,
)
from cachelink_core.manifest import ChunkRecord, SenderTimings, seal_root
from cachelink_core.testing import handoffs

HEADER = handoffs.header()
COMMIT = handoffs.commit(HEADER)
EVENTS = {
    EventKind.ADMIT: events.Admit("cache-2", frozenset({1})),
    EventKind.REFUSE: events.Refuse(HandoffFailed("no")),
    EventKind.OPEN: events.Open(HEADER.handoff_id, handoffs.RECEIVER_EPOCH),
    EventKind.CHUNK: handoffs.chunk(HEADER, 0, 0),
    EventKind.BREAK: events.Break(),
    EventKind.COMMIT: COMMIT,
    EventKind.MAP: events.Map(),
    EventKind.INSTALL: events.Install(),
    EventKind.FAIL: events.Fail(HandoffFailed("no")),
    EventKind.ABORT: events.Abort("because"),
    EventKind.EXPIRE: events.Expire(),
}


def at(state: State) -> HandoffSession:
    """A session that came to ``state`` the usual way."""
    session = HandoffSession(HEADER, handoffs.RECEIVER_EPOCH, 0.0)
    ways = {
        State.OFFERED: [],
        State.REFUSED: [EventKind.REFUSE],
        State.FAILED: [EventKind.FAIL],
        State.EXPIRED: [EventKind.EXPIRE],
        State.ADMITTED: [],
    }
    if state in ways and state is not State.ADMITTED:
        for kind in ways[state]:
            session.handle(EVENTS[kind], 1.0)
        return session
    session.handle(events.Admit("cache-1"), 1.0)
    if state is State.ADMITTED:
        return session
    session.handle(EVENTS[EventKind.OPEN], 2.0)
    if state is State.RECEIVING:
        return session
    for chunk in handoffs.chunks(HEADER):
        session.handle(chunk, 3.0)
    for kind in (EventKind.COMMIT, EventKind.MAP, EventKind.INSTALL):
        session.handle(EVENTS[kind], 4.0)
        if session.state is state:
            return session
    raise AssertionError(state)


def snapshot(session: HandoffSession) -> dict[str, object]:
    return copy.deepcopy({f.name: getattr(session, f.name) for f in dataclasses.fields(session)})


def unchanged_after(session: HandoffSession, event: events.Event, error: type[Exception]) -> str:
    """Asserts that the event raises and changes nothing; returns the message."""
    before = snapshot(session)
    with pytest.raises(error) as caught:
        session.handle(event, 99.0)
    assert type(caught.value) is error
    after = snapshot(session)
    for name, value in before.items():
        if name == "error":  # exceptions compare by identity, and a copy is another one
            assert type(after[name]) is type(value)
            assert str(after[name]) == str(value)
        else:
            assert after[name] == value, name
    return str(caught.value)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", list(EventKind))
def test_the_table_decides_and_an_illegal_event_changes_nothing(state, kind):
    session = at(state)
    target = TRANSITIONS[state].get(kind)
    if target is None:
        message = unchanged_after(session, EVENTS[kind], RemoteProtocolError)
        assert kind.value in message
        assert state.value in message
        assert HEADER.handoff_id in message
        return
    if kind is EventKind.COMMIT:
        for chunk in handoffs.chunks(HEADER):
            session.handle(chunk, 3.0)
    session.handle(EVENTS[kind], 99.0)
    assert session.state is target
    assert session.touched_s == 99.0


def test_endings_keep_their_reason():
    failed, aborted, expired = (at(State.RECEIVING) for _ in range(3))
    failed.handle(EVENTS[EventKind.FAIL], 5.0)
    aborted.handle(EVENTS[EventKind.ABORT], 5.0)
    expired.handle(EVENTS[EventKind.EXPIRE], 5.0)
    assert isinstance(failed.error, HandoffFailed)
    assert isinstance(aborted.error, HandoffAborted)
    assert str(aborted.error) == "because"
    assert isinstance(expired.error, HandoffExpired)
    assert "30 s" in str(expired.error)


def test_the_lease_runs_from_the_last_progress():
    session = at(State.RECEIVING)  # touched at 2.0, lease 30 s
    assert not session.expired(32.0)
    assert session.expired(32.1)
    session.touch(30.0)
    assert not session.expired(60.0)
    assert session.expired(60.1)
    session.handle(events.Expire(), 61.0)
    assert not session.expired(1e9)


def test_open_names_this_handoff_and_this_life():
    session = at(State.ADMITTED)
    unchanged_after(session, events.Open("other", handoffs.RECEIVER_EPOCH), RemoteProtocolError)
    message = unchanged_after(session, events.Open(HEADER.handoff_id, "old"), StaleEpoch)
    assert "'old'" in message
    assert handoffs.RECEIVER_EPOCH in message


@pytest.mark.parametrize(("block", "run"), [(3, 0), (0, 3), (2**31, 0), (-1, 0), (0, -1)])
def test_a_chunk_outside_the_plan_is_unexpected(block, run):
    chunk = events.Chunk(block, run, memoryview(b"x"), bytes(16))
    message = unchanged_after(at(State.RECEIVING), chunk, UnexpectedChunk)
    assert "3 blocks of 3 runs" in message


def test_a_chunk_of_layers_that_slid_past_is_unexpected():
    assert HEADER.layout.raw_bytes(0, 1) == 0
    chunk = events.Chunk(0, 1, memoryview(b"x"), chunk_digest(0, 1, b"x"))
    assert "slid" in unchanged_after(at(State.RECEIVING), chunk, UnexpectedChunk)


def test_a_chunk_twice_is_a_duplicate():
    session = at(State.RECEIVING)
    session.handle(handoffs.chunk(HEADER, 1, 1), 3.0)
    unchanged_after(session, handoffs.chunk(HEADER, 1, 1), DuplicateChunk)


def test_a_chunk_of_a_held_block_is_a_duplicate():
    session = handoffs.admitted(HEADER, frozenset({0}))
    session.handle(EVENTS[EventKind.OPEN], 1.0)
    unchanged_after(session, handoffs.chunk(HEADER, 0, 0), DuplicateChunk)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_chunk_of_another_length_is_refused_with_both(difference):
    planned = HEADER.layout.raw_bytes(1, 0)
    data = bytes(planned + difference)
    chunk = events.Chunk(1, 0, memoryview(data), chunk_digest(1, 0, data))
    message = unchanged_after(at(State.RECEIVING), chunk, WrongLength)
    assert str(planned) in message
    assert str(planned + difference) in message


def test_a_packed_chunk_may_be_shorter_but_not_longer_than_stored():
    header = handoffs.header(packing=ZSTD)
    raw = header.layout.raw_bytes(1, 0)
    for length, fits in ((1, True), (raw + 1, True), (raw + 2, False), (0, False)):
        session = handoffs.receiving(header)
        data = bytes(length)
        chunk = events.Chunk(1, 0, memoryview(data), chunk_digest(1, 0, data))
        if fits:
            session.handle(chunk, 3.0)
            assert session.wire_bytes == length
        else:
            unchanged_after(session, chunk, WrongLength)


def test_a_chunk_in_the_place_of_another_fails_its_digest():
    moved = handoffs.chunk(HEADER, 0, 0)
    assert HEADER.layout.raw_bytes(0, 0) == HEADER.layout.raw_bytes(1, 0)
    chunk = events.Chunk(1, 0, moved.payload, moved.digest)
    unchanged_after(at(State.RECEIVING), chunk, ChecksumMismatch)


def test_parts_digest_like_their_concatenation():
    assert chunk_digest(1, 2, b"ab", b"", b"c") == chunk_digest(1, 2, memoryview(b"abc"))
    assert chunk_digest(1, 2, b"abc") != chunk_digest(2, 1, b"abc")


def test_a_commit_before_every_chunk_names_the_first_missing():
    session = at(State.RECEIVING)
    missing = [(0, 2), (2, 1)]
    for chunk in handoffs.chunks(HEADER):
        if (chunk.block, chunk.run) not in missing:
            session.handle(chunk, 3.0)
    assert list(session.needed_chunks()) == missing
    assert session.complete_blocks() == (1,)
    message = unchanged_after(session, COMMIT, MissingChunk)
    assert "2 chunks" in message
    assert "(block 0, run 2)" in message
    with pytest.raises(MissingChunk):
        session.make_seal(SenderTimings())


def test_held_blocks_are_neither_needed_nor_sealed():
    sender, receiver = (handoffs.admitted(HEADER, frozenset({0, 2})) for _ in range(2))
    for session in (sender, receiver):
        session.handle(EVENTS[EventKind.OPEN], 1.0)
        for block, run in list(session.needed_chunks()):
            assert block == 1
            session.handle(handoffs.chunk(HEADER, block, run), 1.0)
        assert session.complete_blocks() == (0, 1, 2)
    seal = sender.make_seal(SenderTimings())
    assert seal.chunk_count == 3
    receiver.handle(events.Commit(seal), 2.0)
    assert receiver.state is State.VERIFIED


def test_a_prefix_of_no_tokens_is_committed_without_a_chunk():
    header = handoffs.header(0)
    session = handoffs.receiving(header)
    commit = handoffs.commit(header)
    assert commit.seal.chunks == ()
    session.handle(commit, 1.0)
    assert session.state is State.VERIFIED


def test_a_broken_stream_keeps_what_arrived():
    session = at(State.RECEIVING)
    session.handle(handoffs.chunk(HEADER, 0, 0), 3.0)
    session.handle(events.Break(), 4.0)
    assert session.state is State.ADMITTED
    session.handle(EVENTS[EventKind.OPEN], 5.0)
    assert (0, 0) not in list(session.needed_chunks())
    assert session.recorded_chunks == 1


def _wrong_seals():
    seal = COMMIT.seal
    first, *rest = seal.chunks

    def record(**changes):
        fields = {name: getattr(first, name) for name in ChunkRecord.__struct_fields__}
        return (ChunkRecord(**{**fields, **changes}), *rest)

    def replaced(**changes):
        return type(seal)(
            **{**{name: getattr(seal, name) for name in type(seal).__struct_fields__}, **changes}
        )

    yield "handoff_id", replaced(handoff_id="other")
    yield "manifest_digest", replaced(manifest_digest=bytes(32))
    yield "chunk_count", replaced(chunk_count=seal.chunk_count + 1)
    yield "chunk_count", replaced(chunk_count=2**63 - 1)
    yield "chunk_count", replaced(chunks=seal.chunks[:-1])
    yield "chunk_count", replaced(chunks=(*seal.chunks, first))
    yield "record", replaced(chunks=record(wire_bytes=first.wire_bytes - 1))
    yield "record", replaced(chunks=record(raw_bytes=2**63 - 1))
    yield "record", replaced(chunks=record(digest=bytes(16)))
    yield "record", replaced(chunks=record(block=7))
    yield "root", replaced(root=bytes(32))
    yield "order", replaced(chunks=(*rest, first))
    twice = (first, first, *rest[1:])
    root = seal_root(seal.manifest_digest, [each.digest for each in twice])
    yield "twice", replaced(chunks=twice, root=root)


@pytest.mark.parametrize(("what", "seal"), list(_wrong_seals()))
def test_a_seal_that_contradicts_what_arrived_is_refused(what, seal):
    session = at(State.RECEIVING)
    for chunk in handoffs.chunks(HEADER):
        session.handle(chunk, 3.0)
    unchanged_after(session, events.Commit(seal), SealMismatch)
    session.handle(COMMIT, 5.0)  # the right one still goes through
    assert session.state is State.VERIFIED
