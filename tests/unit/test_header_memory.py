"""What is remembered of caches that are gone."""

import pytest

from cachelink_core import limits
from cachelink_core.engine.header_memory import HeaderMemory
from cachelink_core.manifest import QueryFrame

FRAME = QueryFrame("before", "after")


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_ids_and_frame_are_found_under_every_name(clock):
    memory = HeaderMemory(clock=clock)
    memory.remember("a", ["cache", "handoff", ""], [1, 2, 300_000], FRAME)
    for name in ("cache", "handoff"):
        found = memory.recall("a", name)
        assert found is not None
        assert found.ids == (1, 2, 300_000)
        assert found.frame == FRAME
        assert found.names == ("cache", "handoff")
    assert memory.recall("a", "") is None
    assert memory.recall("a", "other") is None


def test_packed_ids_are_taken_as_they_are(clock):
    memory = HeaderMemory(clock=clock)
    memory.remember("a", ["x"], b"\x01\x00\x00\x00", FRAME)
    assert memory.recall("a", "x").ids == (1,)


def test_a_tenant_recalls_its_own_only(clock):
    memory = HeaderMemory(clock=clock)
    memory.remember("a", ["x"], [1], FRAME)
    memory.remember("b", ["x"], [2], FRAME)
    assert memory.recall("a", "x").ids == (1,)
    assert memory.recall("b", "x").ids == (2,)
    assert memory.recall("c", "x") is None


def test_it_forgets_after_the_time(clock):
    memory = HeaderMemory(clock=clock)
    memory.remember("a", ["x"], [1], FRAME)
    clock.now += limits.HEADER_MEMORY_S - 0.1
    assert memory.recall("a", "x") is not None
    clock.now += 0.2
    assert memory.recall("a", "x") is None
    assert len(memory) == 0


def test_the_oldest_is_forgotten_beyond_the_number_of_entries(clock):
    memory = HeaderMemory(max_entries=2, clock=clock)
    for name in "xyz":
        memory.remember("a", [name], [1], FRAME)
    assert memory.recall("a", "x") is None
    assert memory.recall("a", "y") is not None
    assert len(memory) == 2


def test_the_oldest_are_forgotten_beyond_the_bytes(clock):
    memory = HeaderMemory(max_bytes=40, clock=clock)
    memory.remember("a", ["x"], range(5), FRAME)
    memory.remember("a", ["y"], range(5), FRAME)
    memory.remember("a", ["z"], range(1), FRAME)
    assert memory.recall("a", "x") is None
    assert memory.recall("a", "y") is not None
    memory.remember("a", ["huge"], range(11), FRAME)
    assert len(memory) == 0, "what alone is too large is not kept"


def test_a_name_means_what_was_remembered_last(clock):
    memory = HeaderMemory(max_entries=2, clock=clock)
    memory.remember("a", ["x", "h1"], [1], FRAME)
    clock.now += 1
    memory.remember("a", ["x", "h2"], [2], FRAME)
    assert memory.recall("a", "x").ids == (2,)
    assert memory.recall("a", "h1").ids == (1,)
    memory.remember("a", ["y"], [3], FRAME)  # pushes the first one out
    assert memory.recall("a", "h1") is None
    assert memory.recall("a", "x").ids == (2,)


def test_remembering_again_takes_no_second_place(clock):
    memory = HeaderMemory(max_entries=2, clock=clock)
    memory.remember("a", ["keep"], [0], FRAME)
    for _ in range(5):
        memory.remember("a", ["x", "h"], [1], FRAME)
    assert len(memory) == 2
    assert memory.recall("a", "keep") is not None


def test_remembering_again_begins_the_time_anew(clock):
    memory = HeaderMemory(keep_s=10, clock=clock)
    memory.remember("a", ["x"], [1], FRAME)
    clock.now += 8
    memory.remember("a", ["x"], [1], FRAME)
    clock.now += 8
    assert memory.recall("a", "x") is not None
