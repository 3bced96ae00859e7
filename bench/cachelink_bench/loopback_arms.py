"""The sending ends of the loopback benchmark, one class for each way of moving a cache.

A run is timed on the sender's clock from its first payload byte to the receiver's word that all is
in place: for CacheLink from the first chunk handed to the stream to the receipt (Installed), for
the baselines from the first byte to the acknowledgement. The destination is allocated, and its
pages are touched, before that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from xxhash import xxh3_128

from cachelink_bench.bare_grpc import BareClient
from cachelink_bench.capture import HEADROOM_TOKENS, cache_digest
from cachelink_bench.framed_socket import SocketClient
from cachelink_bench.loopback_peer import ReceiverProcess
from cachelink_core.codec_spec import parse_codec
from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.spill import Spilled
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import Header, encode_header
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_sender.prefill_job import PrefillJob
from cachelink_sender.pump import Pump

_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Subject:
    """What is moved.

    Attributes:
        engine: of the sender's model.
        held: the captured cache.
        block_tokens: the prefill schedule.
    """

    engine: Engine
    held: Spilled
    block_tokens: int

    def header(self, codec: str) -> Header:
        """A fresh offer of the cache."""
        spec, packing = parse_codec(codec)
        return make_header(
            self.engine,
            self.held.header.ids,
            spec,
            packing,
            sender_epoch=mint_id(),
            block_tokens=self.block_tokens,
        )

    def payload(self) -> Bytes:
        """The native chunks of the cache behind each other: what the baselines send."""
        header = self.header("native")
        encoder = ChunkEncoder(self.engine, header, self.held.cache)
        data = bytearray()
        for index in header.layout.chunks():
            for part in encoder.encode(*index):
                data += part
        return np.frombuffer(data, np.uint8)

    def decoded(self, codec: str) -> PrefixCache:
        """The cache that a receiver must hold after a handoff by ``codec``, made in this process."""
        header = self.header(codec)
        cache = self.engine.open_cache(header.tokens, HEADROOM_TOKENS, whole=False)
        encoder = ChunkEncoder(self.engine, header, self.held.cache)
        installer = ChunkInstaller(self.engine, header, cache)
        for block, run in header.layout.chunks():
            wire = b"".join(encoder.encode(block, run))
            installer.install(block, run, memoryview(wire))
        installer.finish()
        return cache


class Arm(Protocol):
    """One way of moving the cache.

    Attributes:
        name: in tables.
        wire_bytes: payload bytes of a run.
        expected: digest of what must lie at the receiver after it.
    """

    name: str
    wire_bytes: int
    expected: str

    def prepare(self) -> None:
        """Makes the destination ready; not timed."""

    def run(self) -> float:
        """Moves the cache; returns the seconds that count."""

    def arrived(self) -> str:
        """Digest of what lies at the receiver now; frees it."""

    def close(self) -> None:
        """Closes the connection."""


class CacheLinkArm:
    """A handoff through the sender's pump and the real receiver."""

    def __init__(self, name: str, codec: str, subject: Subject, peer: ReceiverProcess) -> None:
        """Connects, and works out what must arrive."""
        self.name = name
        self._subject = subject
        self._codec = codec
        self._peer = peer
        self._client = TransferClient(peer.ends["cachelink"])
        header = subject.header(codec)
        self.wire_bytes = header.layout.encoded_bytes
        arrives = subject.held.cache if codec == "native" else subject.decoded(codec)
        self.expected = cache_digest(arrives, header.tokens)
        self._pump: Pump | None = None
        self._cache_id = ""

    def prepare(self) -> None:
        """Reserves: the receiver checks the offer and allocates."""
        subject, header = self._subject, self._subject.header(self._codec)
        reservation = self._client.reserve(encode_header(header))
        now_s = time.monotonic()
        session = HandoffSession(header, reservation.receiver_epoch, now_s)
        session.handle(events.Admit(reservation.cache_id), now_s)
        job = PrefillJob(subject.engine, subject.held.cache, header.ids, subject.block_tokens)
        assert job.done, "the cache was captured whole"
        # A handoff plans its chunks before the stream, for its deadline.
        assert header.layout.encoded_bytes == self.wire_bytes, "the same plan each time"
        self._pump = Pump(subject.engine, header, session, job, lambda: False)
        self._cache_id = reservation.cache_id

    def run(self) -> float:
        """First chunk handed to the stream → receipt."""
        assert self._pump is not None, "prepared"
        self._client.push(self._pump.frames(), deadline_s=_DEADLINE_S)
        return time.monotonic() - self._pump.times.first_frame_at_s

    def arrived(self) -> str:
        """Digest of the installed cache, which is evicted."""
        found: str = self._peer.ask(do="digest", cache_id=self._cache_id)["digest"]
        return found

    def close(self) -> None:
        """Closes the channel."""
        self._client.close()


class BufferArm:
    """A baseline: the native bytes into one buffer."""

    def __init__(
        self,
        name: str,
        buffer: str,
        client: BareClient | SocketClient,
        data: Bytes,
        peer: ReceiverProcess,
    ) -> None:
        """Binds a connected client to the buffer at the other end."""
        self.name = name
        self.wire_bytes = data.nbytes
        self.expected = xxh3_128(data.data).hexdigest()
        self._buffer = buffer
        self._client = client
        self._data = data
        self._peer = peer

    def prepare(self) -> None:
        """Clears the destination."""
        self._peer.ask(do="clear", buffer=self._buffer)

    def run(self) -> float:
        """First byte → acknowledgement."""
        return self._client.send(self._data)

    def arrived(self) -> str:
        """Digest of the destination."""
        found: str = self._peer.ask(do="digest", buffer=self._buffer)["digest"]
        return found

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


def make_arms(subject: Subject, peer: ReceiverProcess) -> dict[str, Arm]:
    """All arms, connected, by key."""
    data = subject.payload()
    dtype = subject.held.header.identity.dtype
    bare, sockets = BareClient(peer.ends["bare"]), SocketClient(tuple(peer.ends["socket"]))
    return {
        "native": CacheLinkArm(f"CacheLink {dtype}, digests", "native", subject, peer),
        "int8": CacheLinkArm("CacheLink int8, digests", "int8", subject, peer),
        "bare": BufferArm("bare gRPC, 1 MiB messages", "bare", bare, data, peer),
        "socket": BufferArm("framed socket, 1 MiB", "socket", sockets, data, peer),
    }
