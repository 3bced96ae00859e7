"""The parts that both daemons are built from."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachelink_core.config import DaemonConfig
from cachelink_core.engine.base import Engine
from cachelink_core.engine.header_memory import HeaderMemory
from cachelink_core.engine.store import CacheStore, Evicted
from cachelink_core.metrics import Metrics
from cachelink_core.node.measured import Measured
from cachelink_core.rpc.slots import Slots

_EVICTION_CAUSES = {"lru": "budget", "ttl": "ttl", "request": "request"}


@dataclass(frozen=True)
class NodeParts:
    """One node's engine, caches and counters, wired to each other.

    Attributes:
        engine: the model.
        store: its caches.
        memory: token ids of caches that are gone.
        metrics: of this node.
        transfers: slots of streams and handoffs.
        answers: slots of answers.
        config: as resolved.
        measured: what the planner decides on.
    """

    engine: Engine
    store: CacheStore
    memory: HeaderMemory
    metrics: Metrics
    transfers: Slots
    answers: Slots
    config: DaemonConfig
    measured: Measured = field(default_factory=Measured)

    def close_slots(self) -> None:
        """Takes no new work from now on."""
        self.transfers.close()
        self.answers.close()


def build_parts(config: DaemonConfig, engine: Engine, metrics: Metrics) -> NodeParts:
    """Builds the parts of one node.

    Args:
        config: as resolved.
        engine: with its model loaded.
        metrics: of this node; its gauges follow the store and the slots from now on.
    """
    memory = HeaderMemory()

    def on_evict(gone: Evicted) -> None:
        stored = gone.stored
        memory.remember(stored.tenant, gone.names, stored.ids, stored.frame)
        if gone.reason in _EVICTION_CAUSES:
            metrics.cache_evictions.labels(cause=_EVICTION_CAUSES[gone.reason]).inc()

    store = CacheStore(config.store.budget, ttl_s=config.store.ttl, on_evict=on_evict)
    metrics.cache_budget_bytes.set(config.store.budget)
    metrics.cache_bytes.set_function(lambda: store.stats().used_bytes)
    metrics.cache_reserved_bytes.set_function(lambda: store.stats().reserved_bytes)
    metrics.cache_entries.set_function(lambda: store.stats().entries)
    return NodeParts(
        engine=engine,
        store=store,
        memory=memory,
        metrics=metrics,
        transfers=Slots("transfers", config.slots.transfers, metrics.inflight_transfers.set),
        answers=Slots("answers", config.slots.answers, metrics.inflight_answers.set),
        config=config,
    )
