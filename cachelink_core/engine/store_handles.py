"""What a store hands out: a reservation before a cache exists, a lease while one is written to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from cachelink_core.engine.sharing import Sharers
from cachelink_core.engine.stored_cache import StoredCache
from cachelink_core.engine.turns import TurnQueue


@dataclass(slots=True, eq=False)
class Entry:
    """A store's record of one cache, changed under the store's lock only.

    Attributes:
        stored: what readers see.
        nbytes: of the budget.
        created_s: when it was published.
        used_s: when somebody last took or let go of it.
        handoff_ids: every handoff that led to it.
        turns: orders the answers; the cache that replaces this one takes it over.
        sharers: answers that take turns in the room behind it; taken over as well.
        pins: readers.
        listed: whether it can be found; if not, its last reader frees it.
    """

    stored: StoredCache
    nbytes: int
    created_s: float
    used_s: float
    handoff_ids: set[str] = field(default_factory=set)
    turns: TurnQueue = field(default_factory=TurnQueue)
    sharers: Sharers = field(default_factory=Sharers)
    pins: int = 0
    listed: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """(tenant, cache id)."""
        return self.stored.tenant, self.stored.cache_id


class Reservation:
    """Bytes of the budget that belong to a cache in the making.

    As a context manager it gives them back at the end, unless ``CacheStore.put`` took them.

    Attributes:
        nbytes: still reserved; the store sets it to 0 when they are released or published.
    """

    def __init__(self, nbytes: int, give_back: Callable[[Reservation], None]) -> None:
        """Made by ``CacheStore.reserve``."""
        self.nbytes = nbytes
        self._give_back = give_back

    def release(self) -> None:
        """Gives the bytes back; does nothing the second time, or after ``put``."""
        self._give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Lease:
    """The turn of one answer on one cache: it alone may write into the headroom.

    Attributes:
        entry: the store's record, for the store only.
    """

    def __init__(self, entry: Entry) -> None:
        """Made by ``CacheStore.lease``."""
        self.entry = entry

    @property
    def stored(self) -> StoredCache:
        """The cache, as it is now."""
        return self.entry.stored
