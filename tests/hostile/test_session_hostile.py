"""Streams that were damaged on the way: no altered byte ever ends in Verified."""

import random

import pytest

from cachelink_core.codec_spec import INT4, ZSTD
from cachelink_core.errors import (
    CacheLinkError,
    ChecksumMismatch,
    DuplicateChunk,
    MissingChunk,
    RemoteProtocolError,
    SealMismatch,
    UnexpectedChunk,
)
from cachelink_core.handoff import HandoffSession, State, chunk_digest, events
from cachelink_core.manifest import Header, decode_header, digest, encode_header, encode_seal
from cachelink_core.rpc import frames
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.testing import handoffs

HEADERS = {"native": handoffs.header(), "int4+zstd": handoffs.header(codec=INT4, packing=ZSTD)}


def sent_by(header: Header) -> list[bytes]:
    """Every frame of an honest sender."""
    chunks = [
        frames.encode_chunk(each.block, each.run, each.digest, [each.payload])
        for each in handoffs.chunks(header)
    ]
    return [
        frames.encode_open(header.handoff_id, handoffs.RECEIVER_EPOCH),
        *chunks,
        frames.encode_commit(handoffs.commit(header).seal),
    ]


def received(header: Header, stream: list[bytes]) -> HandoffSession:
    """What a receiver makes of a stream; raises what it would refuse with."""
    session = handoffs.admitted(header)
    for frame in stream:
        session.handle(frames.decode_frame(frame), 1.0)
    return session


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("name", HEADERS)
def test_an_undamaged_stream_is_verified(name):
    assert received(HEADERS[name], sent_by(HEADERS[name])).state is State.VERIFIED


@pytest.mark.parametrize("name", HEADERS)
def test_no_flipped_bit_of_a_stream_is_accepted(name):
    header, rng = HEADERS[name], random.Random(3)
    stream = sent_by(header)
    accepted = 0
    for _ in range(1_000):
        number = rng.randrange(len(stream))
        bit = rng.randrange(8 * len(stream[number]))
        damaged = [*stream[:number], flipped(stream[number], bit), *stream[number + 1 :]]
        try:
            accepted += received(header, damaged).state is State.VERIFIED
        except CacheLinkError:
            continue
    assert accepted == 0


@pytest.mark.parametrize("name", HEADERS)
def test_no_flipped_bit_of_open_and_commit_is_accepted(name):
    """The short frames once more, bit by bit: they are too small for the random choice above."""
    header = HEADERS[name]
    stream = sent_by(header)
    for number in (0, len(stream) - 1):
        for bit in range(8 * len(stream[number])):
            damaged = [*stream[:number], flipped(stream[number], bit), *stream[number + 1 :]]
            with pytest.raises(CacheLinkError):
                received(header, damaged)


@pytest.mark.parametrize("name", HEADERS)
def test_no_flipped_bit_of_a_header_is_accepted(name):
    """Most do not decode; what decodes has another digest, and the seal then does not fit."""
    data = encode_header(HEADERS[name])
    stream, rng, decoded = sent_by(HEADERS[name]), random.Random(5), 0
    for _ in range(1_000):
        damaged = flipped(data, rng.randrange(8 * len(data)))
        assert digest(damaged) != digest(data)  # what Reserve compares first
        try:
            header = decode_header(damaged)
            decoded += 1
            received(header, stream)
        except CacheLinkError:
            continue
        pytest.fail("a damaged header was accepted")
    assert decoded > 50  # token ids and digests have no redundancy of their own


@pytest.mark.parametrize("name", HEADERS)
def test_a_stream_cut_anywhere_is_never_verified(name):
    header = HEADERS[name]
    stream = sent_by(header)
    for number in range(len(stream)):
        assert received(header, stream[:number]).state is not State.VERIFIED
        rng = random.Random(number)
        for length in {0, 1, *(rng.randrange(len(stream[number])) for _ in range(40))}:
            with pytest.raises(CacheLinkError):
                received(header, [*stream[:number], stream[number][:length]])


