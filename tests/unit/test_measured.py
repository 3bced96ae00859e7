"""What a node measures while it works, from samples with known answers."""

import pytest

from cachelink_core import errors
from cachelink_core.node.measured import BlockClock, Measured, SentSample
from cachelink_core.planner import Measurement
from cachelink_core.planner.readings import Load, measures_of, unit_of

SAMPLE = {
    "codec": "int8",
    "tokens": 1000,
    "native_bytes": 20_000_000,
    "raw_bytes": 10_000_000,
    "wire_bytes": 9_000_000,
    "encode_s": 0.02,
    "link_s": 0.9,
    "fixed_s": 0.004,
    "allocate_s": 0.01,
    "load_s": 0.01,
    "map_s": 0.0,
    "total_s": 1.0,
}


def sample(**changes) -> SentSample:
    return SentSample(**{**SAMPLE, **changes})


def values(measured: Measured) -> dict[str, float]:
    return {reading.name: reading.value for reading in measured.snapshot()}


def test_a_handoff_is_taken_apart_into_rates():
    measured = Measured()
    measured.sent("far", sample())
    assert values(measured) == pytest.approx(
        {
            "encode:int8": 1e9,
            "packed:int8": 0.9,
            "far/link": 1e7,
            "far/fixed": 0.004,
            "far/transfer": 1.0,
            "far/allocate": 2e9,
            "far/load:int8": 2e9,
        }
    )
    assert all(reading.unit == unit_of(reading.name) for reading in measured.snapshot())


def test_a_translated_cache_has_a_time_a_token():
    measured = Measured()
    measured.sent("far", sample(map_s=0.5))
    measured.installed("native", tokens=100, native_bytes=10**6, load_s=0.0, map_s=0.2)
    found = values(measured)
    assert found["far/map_token"] == pytest.approx(0.0005)
    assert found["map_token"] == pytest.approx(0.002)
    assert "load:native" not in found  # it took no measurable time


def test_the_latest_counts_most_and_receivers_are_kept_apart():
    measured = Measured()
    for _ in range(10):
        measured.sent("far", sample())
    for _ in range(10):
        measured.sent("far", sample(link_s=0.09))
    measured.sent("near", sample(link_s=0.009))
    found = values(measured)
    assert 8e7 < found["far/link"] < 1e8
    assert found["near/link"] == pytest.approx(1e9)


def test_a_handoff_that_waited_for_its_encoder_bounds_the_link_only():
    measured = Measured()
    measured.sent("far", sample(link_s=0.9, link_most_s=0.9))
    # 9 MB took between 0.1 and 1.2 s: the 10 MB/s that are known lie between.
    for _ in range(20):
        measured.sent("far", sample(link_s=0.1, link_most_s=1.2))
    assert values(measured)["far/link"] == pytest.approx(1e7)
    # It cannot have taken less than 1.8 s: the link has become slower. Nor more than 0.3: faster.
    for _ in range(20):
        measured.sent("far", sample(link_s=1.8, link_most_s=2.0))
    assert values(measured)["far/link"] == pytest.approx(5e6, rel=0.01)
    for _ in range(20):
        measured.sent("far", sample(link_s=0.01, link_most_s=0.3))
    assert values(measured)["far/link"] == pytest.approx(3e7, rel=0.01)


def test_of_an_unknown_link_the_slower_bound_is_taken():
    measured = Measured()
    measured.sent("far", sample(link_s=0.1, link_most_s=0.9))
    assert values(measured)["far/link"] == pytest.approx(1e7)


def test_a_small_transfer_says_little_about_the_link():
    measured = Measured()
    measured.sent("far", sample())
    for _ in range(20):
        measured.sent("far", sample(wire_bytes=1000, native_bytes=2000, link_s=0.01))
    assert values(measured)["far/link"] == pytest.approx(1e7, rel=0.3)


@pytest.mark.parametrize("quadratic", [0.0, 2e-7])
def test_the_slope_of_a_prefill_is_found_with_its_quadratic_term(quadratic):
    measured = Measured()
    edges = range(0, 4096, 256)
    measured.prefilled(
        (at, at + 256, 1e-3 * 256 + quadratic * ((at + 256) ** 2 - at**2)) for at in edges
    )
    found = values(measured)
    assert found["prefill_token"] == pytest.approx(1e-3, rel=1e-6)
    assert found["prefill_token2"] == pytest.approx(quadratic, abs=1e-12)


