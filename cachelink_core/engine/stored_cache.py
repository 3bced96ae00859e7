"""One installed cache, as the store keeps it and as its readers see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cachelink_core.codec_spec import Trust
from cachelink_core.identity import ModelIdentity
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import QueryFrame

EvictReason = Literal["lru", "ttl", "request", "closed"]
"""Why a cache left: room was needed, nobody used it, somebody asked, the store closed."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredCache:
    """A prefix's keys and values with everything an answer needs.

    Attributes:
        tenant: the owner; nobody else finds it.
        cache_id: its name.
        handoff_id: the handoff that brought it, or empty for a cache that was made here.
        cache: the tensors. The prefix does not change; the headroom belongs to whoever has the lease.
        ids: the prefix's token ids.
        frame: template text around a question.
        trust: the lowest of its parts.
        codec: ``int4+zstd`` and the like, as people read it.
        producer: the model that computed it.
        note: what every answer from it must say, such as by which mapper it was translated.
    """

    tenant: str
    cache_id: str
    handoff_id: str
    cache: PrefixCache
    ids: tuple[int, ...]
    frame: QueryFrame
    trust: Trust
    codec: str
    producer: ModelIdentity
    note: str = ""


@dataclass(frozen=True, slots=True)
class Evicted:
    """A cache that left the store.

    Attributes:
        stored: the cache; its memory is freed when the last reader lets go of it.
        names: its cache id and the id of every handoff that led to it.
        reason: why it left.
    """

    stored: StoredCache
    names: tuple[str, ...]
    reason: EvictReason


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``CacheStore.list``.

    Attributes:
        stored: the cache.
        nbytes: with headroom.
        age_s: since it was published.
        idle_s: since it was last used; 0 while somebody uses it.
        pins: readers, those that wait for their turn included.
    """

    stored: StoredCache
    nbytes: int
    age_s: float
    idle_s: float
    pins: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The store's account: ``used_bytes + reserved_bytes <= budget_bytes`` at any time.

    Attributes:
        budget_bytes: never exceeded.
        used_bytes: of published caches, and of evicted ones that are still being read.
        reserved_bytes: admitted, but not published yet.
        pinned_bytes: the part of ``used_bytes`` that cannot be evicted now.
        entries: published caches.
        hits: look-ups that found a cache.
        misses: look-ups that did not.
        evictions: by reason.
    """

    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    pinned_bytes: int
    entries: int
    hits: int
    misses: int
    evictions: dict[EvictReason, int] = field(default_factory=dict)
