"""Both ends of a handoff without their daemons: the sender's pump, the receiver's node.

Everything on the way is what ships; only the daemons' request handling around it is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachelink_bench.capture import HEADROOM_TOKENS, cache_digest
from cachelink_core.codec_spec import parse_codec
from cachelink_core.codecs.native import Bytes
from cachelink_core.engine.base import Engine
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.spill import Spilled
from cachelink_core.errors import ConfigError, LinkError
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import Header, encode_header
from cachelink_core.metrics import Metrics
from cachelink_core.node.parts import build_parts
from cachelink_core.rpc.planes import Plane, open_plane
from cachelink_core.rpc.server import Listen, build_server
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.transfer_types import Reservation, Scheme
from cachelink_receiver.config import ReceiverConfig
from cachelink_receiver.node import ReceiverNode
from cachelink_sender.prefill_job import PrefillJob
from cachelink_sender.pump import Pump

TENANT: Final = "default"

_DEADLINE_S: Final = 60.0


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


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Monotonic seconds of one push, on the sender's clock.

    Attributes:
        called_s: before the first chunk was made.
        first_frame_s: the first chunk was handed to the stream.
        ended_s: the receipt (Installed) was here.
    """

    called_s: float
    first_frame_s: float
    ended_s: float


class HandoffClient:
    """Sends one cache again and again.

    Attributes:
        wire_bytes: payload bytes of a handoff.
        expected: digest of what must lie at the receiver after it.
        cache_id: of the handoff that was reserved last.
    """

    def __init__(
        self, subject: Subject, address: str, codec: str = "native", plane: Scheme = "grpc"
    ) -> None:
        """Connects, and works out what must arrive.

        Args:
            subject: what is sent.
            address: of the receiver's gRPC server.
            codec: by name.
            plane: scheme of the data plane.
        """
        self._subject = subject
        self._codec = codec
        self._scheme = plane
        self._plane: Plane | None = None
        self._client = TransferClient(address)
        header = subject.header(codec)
        self.wire_bytes = header.layout.encoded_bytes
        arrives = subject.held.cache if codec == "native" else subject.decoded(codec)
        self.expected = cache_digest(arrives, header.tokens)
        self.cache_id = ""
        self._pump: Pump | None = None

    def reserve(self) -> None:
        """The receiver checks an offer and allocates; the data plane is connected.

        Raises:
            ConfigError: the data plane is not offered, or cannot be had.
            CacheLinkError: the receiver refused.
        """
        subject, header = self._subject, self._subject.header(self._codec)
        reservation = self._reserved(header)
        plane = open_plane(self._client, reservation, [self._scheme])
        if plane.scheme != self._scheme:
            self._client.abort(header.handoff_id)
            raise ConfigError(f"data plane {self._scheme!r} is not offered, or cannot be had")
        now_s = time.monotonic()
        session = HandoffSession(header, reservation.receiver_epoch, now_s)
        session.handle(events.Admit(reservation.cache_id), now_s)
        job = PrefillJob(subject.engine, subject.held.cache, header.ids, subject.block_tokens)
        assert job.done, "the cache was captured whole"
        # A handoff plans its chunks before the stream, for its deadline.
        assert header.layout.encoded_bytes == self.wire_bytes, "the same plan each time"
        self._pump = Pump(subject.engine, header, session, job, _never, plane.framing)
        self._plane = plane
        self.cache_id = reservation.cache_id

    def push(self) -> PushTimes:
        """Sends what was reserved, up to the receipt."""
        assert self._pump is not None, "reserved"
        assert self._plane is not None, "reserved"
        called_s = time.monotonic()
        try:
            self._plane.push(self._pump.frames(), deadline_s=_DEADLINE_S, cancelled=_never)
            return PushTimes(called_s, self._pump.times.first_frame_at_s, time.monotonic())
        finally:
            self._plane.close()

    def close(self) -> None:
        """Closes the channel."""
        self._client.close()

    def _reserved(self, header: Header) -> Reservation:
        """Reserves; once more where the connection did not outlive a pause of its process."""
        manifest = encode_header(header)
        try:
            return self._client.reserve(manifest)
        except LinkError:
            return self._client.reserve(manifest)


class HandoffServer:
    """A receiver's node behind its gRPC server, as the daemon builds them.

    Attributes:
        address: ``host:port``.
    """

    def __init__(self, engine: Engine, host: str = "127.0.0.1") -> None:
        """Serves at once, on a free port. Whatever the host: nobody else is on the link."""
        self._node = ReceiverNode(build_parts(ReceiverConfig(), engine, Metrics("receiver")))
        parts = self._node.parts
        self._server = build_server(
            Listen(f"{host}:0", allow_insecure=True, data_port=0),
            transfers=parts.transfers,
            answers=parts.answers,
            receiver=self._node,
        )
        self.address = self._server.address
        self._node.start()
        self._server.start()
        self._server.set_serving(serving=True)

    def take_digest(self, cache_id: str) -> str:
        """Digest of an installed cache, which is then evicted."""
        store = self._node.parts.store
        with store.pin(TENANT, cache_id) as held:
            found = cache_digest(held.cache, len(held.ids))
        store.evict(TENANT, cache_id)
        return found

    def close(self) -> None:
        """Ends it."""
        self._server.stop(0)
        self._node.close()


def _never() -> bool:
    """Nobody gives up here."""
    return False
