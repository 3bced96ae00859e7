"""The hand-written frames and the generated code read each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from cachelink_core import limits
from cachelink_core.errors import ChecksumMismatch, ManifestError, RemoteProtocolError, WrongLength
from cachelink_core.handoff.events import Chunk, Commit, Open
from cachelink_core.rpc import frames
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.testing import handoffs

DIGEST = bytes(range(16))
U32 = st.integers(0, 2**32 - 1)


def as_message(frame: bytes) -> pb.PushChunksRequest:
    return pb.PushChunksRequest.FromString(frame)


@given(block=U32, run=U32, parts=st.lists(st.binary(max_size=300), max_size=5))
def test_generated_code_reads_what_is_framed_by_hand(block, run, parts):
    frame = frames.encode_chunk(block, run, DIGEST, [memoryview(part) for part in parts])
    message = as_message(frame)
    assert type(frame) is bytes
    assert (message.block, message.run, message.digest) == (block, run, DIGEST)
    assert message.payload == b"".join(parts)


@given(block=U32, run=U32, payload=st.binary(min_size=1, max_size=300))
def test_generated_code_writes_the_very_same_bytes(block, run, payload):
    message = pb.PushChunksRequest(block=block, run=run, digest=DIGEST, payload=payload)
    assert frames.encode_chunk(block, run, DIGEST, [payload]) == message.SerializeToString()


@given(block=U32, run=U32, payload=st.binary(min_size=1, max_size=300))
def test_what_generated_code_writes_is_read_by_hand(block, run, payload):
    message = pb.PushChunksRequest(block=block, run=run, digest=DIGEST, payload=payload)
    chunk = frames.decode_frame(message.SerializeToString())
    assert isinstance(chunk, Chunk)
    assert (chunk.block, chunk.run, chunk.digest) == (block, run, DIGEST)
    assert chunk.payload == payload


@given(payload=st.binary(min_size=1, max_size=300), order=st.permutations(range(4)))
def test_fields_in_any_order_are_read_by_the_generated_parser(payload, order):
    fields = [
        pb.PushChunksRequest(block=7),
        pb.PushChunksRequest(run=300),
        pb.PushChunksRequest(digest=DIGEST),
        pb.PushChunksRequest(payload=payload),
    ]
    chunk = frames.decode_frame(b"".join(fields[i].SerializeToString() for i in order))
    assert (chunk.block, chunk.run, chunk.digest, bytes(chunk.payload)) == (7, 300, DIGEST, payload)


def test_the_payload_is_a_view_of_the_message():
    frame = frames.encode_chunk(1, 2, DIGEST, [b"payload"])
    chunk = frames.decode_frame(frame)
    assert isinstance(chunk.payload, memoryview)
    assert chunk.payload.obj is frame


def test_wide_parts_are_joined_by_their_bytes():
    part = memoryview(bytes(range(16))).cast("f")
    chunk = frames.decode_frame(frames.encode_chunk(0, 0, DIGEST, [part]))
    assert chunk.payload == bytes(range(16))


def test_an_unknown_field_is_ignored_as_in_any_protobuf():
    unknown = b"\xa2\x06\x03new"  # field 100
    chunk = frames.decode_frame(unknown + frames.encode_chunk(3, 4, DIGEST, [b"x"]))
    assert (chunk.block, chunk.run, bytes(chunk.payload)) == (3, 4, b"x")


def test_open_and_commit_pass_both_ways():
    assert frames.decode_frame(frames.encode_open("h", "e")) == Open("h", "e")
    commit = handoffs.commit(handoffs.header())
    assert frames.decode_frame(frames.encode_commit(commit.seal)) == Commit(commit.seal)
    assert as_message(frames.encode_open("h", "e")).open.receiver_epoch == "e"


def test_a_full_chunk_passes_and_fits_a_default_peer():
    frame = frames.encode_chunk(2**32 - 1, 2**32 - 1, DIGEST, [bytes(limits.MAX_CHUNK_WIRE_BYTES)])
    assert len(frame) <= limits.MAX_DATA_MESSAGE_BYTES
    assert frames.decode_frame(frame).payload.nbytes == limits.MAX_CHUNK_WIRE_BYTES


def test_a_payload_above_the_limit_is_refused_with_both_numbers():
    frame = frames.encode_chunk(0, 0, DIGEST, [bytes(limits.MAX_CHUNK_WIRE_BYTES + 1)])
    with pytest.raises(
        WrongLength, match=f"{limits.MAX_CHUNK_WIRE_BYTES + 1}.*1 to {limits.MAX_CHUNK_WIRE_BYTES}"
    ):
        frames.decode_frame(frame)


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_digest_of_another_length_is_refused(length):
    frame = pb.PushChunksRequest(block=1, digest=bytes(length), payload=b"x").SerializeToString()
    with pytest.raises(RemoteProtocolError, match=f"{length} bytes, not 16"):
        frames.decode_frame(frame)


@pytest.mark.parametrize(
    "message",
    [
        pb.PushChunksRequest(),
        pb.PushChunksRequest(open=pb.TransferOpen(), commit=pb.TransferCommit()),
        pb.PushChunksRequest(open=pb.TransferOpen(), payload=b"x"),
        pb.PushChunksRequest(commit=pb.TransferCommit(), block=1),
    ],
)
def test_a_frame_is_exactly_one_of_three(message):
    with pytest.raises(RemoteProtocolError, match="exactly one"):
        frames.decode_frame(message.SerializeToString())


def test_a_malformed_seal_is_a_manifest_error():
    commit = pb.TransferCommit(seal=b"\xc1", seal_digest=xxh3_128(b"\xc1").digest())
    with pytest.raises(ManifestError, match="seal"):
        frames.decode_frame(pb.PushChunksRequest(commit=commit).SerializeToString())


def test_a_seal_without_its_digest_is_refused():
    message = as_message(frames.encode_commit(handoffs.commit(handoffs.header()).seal))
    message.commit.seal_digest = b""
    with pytest.raises(ChecksumMismatch, match="seal: digest"):
        frames.decode_frame(message.SerializeToString())


def test_a_block_beyond_u32_is_not_cut_down_to_a_valid_one():
    frame = b"\x18\x81\x80\x80\x80\x10" + frames.encode_chunk(0, 0, DIGEST, [b"x"])
    assert as_message(frame).block == 1  # what the generated parser makes of 2**32 + 1
    with pytest.raises(RemoteProtocolError, match="varint"):
        frames.decode_frame(frame)


@given(data=st.binary(max_size=200))
def test_any_bytes_give_a_frame_or_a_protocol_error(data):
    try:
        frame = frames.decode_frame(data)
    except (RemoteProtocolError, ManifestError, ChecksumMismatch):
        return
    assert isinstance(frame, Open | Chunk | Commit)


def test_a_truncated_frame_never_passes_for_a_shorter_chunk():
    frame = frames.encode_chunk(1, 2, DIGEST, [bytes(100)])
    for length in range(len(frame)):
        with pytest.raises(RemoteProtocolError):
            frames.decode_frame(frame[:length])