def test_one_length_alone_gives_a_plain_slope():
    measured = Measured()
    measured.prefilled([(0, 100, 0.2), (0, 100, 0.2)])
    found = values(measured)
    assert (found["prefill_token"], found["prefill_token2"]) == (pytest.approx(0.002), 0.0)


def test_noise_never_gives_a_negative_time():
    """Blocks that get faster would need a negative quadratic term."""
    measured = Measured()
    measured.prefilled((at, at + 256, 0.5 - at * 1e-4) for at in range(0, 2048, 256))
    found = values(measured)
    assert found["prefill_token"] > 0.0
    assert found["prefill_token2"] == 0.0


def test_blocks_are_timed_from_what_was_held():
    clock = BlockClock(held=100, tokens=600, block_tokens=256)
    for block in range(3):
        clock(block)
    assert [(start, stop) for start, stop, _ in clock.blocks] == [
        (100, 256),
        (256, 512),
        (512, 600),
    ]
    assert all(seconds >= 0.0 for _, _, seconds in clock.blocks)


def test_an_answer_gives_query_token_and_mean():
    measured = Measured()
    measured.answered(prefix_s=1.0, query_s=0.1, decode_s=0.9, generated=10)
    assert values(measured) == pytest.approx({"query": 0.1, "answer": 2.0, "decode_token": 0.1})


# --- and back ------------------------------------------------------------------------------------


def readings(**named: float) -> list[Measurement]:
    return [Measurement(name, value, unit_of(name), 1) for name, value in named.items()]


def test_readings_of_two_nodes_make_the_planners_input():
    measured = Measured()
    measured.sent("far", sample())
    measured.prefilled([(0, 256, 0.256)])
    receiver = readings(prefill_token=0.002, query=0.05, answer=0.7, decode_token=0.02)
    found = measures_of(
        measured.snapshot(), receiver, "far", load=Load(transfers=2, receiver_answers=4)
    )
    assert found.link.bytes_per_s == pytest.approx(1e7)
    assert found.link.fixed_s == pytest.approx(0.004)
    assert found.sender_prefill.token_s == pytest.approx(0.001)
    assert found.receiver_prefill.token_s == 0.002
    assert found.rates("int8").encode_bytes_per_s == pytest.approx(1e9)
    assert found.link_queue.wait_s == pytest.approx(2.0)
    assert found.receiver_queue.wait_s == pytest.approx(2.1)
    assert found.sender_queue.wait_s == 0.0
    assert (found.query_s, found.decode_token_s) == (0.05, 0.02)
    (assumed,) = found.assumed
    assert "native" in assumed
    assert "int8," not in assumed.replace("int8+zstd,", "")


def test_one_answer_alternates_with_a_prefill_and_the_others_go_first():
    ours = readings(answer=0.5, prefill=3.0)
    waits = [
        measures_of(ours, (), "", link_bytes_per_s=1.0, load=load).sender_queue.wait_s
        for load in (Load(sender_answers=1), Load(3), Load(3, 2))
    ]
    assert waits == pytest.approx([0.0, 1.0, 7.0])


def test_only_the_same_model_may_stand_in():
    ours = readings(prefill_token=0.001, query=0.05)
    same = measures_of(ours, [], "far", link_bytes_per_s=1e6)
    assert same.receiver_prefill == same.sender_prefill
    assert "the receiver's prefill: as the sender's" in same.assumed
    other = measures_of(ours, [], "far", link_bytes_per_s=1e6, same_model=False)
    assert (other.receiver_prefill, other.query_s) == (None, 0.0)


def test_a_link_is_measured_given_or_expected_in_this_order():
    measured = Measured()
    assert measures_of((), (), "far", expected_bytes_per_s=5e7).link.bytes_per_s == 5e7
    with pytest.raises(errors.InvalidRequest, match="sent nothing to 'far' yet"):
        measures_of((), (), "far")
    measured.sent("far", sample())
    snapshot = measured.snapshot()
    assert measures_of(snapshot, (), "far", expected_bytes_per_s=5e7).link.bytes_per_s == 1e7
    assert measures_of(snapshot, (), "far", link_bytes_per_s=1e9).link.bytes_per_s == 1e9
