"""What a daemon implements to be served; ``server.build_server`` maps it to gRPC.

Handlers speak the values of ``types``, raise ``CacheLinkError`` and never see gRPC. Every method is
called on a thread of the server's pool, several at once. An iterator that a handler returns is
closed (``close()``) when its call ends early, so a generator's ``finally`` always runs.

Who holds which slot: ``push``, ``handoff`` and ``prefill`` take a transfer slot, ``answer`` an answer
slot, each for as long as it runs; the server takes and returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cachelink_core.handoff.events import Chunk, Commit, Open
from cachelink_core.rpc.transfer_types import HandoffStatus, PushReceipt, Reservation
from cachelink_core.rpc.types import (
    AnswerRequest,
    CacheList,
    Delta,
    Final,
    HandoffRequest,
    NodeInfo,
    PrefixSource,
    Progress,
    Receipt,
)

Frame = Open | Chunk | Commit
"""One decoded message of a data stream."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of its call.

    Attributes:
        tenant: authenticated; ``default`` where the daemon asks for no token.
        cancelled: whether the caller is gone, gave up, or its deadline passed. Cheap: a flag.
        peer: the caller's address, for logs only.
    """

    tenant: str
    cancelled: Callable[[], bool]
    peer: str = ""


Place = Callable[[int, int, int], Sequence[memoryview]]
"""From a chunk's block, run and wire bytes to where its payload belongs, as writable views in the
order of its bytes; none if it has to be decoded first. It raises what is wrong with the chunk's place
or length, before a byte of it is read."""


@runtime_checkable
class PlacingFrames(Protocol):
    """Frames of a plane that can receive a payload where it belongs, without a copy."""

    def place_with(self, place: Place, ended: Callable[[], bool]) -> None:
        """Asks ``place`` for every chunk from now on.

        Args:
            place: the destination; chunks that it places carry their views in ``Chunk.placed``.
            ended: whether the handoff has ended by another way. The frames then raise ``PeerGone``
                within moments, so that a freed destination is not held by a silent sender.
        """


class TransferHandler(Protocol):
    """The receiving end of the data plane."""

    def reserve(self, header: bytes, call: Call) -> Reservation:
        """Decides on a header (canonical msgpack, not yet checked) and allocates the destination.

        Raises:
            CacheLinkError: every refusal, before a payload byte and with nothing left allocated.
        """

    def push(self, frames: Iterator[Frame], call: Call) -> PushReceipt:
        """Consumes one stream: open, chunks, commit.

        The iterator may end at any time, also cleanly, when the sender dies: only a valid commit
        publishes. It raises ``PeerGone`` when the stream is known to be broken, ``LinkTimeout`` when
        no frame came for ``limits.STALL_DEADLINE_S``, and ``RemoteProtocolError`` or
        ``ManifestError`` for a malformed frame. A chunk's payload is a view of the message: it is
        valid until the next frame is taken, and must not be kept longer.

        Raises:
            TruncatedStream: the iterator ended without a commit.
            CacheLinkError: anything else; the sender gets it.
        """

    def status(self, handoff_id: str, call: Call) -> HandoffStatus:
        """Where a handoff stands.

        Raises:
            UnknownCache: no handoff of that id for this tenant.
        """

    def heartbeat(self, handoff_id: str, receiver_epoch: str, call: Call) -> float:
        """Renews a lease; returns its seconds.

        Raises:
            UnknownCache: no handoff of that id for this tenant.
            StaleEpoch: it was reserved in an earlier life of this daemon.
        """

    def abort(self, handoff_id: str, why: str, call: Call) -> int:
        """Gives a handoff up; returns the bytes freed. Of a finished or unknown one: 0."""


class NodeHandler(Protocol):
    """What every daemon serves to people and programs."""

    def answer(self, request: AnswerRequest, call: Call) -> Iterator[Delta | Final]:
        """Answers; the last item is the ``Final``. It stops within a token of ``call.cancelled``.

        Raises:
            CacheLinkError: before or between deltas.
        """

    def caches(self, call: Call) -> CacheList:
        """The tenant's caches, and the store's bytes."""

    def evict(self, cache_id: str, call: Call) -> int:
        """Evicts a cache; returns the bytes freed at once.

        Raises:
            UnknownCache: no cache of that name for this tenant.
        """

    def info(self, call: Call) -> NodeInfo:
        """What this node is."""


class SenderHandler(NodeHandler, Protocol):
    """A sender."""

    def handoff(self, request: HandoffRequest, call: Call) -> Iterator[Progress | Receipt]:
        """Hands a prefix over; the last item is the ``Receipt``.

        Raises:
            CacheLinkError: before or between progress events.
        """

    def prefill(self, prefix: PrefixSource, call: Call) -> Iterator[Progress | Receipt]:
        """Reads a prefix and keeps its cache here; the last item is the ``Receipt``."""


class ReceiverHandler(NodeHandler, TransferHandler, Protocol):
    """A receiver: the data plane and the node's own service."""
