"""The sender's prefilled caches: one prefill serves every receiver, codec and question."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from cachelink_core import names
from cachelink_core.codec_spec import NATIVE
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.engine.store import CacheStore, Reservation, StoredCache
from cachelink_core.errors import UnknownCache
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import MAPPER_NONE, pack_ids
from cachelink_core.node.measured import Measured
from cachelink_core.rpc.handlers import Call
from cachelink_sender.captures import Captures
from cachelink_sender.prefill_job import PrefillJob, aborted

_CLOSE_S: Final = 60.0
"""For the captures that are being written when the node closes: a few GB on a slow disk."""


class Prefixes:
    """Finds, grows or makes the cache of a prefix. Safe for threads.

    Two requests for the same prefix share one prefill, also while it runs.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        store: CacheStore,
        measured: Measured,
        block_tokens: int,
        headroom_tokens: int,
        captures: Captures | None = None,
    ) -> None:
        """Binds the node's parts; ``captures`` keeps what was read on disk."""
        self._measured = measured
        self._engine = engine
        self._store = store
        self._block_tokens = block_tokens
        self._headroom_tokens = headroom_tokens
        self._captures = captures
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], PrefillJob] = {}
        self._settled = threading.Condition(self._lock)
        self._open: set[PrefillJob] = set()

    @contextmanager
    def follow(self, prefix: Prefix, tenant: str) -> Iterator[tuple[str, PrefillJob]]:
        """Gives the name of a prefix's cache and the job that fills it, perhaps long done.

        The cache is not freed before the end of the ``with``.

        Raises:
            BudgetExceeded: there is no room for it.
        """
        name = self.name_of(prefix.ids, tenant)
        held = self._store.find(tenant, name)
        if held is not None:
            try:
                with self._store.pin(tenant, name) as entry:
                    yield name, PrefillJob(self._engine, entry.cache, entry.ids, self._block_tokens)
                    return
            except UnknownCache:
                pass  # evicted between the two look-ups: it is read again
        job = self._join(name, prefix, tenant)
        try:
            yield name, job
        finally:
            job.leave()

    def held_tokens(self, ids: tuple[int, ...], tenant: str) -> int:
        """How many of ``ids`` need not be read: held, or being read for another request."""
        name = self.name_of(ids, tenant)
        if self._store.find(tenant, name) is not None:
            return len(ids)
        with self._lock:
            running = self._running.get((tenant, name))
        if running is not None:
            return running.ready_tokens
        if self._captured(name):
            return len(ids)
        beginning = self._store.longest_prefix(tenant, ids)
        return 0 if beginning is None else len(beginning.ids)

    @property
    def running(self) -> int:
        """Prefills under way."""
        with self._lock:
            return len(self._running)

    def name_of(self, ids: tuple[int, ...], tenant: str) -> str:
        """The name that the cache of ``ids`` has at this node."""
        return names.cache_id(
            tenant=tenant,
            receiver=self._engine.identity,
            sender=self._engine.identity,
            block_tokens=self._block_tokens,
            token_ids=pack_ids(ids),
            codec=NATIVE,
            mapper=MAPPER_NONE,
        )

    def _join(self, name: str, prefix: Prefix, tenant: str) -> PrefillJob:
        with self._lock:
            running = self._running.get((tenant, name))
            if running is not None and running.follow():
                return running
            captured = self._captured(name)
            reservation, cache = self._allocate(prefix, tenant, empty=captured)
            job = PrefillJob(self._engine, cache, prefix.ids, self._block_tokens)
            job.follow()
            self._running[tenant, name] = job
            self._open.add(job)
        job.start(
            on_end=lambda: self._ended(name, prefix, tenant, job, reservation),
            restore=(lambda: self._restore(name, prefix, cache)) if captured else None,
            after=lambda: self._settle(name, prefix, tenant, job),
        )
        return job

    def close(self) -> None:
        """Waits, within reason, until what was read is on disk; a prefill without followers stops."""
        with self._settled:
            self._settled.wait_for(lambda: not self._open, _CLOSE_S)

    def _captured(self, name: str) -> bool:
        return self._captures is not None and self._captures.holds(name)

    def _restore(self, name: str, prefix: Prefix, cache: PrefixCache) -> bool:
        return self._captures is not None and self._captures.restore(name, prefix.ids, cache)

    def _settle(self, name: str, prefix: Prefix, tenant: str, job: PrefillJob) -> None:
        """Captures what was read, if the store still has it."""
        try:
            if self._captures is not None and job.fresh_tokens and job.error is None:
                with suppress(UnknownCache), self._store.pin(tenant, name) as entry:
                    self._captures.keep(name, prefix, entry.cache)
        finally:
            with self._settled:
                self._open.discard(job)
                self._settled.notify_all()

    def _allocate(
        self, prefix: Prefix, tenant: str, *, empty: bool
    ) -> tuple[Reservation, PrefixCache]:
        """A new cache; unless ``empty``, a copy of the longest held beginning, with room behind."""
        tokens = len(prefix.ids)
        size = self._engine.cache_bytes(tokens, self._headroom_tokens, whole=True)
        beginning = None if empty else self._store.longest_prefix(tenant, prefix.ids)
        reservation = self._store.reserve(size)
        try:
            if beginning is not None:
                held = len(beginning.ids)
                cache = beginning.cache.copy(held, tokens - held + self._headroom_tokens)
            else:
                cache = self._engine.open_cache(tokens, self._headroom_tokens, whole=True)
        except BaseException:
            reservation.release()
            raise
        return reservation, cache

    def _ended(
        self, name: str, prefix: Prefix, tenant: str, job: PrefillJob, reservation: Reservation
    ) -> None:
        with self._lock:
            self._running.pop((tenant, name), None)
            self._measured.prefilled(job.clock.blocks)
            if job.error is not None:
                reservation.release()
                return
            self._store.put(
                StoredCache(
                    tenant=tenant,
                    cache_id=name,
                    handoff_id="",
                    cache=job.cache,
                    ids=prefix.ids,
                    frame=prefix.frame,
                    trust="exact",
                    codec="",
                    producer=self._engine.identity,
                ),
                reservation,
            )


class HeldReader:
    """A ``Reader`` that keeps what it has read: the sender's side of Answer."""

    def __init__(self, prefixes: Prefixes, store: CacheStore) -> None:
        """Binds the sender's caches."""
        self._prefixes = prefixes
        self._store = store

    @contextmanager
    def read(self, prefix: Prefix, room: int, call: Call) -> Iterator[tuple[PrefixCache, int]]:
        """See ``Reader``; the room behind it is the store's headroom, grown by the caller."""
        del room
        with self._prefixes.follow(prefix, call.tenant) as (name, job):
            while not job.wait_end():
                if call.cancelled():
                    raise aborted()
            with self._store.lease(call.tenant, name, cancelled=call.cancelled) as lease:
                cache = lease.stored.cache
                try:
                    yield cache, job.fresh_tokens
                finally:
                    cache.truncate(len(prefix.ids))
