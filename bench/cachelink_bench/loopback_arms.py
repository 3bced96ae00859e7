"""The sending ends of the loopback benchmark, one class for each way of moving a cache.

A run is timed on the sender's clock from its first payload byte to the receiver's word that all is
in place: for CacheLink from the first chunk handed to the stream to the receipt (Installed), for
the baselines from the first byte to the acknowledgement. The destination is allocated, and its
pages are touched, before that.
"""

from __future__ import annotations

from typing import Protocol

from xxhash import xxh3_128

from cachelink_bench.bare_grpc import BareClient
from cachelink_bench.framed_socket import SocketClient
from cachelink_bench.handoff_ends import HandoffClient, Subject
from cachelink_bench.loopback_peer import ReceiverProcess
from cachelink_core.codecs.native import Bytes
from cachelink_core.rpc.transfer_types import Scheme


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

    def __init__(
        self, name: str, codec: str, plane: Scheme, subject: Subject, peer: ReceiverProcess
    ) -> None:
        """Connects, and works out what must arrive."""
        self.name = name
        self._peer = peer
        self._client = HandoffClient(subject, peer.ends["cachelink"], codec, plane)
        self.wire_bytes = self._client.wire_bytes
        self.expected = self._client.expected

    def prepare(self) -> None:
        """Reserves: the receiver checks the offer and allocates."""
        self._client.reserve()

    def run(self) -> float:
        """First chunk handed to the stream → receipt."""
        times = self._client.push()
        return times.ended_s - times.first_frame_s

    def arrived(self) -> str:
        """Digest of the installed cache, which is evicted."""
        found: str = self._peer.ask(do="digest", cache_id=self._client.cache_id)["digest"]
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
        "tcp": CacheLinkArm(f"CacheLink {dtype} over tcp, digests", "native", "tcp", subject, peer),
        "native": CacheLinkArm(
            f"CacheLink {dtype} over gRPC, digests", "native", "grpc", subject, peer
        ),
        "int8": CacheLinkArm("CacheLink int8 over tcp, digests", "int8", "tcp", subject, peer),
        "bare": BufferArm("bare gRPC, 1 MiB messages", "bare", bare, data, peer),
        "socket": BufferArm("framed socket, 1 MiB", "socket", sockets, data, peer),
    }
