"""What happens to a handoff, as values. A session takes one and changes its state, or raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cachelink_core.errors import CacheLinkError
from cachelink_core.handoff.states import EventKind
from cachelink_core.manifest import Seal


@dataclass(frozen=True, slots=True)
class Admit:
    """The receiver accepted the header and allocated the destination.

    Attributes:
        cache_id: the name that the cache will have.
        held_blocks: blocks that need not be sent.
    """

    kind: ClassVar[EventKind] = EventKind.ADMIT
    cache_id: str
    held_blocks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Refuse:
    """The receiver does not want it; nothing was allocated."""

    kind: ClassVar[EventKind] = EventKind.REFUSE
    error: CacheLinkError


@dataclass(frozen=True, slots=True)
class Open:
    """The data stream began.

    Attributes:
        handoff_id: as in the header.
        receiver_epoch: of the receiver's reply to Reserve.
    """

    kind: ClassVar[EventKind] = EventKind.OPEN
    handoff_id: str
    receiver_epoch: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk arrived, or was sent.

    Attributes:
        block: index of its block.
        run: index of its run.
        payload: wire bytes, packed as the header says; empty if they were placed.
        digest: XXH3-128 over both indices and the payload, as claimed by the peer.
        placed: where the payload already lies, if it was received into its destination.
    """

    kind: ClassVar[EventKind] = EventKind.CHUNK
    block: int
    run: int
    payload: memoryview
    digest: bytes
    placed: tuple[memoryview, ...] = ()

    @property
    def parts(self) -> tuple[memoryview, ...]:
        """Views whose concatenation are the wire bytes."""
        return self.placed or (self.payload,)


@dataclass(frozen=True, slots=True)
class Break:
    """The data stream broke before a commit."""

    kind: ClassVar[EventKind] = EventKind.BREAK


@dataclass(frozen=True, slots=True)
class Commit:
    """The seal."""

    kind: ClassVar[EventKind] = EventKind.COMMIT
    seal: Seal


@dataclass(frozen=True, slots=True)
class Map:
    """Every layer is in the receiver's own space."""

    kind: ClassVar[EventKind] = EventKind.MAP


@dataclass(frozen=True, slots=True)
class Install:
    """The cache is resident and addressable."""

    kind: ClassVar[EventKind] = EventKind.INSTALL


@dataclass(frozen=True, slots=True)
class Fail:
    """It cannot go on."""

    kind: ClassVar[EventKind] = EventKind.FAIL
    error: CacheLinkError


@dataclass(frozen=True, slots=True)
class Abort:
    """Its caller gave it up."""

    kind: ClassVar[EventKind] = EventKind.ABORT
    why: str = ""


@dataclass(frozen=True, slots=True)
class Expire:
    """No progress within the lease."""

    kind: ClassVar[EventKind] = EventKind.EXPIRE


Event = Admit | Refuse | Open | Chunk | Break | Commit | Map | Install | Fail | Abort | Expire
