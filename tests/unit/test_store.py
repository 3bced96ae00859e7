"""The cache store: budget, eviction, pins, turns, tenants, and threads."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cachelink_core.engine.store import CacheStore, StoredCache
from cachelink_core.engine.turns import TurnQueue
from cachelink_core.errors import (
    BudgetExceeded,
    HandoffAborted,
    InternalError,
    SlotsTaken,
    UnknownCache,
)
from cachelink_core.identity import LayerGeometry, ModelIdentity
from cachelink_core.kv.branch import room_bytes
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import QueryFrame

LAYERS = (LayerGeometry(kv_heads=1, head_dim=4, rotary_dim=4),)
UNIT = 32
"""Bytes of one token of such a cache in float32."""
IDENTITY = ModelIdentity("M", "0" * 64, "0" * 64, "float32", "0" * 64, "0" * 64, {}, LAYERS, 100)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_cache(units: int = 1) -> PrefixCache:
    return PrefixCache.allocate(LAYERS, "float32", units, 0, whole=True)


def stored(name: str, units: int = 1, *, tenant: str = "a", **fields: object) -> StoredCache:
    base = StoredCache(
        tenant,
        name,
        f"h-{name}",
        make_cache(units),
        (1, 2),
        QueryFrame(),
        "exact",
        "native",
        IDENTITY,
    )
    return replace(base, **fields)


def put(store: CacheStore, name: str, units: int = 1, **fields: object) -> StoredCache:
    cache = stored(name, units, **fields)
    with store.reserve(units * UNIT) as reservation:
        store.put(cache, reservation)
    return cache


def names(store: CacheStore, tenant: str | None = None) -> list[str]:
    return [line.stored.cache_id for line in store.list(tenant)]


# --- reservations ---


def test_a_reservation_counts_until_it_is_released():
    store = CacheStore(10 * UNIT)
    reservation = store.reserve(4 * UNIT)
    assert store.stats().reserved_bytes == 4 * UNIT
    reservation.release()
    assert store.stats().reserved_bytes == 0


def test_release_is_idempotent():
    store = CacheStore(10 * UNIT)
    first, second = store.reserve(4 * UNIT), store.reserve(UNIT)
    first.release()
    first.release()
    assert store.stats().reserved_bytes == UNIT
    second.release()
    assert store.stats().reserved_bytes == 0


def test_leaving_the_context_releases_what_was_not_published():
    store = CacheStore(10 * UNIT)
    with pytest.raises(RuntimeError), store.reserve(UNIT):
        raise RuntimeError
    assert store.stats().reserved_bytes == 0


def test_put_turns_a_reservation_into_use_and_gives_the_rest_back():
    store = CacheStore(10 * UNIT)
    with store.reserve(4 * UNIT) as reservation:
        store.put(stored("x", 3), reservation)
        assert reservation.nbytes == 0
        assert store.stats().used_bytes == 3 * UNIT
    stats = store.stats()
    assert (stats.used_bytes, stats.reserved_bytes) == (3 * UNIT, 0)


def test_more_than_the_budget_is_refused_at_once_with_both_numbers():
    store = CacheStore(10 * UNIT)
    put(store, "x", 10)
    with pytest.raises(BudgetExceeded, match=f"{11 * UNIT} bytes .* {10 * UNIT} bytes"):
        store.reserve(11 * UNIT)
    assert names(store) == ["x"], "nothing is evicted for what never fits"


def test_a_peers_huge_number_is_refused():
    with pytest.raises(BudgetExceeded, match=str(2**63)):
        CacheStore(10 * UNIT).reserve(2**63)


def test_reservations_are_not_evicted_for_each_other():
    store = CacheStore(10 * UNIT)
    store.reserve(6 * UNIT)
    with pytest.raises(BudgetExceeded, match=f"{6 * UNIT} of them reserved"):
        store.reserve(5 * UNIT)
    store.reserve(4 * UNIT)


def test_an_exact_fit_fits():
    store = CacheStore(10 * UNIT)
    put(store, "x", 10)
    assert store.stats().used_bytes == 10 * UNIT


def test_put_after_release_is_a_bug_and_publishes_nothing():
    store = CacheStore(10 * UNIT)
    reservation = store.reserve(UNIT)
    reservation.release()
    with pytest.raises(InternalError, match="0 are reserved"):
        store.put(stored("x"), reservation)
    assert names(store) == []
    assert store.stats().used_bytes == 0


def test_put_of_more_than_was_reserved_is_a_bug_and_keeps_the_reservation():
    store = CacheStore(10 * UNIT)
    reservation = store.reserve(UNIT)
    with pytest.raises(InternalError, match=f"{2 * UNIT} bytes; {UNIT} are reserved"):
        store.put(stored("x", 2), reservation)
    assert store.stats().reserved_bytes == UNIT


# --- least recently used ---


def test_the_least_recently_used_goes_first(clock):
    store = CacheStore(3 * UNIT, clock=clock)
    for name in "xyz":
        clock.now += 1
        put(store, name)
    clock.now += 1
    with store.pin("a", "x"):
        pass
    put(store, "w")
    assert names(store) == ["x", "z", "w"]
    assert store.stats().evictions == {"lru": 1}


def test_as_many_go_as_are_needed_and_no_more(clock):
    store = CacheStore(5 * UNIT, clock=clock)
    for name in "vwxyz":
        clock.now += 1
        put(store, name)
    store.reserve(2 * UNIT)
    assert names(store) == ["x", "y", "z"]


def test_nothing_is_evicted_for_what_does_not_fit_beside_readers():
    store = CacheStore(4 * UNIT)
    put(store, "x", 2)
    put(store, "y", 2)
    with store.pin("a", "x"), pytest.raises(BudgetExceeded, match=f"{2 * UNIT} of them"):
        store.reserve(3 * UNIT)
    assert names(store) == ["x", "y"]


def test_a_pinned_cache_is_passed_over(clock):
    store = CacheStore(2 * UNIT, clock=clock)
    put(store, "old")
    clock.now += 1
    put(store, "new")
    with store.pin("a", "old"):
        put(store, "newest")
        assert names(store) == ["old", "newest"]


# --- time to live ---


def test_unused_caches_expire(clock):
    store = CacheStore(9 * UNIT, ttl_s=10, clock=clock)
    put(store, "x")
    clock.now = 10.0
    assert store.sweep() == 0
    clock.now = 10.5
    assert store.sweep() == 1
    assert store.stats().evictions == {"ttl": 1}
    assert store.stats().used_bytes == 0


def test_use_prolongs_life(clock):
    store = CacheStore(9 * UNIT, ttl_s=10, clock=clock)
    put(store, "x")
    clock.now = 9.0
    with store.pin("a", "x"):
        clock.now = 30.0
        assert store.sweep() == 0, "in use"
    clock.now = 39.0
    assert store.sweep() == 0, "used until 30"
    clock.now = 40.5
    assert store.sweep() == 1


def test_an_expired_cache_is_not_found_even_without_a_sweep(clock):
    store = CacheStore(9 * UNIT, ttl_s=10, clock=clock)
    put(store, "x")
    clock.now = 11.0
    with pytest.raises(UnknownCache), store.pin("a", "x"):
        pass


def test_expired_caches_make_room(clock):
    store = CacheStore(2 * UNIT, ttl_s=10, clock=clock)
    put(store, "x", 2)
    clock.now = 11.0
    store.reserve(2 * UNIT)
    assert store.stats().evictions == {"ttl": 1}


# --- pins ---


def test_evicting_a_pinned_cache_hides_it_and_frees_it_with_the_last_reader():
    store = CacheStore(2 * UNIT)
    put(store, "x", 2)
    with store.pin("a", "x") as first:
        with store.pin("a", "x") as second:
            assert first is second
            store.evict("a", "x")
            with pytest.raises(UnknownCache), store.pin("a", "x"):
                pass
            assert first.cache.tensor(0, "K", 0, 2).shape == (1, 2, 4)
        assert store.stats().used_bytes == 2 * UNIT
        assert store.stats().pinned_bytes == 2 * UNIT
        with pytest.raises(BudgetExceeded):
            store.reserve(UNIT)
    assert store.stats().used_bytes == 0
    store.reserve(2 * UNIT)


def test_the_store_lets_go_of_the_memory():
    store = CacheStore(2 * UNIT)
    gone = weakref.ref(put(store, "x").cache.buffers[0].keys)
    store.evict("a", "x")
    gc.collect()
    assert gone() is None


def test_an_error_in_a_reader_unpins():
    store = CacheStore(UNIT)
    put(store, "x")
    with pytest.raises(RuntimeError), store.pin("a", "x"):
        raise RuntimeError
    assert store.stats().pinned_bytes == 0


# --- names and tenants ---


def test_a_cache_is_found_by_cache_id_and_by_handoff_id():
    store = CacheStore(UNIT)
    cache = put(store, "x")
    for name in ("x", "h-x"):
        with store.pin("a", name) as found:
            assert found is cache
    assert store.find("a", "h-x") is cache
    assert store.find("a", "y") is None


def test_a_tenant_never_sees_anothers_caches():
    store = CacheStore(9 * UNIT)
    mine, theirs = put(store, "x"), put(store, "x", tenant="b")
    put(store, "y", tenant="b")
    assert store.find("a", "x") is mine
    assert store.find("b", "x") is theirs
    for name in ("y", "h-y"):
        assert store.find("a", name) is None
        with pytest.raises(UnknownCache), store.pin("a", name):
            pass
        with pytest.raises(UnknownCache), store.lease("a", name):
            pass
        with pytest.raises(UnknownCache):
            store.evict("a", name)
    assert names(store, "a") == ["x"]
    assert names(store, "b") == ["x", "y"]
    assert len(names(store)) == 3
    store.evict("a", "x")
    assert store.find("b", "x") is theirs


def test_several_handoffs_may_name_one_cache():
    store = CacheStore(UNIT)
    put(store, "x")
    store.alias("a", "h-2", "x")
    assert store.find("a", "h-2") is store.find("a", "h-x")
    store.evict("a", "h-2")
    assert store.find("a", "x") is None
    assert store.find("a", "h-x") is None
    with pytest.raises(UnknownCache):
        store.alias("a", "h-3", "x")


def test_hits_and_misses_are_counted():
    store = CacheStore(UNIT)
    put(store, "x")
    with store.pin("a", "x"), store.pin("a", "h-x"):
        pass
    with pytest.raises(UnknownCache), store.pin("a", "z"):
        pass
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.entries) == (2, 1, 1)


def test_the_longest_held_prefix_is_found():
    store = CacheStore(9 * UNIT)
    put(store, "one", ids=(5,))
    put(store, "three", ids=(5, 6, 7))
    put(store, "other", ids=(5, 9, 9, 9))
    put(store, "lossy", ids=(5, 6, 7, 8), trust="lossy")
    put(store, "theirs", ids=(5, 6, 7, 8), tenant="b")
    put(store, "empty", ids=())

    def found(ids, **kwargs):
        cache = store.longest_prefix("a", ids, **kwargs)
        return cache and cache.cache_id

    assert found([5, 6, 7, 8, 9]) == "three"
    assert found([5, 6, 7]) == "three"
    assert found([5, 6]) == "one"
    assert found([6]) is None
    assert found([]) is None
    assert found([5, 6, 7, 8, 9], least="lossy") == "lossy"


# --- replacing ---


def test_a_replaced_cache_serves_its_readers_to_the_end():
    store = CacheStore(4 * UNIT)
    old = put(store, "x", 2)
    with store.pin("a", "x") as reading:
        new = put(store, "x", 2, handoff_id="h-2")
        assert reading is old
        assert store.find("a", "x") is new
        assert store.stats().used_bytes == 4 * UNIT
    assert store.stats().used_bytes == 2 * UNIT
    assert store.stats().entries == 1
    assert store.find("a", "h-x") is new, "the older handoff's id still leads to the content"
    assert store.stats().evictions == {}


def test_a_replaced_unused_cache_is_freed_at_once():
    store = CacheStore(4 * UNIT)
    put(store, "x", 2)
    put(store, "x", 1)
    assert store.stats().used_bytes == UNIT


# --- callbacks ---


def test_each_eviction_is_reported_once_without_the_lock():
    seen = []
    store = CacheStore(
        2 * UNIT,
        on_evict=lambda gone: seen.append((gone.names, gone.reason, store.stats().entries)),
    )
    put(store, "x")
    store.alias("a", "h-2", "x")
    put(store, "y")
    put(store, "z")
    store.evict("a", "y")
    store.close()
    assert seen == [
        (("x", "h-2", "h-x"), "lru", 1),
        (("y", "h-y"), "request", 1),
        (("z", "h-z"), "closed", 0),
    ]


def test_closing_spares_readers():
    store = CacheStore(UNIT)
    put(store, "x")
    with store.pin("a", "x"):
        store.close()
        assert store.stats().used_bytes == UNIT
    assert store.stats().used_bytes == 0


# --- listing ---


def test_the_list_has_age_idleness_bytes_and_pins(clock):
    store = CacheStore(9 * UNIT, clock=clock)
    put(store, "x", 2)
    clock.now = 5.0
    put(store, "y")
    clock.now = 7.0
    with store.pin("a", "y"), store.pin("a", "y"):
        clock.now = 8.0
        x, y = store.list()
    assert (x.stored.cache_id, x.nbytes, x.age_s, x.idle_s, x.pins) == ("x", 2 * UNIT, 8, 8, 0)
    assert (y.stored.cache_id, y.age_s, y.idle_s, y.pins) == ("y", 3, 0, 2)


# --- leases ---


def test_one_answer_at_a_time_writes_in_the_headroom():
    store = CacheStore(UNIT)
    put(store, "x")
    with store.lease("a", "x"):
        with (
            pytest.raises(SlotsTaken, match="another question"),
            store.lease("a", "x", timeout_s=0),
        ):
            pass
        with store.pin("a", "x"):
            pass  # readers of the prefix need no turn
    with store.lease("a", "x", timeout_s=0):
        pass
    assert store.stats().pinned_bytes == 0


def test_waiting_answers_are_cancelled():
    store = CacheStore(UNIT)
    put(store, "x")
    with (
        store.lease("a", "x"),
        pytest.raises(HandoffAborted),
        store.lease("a", "x", cancelled=lambda: True),
    ):
        pass
    assert store.list()[0].pins == 0


def wait_until_queued(store: CacheStore, answers: int) -> None:
    turns = store._entries["a", "x"].turns
    while turns.waiting < answers:
        threading.Event().wait(0.001)


def test_answers_come_in_the_order_of_asking():
    store = CacheStore(UNIT)
    put(store, "x")
    order: list[int] = []

    def ask(number: int) -> None:
        with store.lease("a", "x", timeout_s=30):
            order.append(number)

    with ThreadPoolExecutor(8) as pool, store.lease("a", "x"):
        for number in range(8):
            pool.submit(ask, number)
            wait_until_queued(store, number + 2)
    assert order == list(range(8))


def test_a_waiting_answer_keeps_the_cache_from_eviction_and_finishes_on_it():
    store = CacheStore(UNIT)
    cache = put(store, "x")
    with ThreadPoolExecutor(1) as pool:

        def ask() -> StoredCache:
            with store.lease("a", "x", timeout_s=30) as lease:
                return lease.stored

        with store.lease("a", "x"):
            waiting = pool.submit(ask)
            wait_until_queued(store, 2)
            with pytest.raises(BudgetExceeded):
                store.reserve(UNIT)
            store.evict("a", "x")
        assert waiting.result() is cache
    assert store.stats().used_bytes == 0


def test_a_turn_queue_survives_those_who_give_up():
    turns = TurnQueue()
    assert turns.acquire()
    assert not turns.acquire(timeout_s=0)
    assert not turns.acquire(timeout_s=0.01)
    assert turns.waiting == 1
    turns.release()
    assert turns.acquire(timeout_s=0)


# --- shares ---


def test_shares_reserve_from_the_second_on_and_give_it_back():
    store = CacheStore(10 * UNIT)
    cache = put(store, "x", 4).cache
    cache.set_length(3)  # somebody writes behind its two tokens: the room is theirs no less
    own = room_bytes(cache, 2)  # of its ids
    assert own == 2 * UNIT
    with store.share("a", "x"):
        assert store.stats().reserved_bytes == 0
        with store.share("a", "h-x"):
            assert store.stats().reserved_bytes == 2 * own
            with store.share("a", "x"):
                assert store.stats().reserved_bytes == 3 * own
        # The first keeps the bytes of rows that it may have saved.
        assert store.stats().reserved_bytes == own
    assert store.stats().reserved_bytes == store.stats().pinned_bytes == 0


def test_a_share_without_room_waits_for_the_others_and_keeps_its_place():
    store = CacheStore(4 * UNIT)
    put(store, "x", 4)
    order: list[str] = []

    def ask(name: str) -> None:
        with store.share("a", "x"):
            order.append(name)

    with ThreadPoolExecutor(2) as pool:
        with store.share("a", "x"):
            waiting = [pool.submit(ask, "second")]
            wait_until_queued(store, 1)
            waiting.append(pool.submit(ask, "third"))
            wait_until_queued(store, 2)
            assert order == []
        for done in waiting:
            done.result(timeout=30)
    assert order == ["second", "third"]
    assert store.stats().reserved_bytes == 0


def test_a_lease_waits_for_every_share_and_shares_wait_for_it():
    store = CacheStore(10 * UNIT)
    put(store, "x", 4)
    with store.share("a", "x"), pytest.raises(SlotsTaken), store.lease("a", "x", timeout_s=0):
        pass
    with (
        store.lease("a", "x"),
        pytest.raises(HandoffAborted),
        store.share("a", "x", cancelled=lambda: True),
    ):
        pass
    with store.lease("a", "x", timeout_s=0):
        pass
    assert store.list()[0].pins == 0


def test_a_waiting_share_is_cancelled():
    store = CacheStore(4 * UNIT)
    put(store, "x", 4)
    with (
        store.share("a", "x"),
        pytest.raises(HandoffAborted, match="left"),
        store.share("a", "x", cancelled=lambda: True),
    ):
        pass
    with store.share("a", "x"):
        pass


# --- threads ---


def test_the_account_holds_under_threads():
    budget = 12 * UNIT
    evicted: list[str] = []
    store = CacheStore(budget, on_evict=lambda gone: evicted.append(gone.stored.cache_id))
    over: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            one_step(store, chance)
            stats = store.stats()
            if not 0 <= stats.used_bytes + stats.reserved_bytes <= budget:
                over.append(stats.used_bytes)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, seed) for seed in range(6)]:
            done.result(timeout=60)
    assert over == []
    stats = store.stats()
    assert stats.reserved_bytes == stats.pinned_bytes == 0
    assert stats.used_bytes == sum(line.nbytes for line in store.list())
    assert len(evicted) == sum(stats.evictions.values()) > 0
    store.close()
    assert store.stats().used_bytes == 0


def one_step(store: CacheStore, chance: random.Random) -> None:
    name, tenant = chance.choice("uvwxyz"), chance.choice("ab")
    try:
        match chance.randrange(5):
            case 0:
                put(store, name, chance.randint(1, 4), tenant=tenant)
            case 1:
                with store.pin(tenant, name) as found:
                    assert found.tenant == tenant
                    found.cache.tensor(0, "K", 0, 1)
            case 2:
                with store.lease(tenant, f"h-{name}", timeout_s=5) as lease:
                    lease.stored.cache.tensor(0, "V", 0, 1).fill_(1)
            case 3 if chance.random() < 0.5:
                with store.share(tenant, name) as found:
                    found.cache.tensor(0, "V", 0, 1)
            case 3:
                store.evict(tenant, name)
            case _:
                store.reserve(chance.randint(1, 12) * UNIT).release()
    except (UnknownCache, BudgetExceeded):
        pass
