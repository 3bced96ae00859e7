"""Where installed caches live: within a byte budget, by tenant, never freed under a reader.

Memory is admitted before it is allocated: ``reserve`` makes room (least recently used first) or
refuses, ``put`` turns the reservation into a cache that can be found. What nobody uses for the time
to live goes; what somebody reads stays until the last reader is done, also when it was evicted
meanwhile. The clock is passed in.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from cachelink_core.codec_spec import TRUST_ORDER, Trust
from cachelink_core.engine.sharing import alone, together
from cachelink_core.engine.store_handles import Entry, Lease, Reservation
from cachelink_core.engine.stored_cache import Evicted, EvictReason, Listed, StoredCache, StoreStats
from cachelink_core.errors import BudgetExceeded, InternalError, UnknownCache
from cachelink_core.kv.branch import room_bytes


class CacheStore:
    """Caches by (tenant, cache id or handoff id), within a byte budget. Safe for threads."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[Evicted], None] | None = None,
    ) -> None:
        """An empty store.

        Args:
            budget_bytes: caches and reservations together never take more.
            ttl_s: an unused cache is evicted after this long; None keeps it.
            clock: seconds, never going back.
            on_evict: called, without any lock held, after a cache left.
        """
        self._budget = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._aliases: dict[tuple[str, str], tuple[str, str]] = {}
        self._used = 0
        self._reserved = 0
        self._orphan_bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions: Counter[EvictReason] = Counter()

    def reserve(self, nbytes: int) -> Reservation:
        """Takes bytes of the budget before anything is allocated, evicting what is unused.

        Nothing is evicted for a reservation that does not fit even then.

        Raises:
            BudgetExceeded: with the bytes wanted, the budget, and what of it is in use.
        """
        assert nbytes >= 0, f"cannot reserve {nbytes} bytes"
        with self._lock:
            gone = [*self._expire()]
            fixed = self._reserved + self._pinned_bytes()
            fits = fixed + nbytes <= self._budget
            if fits:
                while self._used + self._reserved + nbytes > self._budget:
                    gone.append(self._remove(self._least_recent(), "lru"))
                self._reserved += nbytes
        self._report(gone)
        if not fits:
            raise BudgetExceeded(
                f"a cache of {nbytes} bytes does not fit: the budget is {self._budget} bytes, "
                f"{fixed} of them reserved or being read"
            )
        return Reservation(nbytes, self._give_back)

    def put(self, stored: StoredCache, reservation: Reservation) -> None:
        """Publishes a cache: from now on it is found, and its reservation is used up.

        A cache of the same name is replaced; its readers finish with what they have.

        Raises:
            InternalError: the reservation was released, or is smaller than the cache.
        """
        self._publish(stored, reservation)

    def alias(self, tenant: str, handoff_id: str, cache_id: str) -> None:
        """Lets a cache be found by the id of another handoff of the same content.

        Raises:
            UnknownCache: there is no such cache.
        """
        with self._lock:
            entry = self._entries.get((tenant, cache_id))
            if entry is None:
                raise _unknown(cache_id)
            entry.handoff_ids.add(handoff_id)
            self._aliases[tenant, handoff_id] = entry.key

    @contextmanager
    def pin(self, tenant: str, name: str) -> Iterator[StoredCache]:
        """Holds a cache for reading: it is not freed before the end of the ``with``.

        Args:
            tenant: whose.
            name: a cache id or a handoff id.

        Raises:
            UnknownCache: this tenant has none of that name.
        """
        entry = self._pin(tenant, name)
        try:
            yield entry.stored
        finally:
            self._unpin(entry)

    @contextmanager
    def lease(
        self,
        tenant: str,
        name: str,
        *,
        timeout_s: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Lease]:
        """Holds a cache for an answer, which writes into its headroom. One at a time, in order.

        Args:
            tenant: whose.
            name: a cache id or a handoff id.
            timeout_s: how long to wait for the turn; 0 only tries.
            cancelled: asked while waiting.

        Raises:
            UnknownCache: this tenant has none of that name.
            SlotsTaken: another answer had it all that time.
            HandoffAborted: ``cancelled`` said so.
        """
        entry = self._pin(tenant, name)
        try:
            with alone(name, entry.turns, entry.sharers, timeout_s, cancelled):
                entry = self._current(entry)
                yield Lease(entry)
        finally:
            self._unpin(entry)

    @contextmanager
    def share(
        self, tenant: str, name: str, *, cancelled: Callable[[], bool] | None = None
    ) -> Iterator[StoredCache]:
        """Holds a cache for an answer that takes turns with others in the room behind it.

        Their rows are in the budget from the second answer on. Where it has no room for them, an
        answer waits until the others have ended.

        Args:
            tenant: whose.
            name: a cache id or a handoff id.
            cancelled: asked while waiting.

        Raises:
            UnknownCache: this tenant has none of that name.
            HandoffAborted: ``cancelled`` said so.
        """
        entry = self._pin(tenant, name)
        try:
            reserve = partial(self._reserve_room, entry)
            with together(name, entry.turns, entry.sharers, reserve, cancelled):
                entry = self._current(entry)
                yield entry.stored
        finally:
            self._unpin(entry)

    def find(self, tenant: str, name: str) -> StoredCache | None:
        """Looks a cache up without holding it: for what may be gone a moment later."""
        with self._lock:
            entry = self._lookup(tenant, name)
            return entry.stored if entry else None

    def longest_prefix(
        self, tenant: str, ids: Sequence[int], least: Trust = "exact"
    ) -> StoredCache | None:
        """The tenant's cache that holds the most of ``ids`` from position 0, if any holds some.

        Args:
            tenant: whose.
            ids: a prefix that is wanted.
            least: caches of a lower trust do not count.
        """
        wanted = tuple(ids)
        rank = TRUST_ORDER.index(least)
        with self._lock:
            found = [
                entry.stored
                for (owner, _), entry in self._entries.items()
                if owner == tenant
                and entry.stored.ids
                and TRUST_ORDER.index(entry.stored.trust) >= rank
                and wanted[: len(entry.stored.ids)] == entry.stored.ids
            ]
        return max(found, key=lambda stored: len(stored.ids), default=None)

    def evict(self, tenant: str, name: str) -> StoredCache:
        """Makes a cache unfindable at once, and frees it when its last reader is done.

        Raises:
            UnknownCache: this tenant has none of that name.
        """
        with self._lock:
            entry = self._lookup(tenant, name)
            if entry is None:
                raise _unknown(name)
            gone = [self._remove(entry, "request")]
        self._report(gone)
        return entry.stored

    def sweep(self) -> int:
        """Evicts what nobody used for the time to live; returns how many."""
        with self._lock:
            gone = self._expire()
        self._report(gone)
        return len(gone)

    def close(self) -> None:
        """Evicts everything; what is being read is freed by its last reader."""
        with self._lock:
            gone = [self._remove(entry, "closed") for entry in list(self._entries.values())]
        self._report(gone)

    def list(self, tenant: str | None = None) -> tuple[Listed, ...]:
        """The caches of one tenant, or of all, oldest first."""
        with self._lock:
            now = self._clock()
            return tuple(
                Listed(
                    entry.stored,
                    entry.nbytes,
                    now - entry.created_s,
                    0.0 if entry.pins else now - entry.used_s,
                    entry.pins,
                )
                for entry in sorted(self._entries.values(), key=lambda entry: entry.created_s)
                if tenant in (None, entry.stored.tenant)
            )

    def stats(self) -> StoreStats:
        """The account, as of now."""
        with self._lock:
            return StoreStats(
                self._budget,
                self._used,
                self._reserved,
                self._pinned_bytes(),
                len(self._entries),
                self._hits,
                self._misses,
                dict(self._evictions),
            )

    def _publish(self, stored: StoredCache, reservation: Reservation) -> None:
        nbytes = stored.cache.nbytes
        with self._lock:
            if reservation.nbytes < nbytes:
                raise InternalError(
                    f"cache {stored.cache_id} has {nbytes} bytes; {reservation.nbytes} are reserved"
                )
            self._settle(reservation)
            self._used += nbytes
            now = self._clock()
            entry = Entry(stored, nbytes, now, now)
            old = self._entries.pop(entry.key, None)
            if old is not None:
                entry.handoff_ids |= old.handoff_ids
                entry.turns, entry.sharers = old.turns, old.sharers
                self._unlist(old)
            if stored.handoff_id:
                entry.handoff_ids.add(stored.handoff_id)
            self._entries[entry.key] = entry
            for handoff_id in entry.handoff_ids:
                self._aliases[stored.tenant, handoff_id] = entry.key

    def _give_back(self, reservation: Reservation) -> None:
        with self._lock:
            self._settle(reservation)

    def _settle(self, reservation: Reservation) -> None:
        self._reserved -= reservation.nbytes
        reservation.nbytes = 0

    def _pin(self, tenant: str, name: str) -> Entry:
        with self._lock:
            gone = self._expire()
            entry = self._lookup(tenant, name)
            if entry is None:
                self._misses += 1
            else:
                self._hits += 1
                self._hold(entry)
        self._report(gone)
        if entry is None:
            raise _unknown(name)
        return entry

    def _reserve_room(self, entry: Entry) -> Reservation:
        with self._lock:  # only now: before its turn the entry may be replaced, or written to
            stored = (self._entries.get(entry.key) or entry).stored
        return self.reserve(room_bytes(stored.cache, len(stored.ids)))

    def _current(self, entry: Entry) -> Entry:
        """Moves a pin to the cache that replaced the pinned one, if any did."""
        with self._lock:
            newer = self._entries.get(entry.key)
            if newer is None or newer is entry:
                return entry
            self._hold(newer)
        self._unpin(entry)
        return newer

    def _unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1
            entry.used_s = self._clock()
            if not entry.listed and not entry.pins:
                self._used -= entry.nbytes
                self._orphan_bytes -= entry.nbytes

    def _hold(self, entry: Entry) -> None:
        entry.pins += 1
        entry.used_s = self._clock()

    def _lookup(self, tenant: str, name: str) -> Entry | None:
        key = self._aliases.get((tenant, name), (tenant, name))
        return self._entries.get(key)

    def _remove(self, entry: Entry, reason: EvictReason) -> Evicted:
        del self._entries[entry.key]
        for handoff_id in entry.handoff_ids:
            self._aliases.pop((entry.stored.tenant, handoff_id), None)
        self._unlist(entry)
        self._evictions[reason] += 1
        names = (entry.stored.cache_id, *sorted(entry.handoff_ids))
        return Evicted(entry.stored, names, reason)

    def _unlist(self, entry: Entry) -> None:
        """Its bytes go now, or with the last pin."""
        entry.listed = False
        if entry.pins:
            self._orphan_bytes += entry.nbytes
        else:
            self._used -= entry.nbytes

    def _pinned_bytes(self) -> int:
        pinned = sum(entry.nbytes for entry in self._entries.values() if entry.pins)
        return pinned + self._orphan_bytes

    def _least_recent(self) -> Entry:
        unused = (entry for entry in self._entries.values() if not entry.pins)
        return min(unused, key=lambda entry: entry.used_s)

    def _expire(self) -> Sequence[Evicted]:
        if self._ttl_s is None:
            return []
        oldest = self._clock() - self._ttl_s
        dead = [e for e in self._entries.values() if not e.pins and e.used_s < oldest]
        return [self._remove(entry, "ttl") for entry in dead]

    def _report(self, gone: Sequence[Evicted]) -> None:
        if self._on_evict is not None:
            for evicted in gone:
                self._on_evict(evicted)


def _unknown(name: str) -> UnknownCache:
    return UnknownCache(f"no cache {name!r}")


__all__ = [
    "CacheStore",
    "EvictReason",
    "Evicted",
    "Lease",
    "Listed",
    "Reservation",
    "StoreStats",
    "StoredCache",
]