def test_a_missing_chunk_is_named():
    header = HEADERS["native"]
    stream = sent_by(header)
    for number, (block, run) in enumerate(header.layout.chunks(), start=1):
        with pytest.raises(MissingChunk, match=rf"\(block {block}, run {run}\)"):
            received(header, [*stream[:number], *stream[number + 1 :]])


def test_a_chunk_twice_is_refused():
    header = HEADERS["native"]
    stream = sent_by(header)
    for number in range(1, len(stream) - 1):
        with pytest.raises(DuplicateChunk):
            received(header, [*stream[:number], stream[number], *stream[number:]])


def test_chunks_in_another_order_are_the_same_cache():
    header = HEADERS["native"]
    first, *chunks, last = sent_by(header)
    random.Random(1).shuffle(chunks)
    assert received(header, [first, *chunks, last]).state is State.VERIFIED


def test_two_payloads_exchanged_are_refused():
    header = HEADERS["native"]
    session = handoffs.receiving(header)
    one, other = handoffs.chunk(header, 0, 0), handoffs.chunk(header, 1, 0)
    swapped = events.Chunk(one.block, one.run, other.payload, other.digest)
    with pytest.raises(ChecksumMismatch, match="block 0, run 0"):
        session.handle(swapped, 1.0)


def test_the_right_chunks_of_another_handoff_do_not_fit_the_seal():
    """Every digest fits its bytes, and still these are not the bytes that were sealed."""
    header = HEADERS["native"]
    session = handoffs.receiving(header)
    for block, run in header.layout.chunks():
        data = bytes(header.layout.raw_bytes(block, run))
        session.handle(
            events.Chunk(block, run, memoryview(data), chunk_digest(block, run, data)), 1.0
        )
    with pytest.raises(SealMismatch):
        session.handle(handoffs.commit(header), 1.0)
    assert session.state is State.RECEIVING


def test_a_seal_of_another_header_is_refused():
    stream = sent_by(HEADERS["native"])
    other = handoffs.header(41)
    stream[-1] = frames.encode_commit(handoffs.commit(other).seal)
    with pytest.raises(SealMismatch, match="manifest_digest"):
        received(HEADERS["native"], stream)


@pytest.mark.parametrize("index", [2**31, 2**32 - 1])
def test_indices_as_large_as_they_get_are_refused(index):
    for block, run in ((index, 0), (0, index), (index, index)):
        frame = frames.encode_chunk(block, run, bytes(16), [b"x"])
        with pytest.raises(UnexpectedChunk):
            handoffs.receiving(HEADERS["native"]).handle(frames.decode_frame(frame), 1.0)


def test_a_stream_that_begins_or_goes_on_wrongly_is_refused():
    header = HEADERS["native"]
    first, *chunks, last = sent_by(header)
    for stream in (chunks, [last], [first, first], [first, *chunks, last, chunks[0]]):
        with pytest.raises(RemoteProtocolError, match="is not allowed in state"):
            received(header, stream)


def test_a_seal_with_a_good_digest_but_altered_records_is_refused():
    """A peer that means harm digests its own seal correctly; the ledger still does not fit."""
    header = HEADERS["native"]
    stream = sent_by(header)
    honest = pb.PushChunksRequest.FromString(stream[-1]).commit.seal
    assert honest == encode_seal(handoffs.commit(header).seal)
    rng, refused = random.Random(9), 0
    for _ in range(1_000):
        seal = flipped(honest, rng.randrange(8 * (honest.index(b"timings") - 1)))
        commit = pb.TransferCommit(seal=seal, seal_digest=frames.seal_digest(seal))
        try:
            received(
                header, [*stream[:-1], pb.PushChunksRequest(commit=commit).SerializeToString()]
            )
        except CacheLinkError:
            refused += 1
    assert refused == 1_000
