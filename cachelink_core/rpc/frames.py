"""The one hot message, ``PushChunksRequest``, framed by hand.

gRPC takes and gives ``bytes``. Generated code would copy a payload twice more on each side, which
costs a third of the rate, so a chunk is written as a short prefix joined with the payload's parts in
one ``b"".join``, and read as a ``memoryview`` of the message. The bytes are valid protobuf: any
peer may use generated code instead, and tests compare the two in both directions.

A chunk in canonical form, each field at most once and in this order (zero values are left out, as
generated code does)::

    18 <varint block>  20 <varint run>  2a 10 <16 bytes digest>  7a <varint length> <payload>

Anything else goes through the generated parser, and is then held to the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.message import DecodeError
from xxhash import xxh3_128

from cachelink_core import limits
from cachelink_core.errors import ChecksumMismatch, RemoteProtocolError, WrongLength
from cachelink_core.handoff.events import Chunk, Commit, Open
from cachelink_core.manifest import Seal, decode_seal, encode_seal
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb

Frame = Open | Chunk | Commit

_BLOCK: Final = 0x18
_RUN: Final = 0x20
_DIGEST: Final = 0x2A
_PAYLOAD: Final = 0x7A
_DIGEST_BYTES: Final = 16


def encode_open(handoff_id: str, receiver_epoch: str) -> bytes:
    """The first frame."""
    opening = pb.TransferOpen(handoff_id=handoff_id, receiver_epoch=receiver_epoch)
    return pb.PushChunksRequest(open=opening).SerializeToString()


def encode_chunk(block: int, run: int, digest: bytes, parts: Sequence[memoryview | bytes]) -> bytes:
    """One chunk.

    Args:
        block: index of its block.
        run: index of its run.
        digest: of ``handoff.chunk_digest``, 16 bytes.
        parts: contiguous byte views whose concatenation is the payload; copied once, into the
            result.

    Returns:
        Exactly ``bytes``: gRPC hangs on anything else.
    """
    payload_bytes = sum(memoryview(part).nbytes for part in parts)
    prefix = bytearray()
    if block:
        prefix.append(_BLOCK)
        _append_varint(prefix, block)
    if run:
        prefix.append(_RUN)
        _append_varint(prefix, run)
    prefix += bytes((_DIGEST, len(digest)))
    prefix += digest
    prefix.append(_PAYLOAD)
    _append_varint(prefix, payload_bytes)
    return b"".join((prefix, *parts))


def encode_commit(seal: Seal) -> bytes:
    """The last frame."""
    return pb.PushChunksRequest(commit=commit_message(seal)).SerializeToString()


def commit_message(seal: Seal) -> pb.TransferCommit:
    """What the last frame of either data plane carries."""
    data = encode_seal(seal)
    return pb.TransferCommit(seal=data, seal_digest=seal_digest(data))


def read_commit(commit: pb.TransferCommit) -> Commit:
    """The seal in it.

    Raises:
        ChecksumMismatch: it is not the one that was sent.
        ManifestError: it is malformed.
    """
    actual = seal_digest(commit.seal)
    if actual != commit.seal_digest:
        raise ChecksumMismatch(f"seal: digest {actual.hex()}, claimed {commit.seal_digest.hex()}")
    return Commit(decode_seal(commit.seal))


def seal_digest(seal: bytes) -> bytes:
    """XXH3-128 over the seal's bytes: faults in it, timings included, show before it is read."""
    return xxh3_128(seal).digest()


def decode_frame(data: bytes) -> Frame:
    """Reads one frame.

    Args:
        data: the message. A chunk's payload is a view of it.

    Raises:
        RemoteProtocolError: it is malformed, or is not exactly one of open, chunk and commit.
        WrongLength: its payload is empty, or above ``limits.MAX_CHUNK_WIRE_BYTES``.
        ChecksumMismatch: the seal in it is not the one that was sent.
        ManifestError: the seal in it is malformed.
    """
    return _canonical_chunk(data) or _parsed(data)


def _canonical_chunk(data: bytes) -> Chunk | None:
    """The fast way for what our own encoder writes; None for anything else."""
    block, at = _optional_varint(data, 0, _BLOCK)
    run, at = _optional_varint(data, at, _RUN)
    if max(block, run) >= 2**32:
        # The generated parser would cut it down to 32 bits, and so to another chunk's index.
        raise RemoteProtocolError("a chunk's block or run is not a u32 varint")
    if data[at : at + 2] != b"\x2a\x10" or data[at + 18 : at + 19] != b"\x7a":
        return None
    digest = data[at + 2 : at + 18]
    payload_bytes, at = _optional_varint(data, at + 18, _PAYLOAD)
    if payload_bytes != len(data) - at:
        return None
    return _chunk(block, run, digest, memoryview(data)[at:])


def _parsed(data: bytes) -> Frame:
    try:
        frame = pb.PushChunksRequest.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes is no message: {error}") from error
    chunk = bool(frame.block or frame.run or frame.digest or frame.payload)
    kinds = [frame.HasField("open"), frame.HasField("commit"), chunk]
    if sum(kinds) != 1:
        raise RemoteProtocolError(
            "a frame must be exactly one of open, chunk and commit; this one has "
            f"open: {kinds[0]}, commit: {kinds[1]}, chunk: {kinds[2]}"
        )
    if frame.HasField("open"):
        return Open(frame.open.handoff_id, frame.open.receiver_epoch)
    if frame.HasField("commit"):
        return read_commit(frame.commit)
    return _chunk(frame.block, frame.run, frame.digest, memoryview(frame.payload))


def _chunk(block: int, run: int, digest: bytes, payload: memoryview) -> Chunk:
    name = f"chunk (block {block}, run {run})"
    if len(digest) != _DIGEST_BYTES:
        raise RemoteProtocolError(
            f"{name} has a digest of {len(digest)} bytes, not {_DIGEST_BYTES}"
        )
    if not 0 < payload.nbytes <= limits.MAX_CHUNK_WIRE_BYTES:
        raise WrongLength(
            f"{name} has {payload.nbytes} wire bytes; it must have 1 to "
            f"{limits.MAX_CHUNK_WIRE_BYTES}"
        )
    return Chunk(block, run, payload, digest)


def _append_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _optional_varint(data: bytes, at: int, tag: int) -> tuple[int, int]:
    """The varint after ``tag`` if that is at ``at``, else 0; and where it ends.

    A varint that does not end within five bytes is returned as one beyond any range.
    """
    if at >= len(data) or data[at] != tag:
        return 0, at
    value = shift = 0
    for position in range(at + 1, min(at + 6, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return 2**64, at
