"""Plays a sender by hand, so that any of its messages can be wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from cachelink_core.codec_spec import parse_codec
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.manifest import Header, SenderTimings, encode_header
from cachelink_core.rpc import frames, tcp_frames
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.rpc.tcp_client import TcpPush
from tests.loopback.nodes import BLOCK_TOKENS, Pair

IDS = tuple(3 + (29 * i) % 230 for i in range(3 * BLOCK_TOKENS + 5))


class Offer:
    """One handoff of a real prefilled cache, taken apart into its messages.

    ``plane`` says which data plane carries them.
    """

    plane = "grpc"

    def __init__(self, pair: Pair, codec: str = "native", ids=IDS, lease_s: float = 30.0) -> None:
        self.pair = pair
        engine = pair.sender_engine
        spec, packing = parse_codec(codec)
        self.header: Header = make_header(
            engine,
            ids,
            spec,
            packing,
            sender_epoch=mint_id(),
            block_tokens=BLOCK_TOKENS,
            lease_s=lease_s,
        )
        cache = engine.open_cache(len(ids), 1, whole=True)
        engine.prefill(cache, ids, BLOCK_TOKENS)
        self.encoder = ChunkEncoder(engine, self.header, cache)

    def reserve(self, header: bytes | None = None):
        self.reservation = self.pair.transfer.reserve(header or encode_header(self.header))
        return self.reservation

    def changed(self, **fields) -> bytes:
        """The header's bytes with some fields replaced, unchecked."""
        return msgspec.msgpack.encode(
            msgspec.structs.replace(self.header, **fields), order="deterministic"
        )

    def messages(self) -> list[bytes]:
        """Open, chunks, commit, as an honest sender sends them."""
        session = HandoffSession(self.header, self.reservation.receiver_epoch, 0.0)
        session.handle(events.Admit(self.reservation.cache_id), 0.0)
        session.handle(events.Open(self.header.handoff_id, session.receiver_epoch), 0.0)
        found = [frames.encode_open(self.header.handoff_id, session.receiver_epoch)]
        for block, run in self.header.layout.chunks():
            parts = self.encoder.encode(block, run)
            digest = session.send_chunk(block, run, parts, 0.0)
            found.append(frames.encode_chunk(block, run, digest, parts))
        found.append(frames.encode_commit(session.make_seal(SenderTimings())))
        return found

    def push(self, messages, deadline_s: float = 20.0):
        if self.plane == "grpc":
            return self.pair.transfer.push(iter(messages), deadline_s=deadline_s)
        with TcpPush.connect(self.endpoint, self.pair.transfer.address, None) as link:
            return link.push(map(self.tcp_frame, messages), deadline_s=deadline_s)

    @property
    def endpoint(self):
        return next(e for e in self.reservation.endpoints if e.scheme == "tcp")

    def tcp_frame(self, message: bytes) -> tcp_frames.Outgoing:
        """The same message, right or wrong, as a frame of the other plane."""
        frame = pb.PushChunksRequest.FromString(message)
        if frame.HasField("open"):
            opened = frame.open
            return tcp_frames.encode_open(
                opened.handoff_id, opened.receiver_epoch, self.endpoint.ticket
            )
        if frame.HasField("commit"):
            return tcp_frames.encode_message(tcp_frames.FrameKind.COMMIT, frame.commit)
        return tcp_frames.encode_chunk(frame.block, frame.run, frame.digest, [frame.payload])


def slowly(messages, pause_s: float) -> Iterator[bytes]:
    for message in messages:
        yield message
        time.sleep(pause_s)
