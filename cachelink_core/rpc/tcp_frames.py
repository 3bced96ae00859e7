"""Frames of the plane ``tcp``: a fixed header, then the payload.

Little-endian::

    "CLK" kind(u8)  payload_bytes(u32)  block(u32)  run(u32)  digest(16)   = 32 bytes, then the payload

The digest of a chunk is that of ``handoff.chunk_digest``; of any other frame it is XXH3-128 over the
payload, and block and run are 0. Payloads other than a chunk's are the messages of the gRPC plane:
``TransferOpen``, ``TransferCommit``, ``PushChunksResponse`` and ``ErrorInfo``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError, Message
from xxhash import xxh3_128

from cachelink_core import limits
from cachelink_core.errors import ChecksumMismatch, RemoteProtocolError, WrongLength
from cachelink_core.handoff.events import Commit
from cachelink_core.manifest import Seal
from cachelink_core.rpc.frames import commit_message, read_commit
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb

_HEADER: Final = struct.Struct("<3sBIII16s")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"CLK"
_COMMIT_OVERHEAD: Final = 64
"""What a commit adds to the seal: its digest, tags and lengths."""

_SMALL_BYTES: Final = 4 * limits.KIB
"""An open: two ids and a ticket."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    OPEN = 1
    CHUNK = 2
    COMMIT = 3
    RECEIPT = 4
    ERROR = 5


_MOST_BYTES: Final = {
    FrameKind.OPEN: _SMALL_BYTES,
    FrameKind.CHUNK: limits.MAX_CHUNK_WIRE_BYTES,
    FrameKind.COMMIT: limits.MAX_SEAL_BYTES + _COMMIT_OVERHEAD,
    FrameKind.RECEIPT: limits.MAX_CONTROL_MESSAGE_BYTES,
    FrameKind.ERROR: 2 * limits.MAX_STATUS_BYTES,
}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The fixed part of a frame."""

    kind: FrameKind
    payload_bytes: int
    block: int
    run: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame to be sent.

    Attributes:
        kind: what it is.
        header: its 32 bytes.
        parts: contiguous views whose concatenation is the payload.
    """

    kind: FrameKind
    header: bytes
    parts: Sequence[memoryview | bytes]


def encode_open(handoff_id: str, receiver_epoch: str, ticket: bytes) -> Outgoing:
    """The first frame of a handoff."""
    opening = pb.TransferOpen(handoff_id=handoff_id, receiver_epoch=receiver_epoch, ticket=ticket)
    return encode_message(FrameKind.OPEN, opening)


def encode_chunk(
    block: int, run: int, digest: bytes, parts: Sequence[memoryview | bytes]
) -> Outgoing:
    """One chunk; the views are sent as they are, without a copy in between."""
    payload_bytes = sum(memoryview(part).nbytes for part in parts)
    header = _HEADER.pack(_MAGIC, FrameKind.CHUNK, payload_bytes, block, run, digest)
    return Outgoing(FrameKind.CHUNK, header, parts)


def encode_commit(seal: Seal) -> Outgoing:
    """The last frame of a handoff."""
    return encode_message(FrameKind.COMMIT, commit_message(seal))


def encode_message(kind: FrameKind, message: Message) -> Outgoing:
    """A frame that carries a message."""
    data = message.SerializeToString()
    header = _HEADER.pack(_MAGIC, kind, len(data), 0, 0, xxh3_128(data).digest())
    return Outgoing(kind, header, (data,))


def decode_header(data: bytes | bytearray) -> FrameHeader:
    """Reads the fixed part, and holds its length against the limits.

    Raises:
        RemoteProtocolError: it is no frame of this plane.
        WrongLength: it announces more than its kind may have, or an empty chunk.
    """
    magic, number, payload_bytes, block, run, digest = _HEADER.unpack(data)
    if magic != _MAGIC or number not in _KINDS:
        raise RemoteProtocolError(f"{bytes(data[:4])!r} begins no frame")
    kind = _KINDS[number]
    if not 0 < payload_bytes <= _MOST_BYTES[kind]:
        raise WrongLength(
            f"{kind.name.lower()} frame has {payload_bytes} payload bytes; "
            f"it must have 1 to {_MOST_BYTES[kind]}"
        )
    return FrameHeader(kind, payload_bytes, block, run, digest)


_KINDS: Final = {kind.value: kind for kind in FrameKind}


def check_digest(header: FrameHeader, payload: bytes | memoryview) -> None:
    """Checks the payload of a frame other than a chunk.

    Raises:
        ChecksumMismatch: it is not what was sent.
    """
    actual = xxh3_128(payload).digest()
    if actual != header.digest:
        raise ChecksumMismatch(
            f"{header.kind.name.lower()} frame: digest {actual.hex()}, "
            f"claimed {header.digest.hex()}"
        )


def decode_open(payload: bytes) -> pb.TransferOpen:
    """Reads an open.

    Raises:
        RemoteProtocolError: it is malformed.
    """
    try:
        return pb.TransferOpen.FromString(payload)
    except DecodeError as error:
        raise RemoteProtocolError(f"open is no message: {error}") from error


def decode_commit(payload: bytes) -> Commit:
    """Reads a commit.

    Raises:
        RemoteProtocolError: it is malformed.
        ChecksumMismatch: the seal is not the one that was sent.
        ManifestError: the seal is malformed.
    """
    try:
        commit = pb.TransferCommit.FromString(payload)
    except DecodeError as error:
        raise RemoteProtocolError(f"commit is no message: {error}") from error
    return read_commit(commit)
