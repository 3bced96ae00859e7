"""The planner's arithmetic: bytes, predictions, choices, and where a decision flips."""

import math

import msgspec
import pytest

from cachelink_core import errors
from cachelink_core.codec_spec import parse_codec
from cachelink_core.identity import LayerGeometry
from cachelink_core.layout import CacheLayout, plan_runs
from cachelink_core.planner import (
    TEXT,
    CacheShape,
    CodecRates,
    Job,
    LayerShape,
    Link,
    Measures,
    Prefill,
    Queue,
    Wanted,
    Way,
    choose,
    predict,
    transfer_ways,
)
from cachelink_core.planner.crossover import break_even_rate, crossover_tokens
from cachelink_core.planner.pairs import PAIRS, pair_named
from cachelink_core.planner.questions import break_even_questions, cost_per_question_s
from cachelink_core.planner.ways import CODEC_KL_NATS

SMALL = CacheShape((LayerShape(3, 64, count=30),), "bfloat16")
"""SmolLM2-135M: 23,040 bytes a token."""

NATIVE, INT8, INT4 = Way("native"), Way("int8"), Way("int4")
ALL = (*transfer_ways("bfloat16"), TEXT)
GBIT = 125e6


def measures(link=GBIT, **changes) -> Measures:
    given = {
        "link": Link(link, fixed_s=0.005),
        "receiver_prefill": Prefill(0.002),
        "sender_prefill": Prefill(0.001),
        "query_s": 0.05,
        "decode_token_s": 0.02,
    }
    return Measures(**{**given, **changes})


def job(tokens=2048, held=True, **changes) -> Job:
    return Job(shape=SMALL, tokens=tokens, held_tokens=tokens if held else 0, **changes)


def free(codec="native") -> dict[str, CodecRates]:
    """A codec that costs nothing."""
    return {codec: CodecRates(1e30, 1e30)}


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 5, 256, 300, 2048, 2049])
@pytest.mark.parametrize("block", [16, 256])
def test_bytes_are_those_of_the_layout(codec, tokens, block):
    full = LayerGeometry(3, 64, rotary_dim=64)
    sliding = LayerGeometry(2, 32, "sliding", 128, rotary_dim=32)
    geometry = (full, sliding, full)
    spec, _ = parse_codec(codec)
    runs = plan_runs(geometry, "bfloat16", block)
    layout = CacheLayout(geometry, "bfloat16", tokens, block, runs, spec)
    shape = CacheShape((LayerShape(3, 64, count=2), LayerShape(2, 32, 128)), "bfloat16", block)
    assert shape.encoded_bytes(codec, tokens) == layout.encoded_bytes
    assert shape.native_bytes(tokens) == layout.native_bytes


# --- predictions ---------------------------------------------------------------------------------


def test_a_held_cache_on_a_slow_link_costs_its_bytes():
    found = predict(NATIVE, job(), measures(codecs=free()))
    assert found.wire_bytes == 2048 * 23_040
    assert found.ready_s == pytest.approx(0.005 + found.wire_bytes / GBIT, rel=1e-6)
    assert found.first_token_s == pytest.approx(found.ready_s + 0.05)
    assert found.total_s == pytest.approx(found.first_token_s + 32 * 0.02)


def test_while_a_prefill_streams_only_the_last_block_shows():
    """Eight blocks: the slower of prefill and link, and an eighth of the other."""
    at = measures(codecs=free())
    prefill_s, link_s = 2.048, 2048 * 23_040 / GBIT
    streamed = predict(NATIVE, job(held=False), at)
    assert streamed.ready_s == pytest.approx(0.005 + prefill_s + link_s / 8, rel=1e-6)
    after = predict(NATIVE, job(held=False, stream=False), at)
    assert after.ready_s == pytest.approx(0.005 + prefill_s + link_s, rel=1e-6)
    half = msgspec.structs.replace(job(held=False), held_tokens=1024)
    assert predict(NATIVE, half, at).parts["prefill"] == pytest.approx(1.024)


def test_a_slow_link_begins_after_the_first_block_and_never_stops():
    slow = measures(link=1e7, codecs=free())
    found = predict(NATIVE, job(held=False), slow)
    assert found.ready_s == pytest.approx(0.005 + 2.048 / 8 + 2048 * 23_040 / 1e7, rel=1e-6)


def test_encoding_and_loading_hide_behind_the_link_but_for_a_chunk():
    rates = {"int8": CodecRates(2e8, 3e8)}
    found = predict(INT8, job(), measures(link=5e6, codecs=rates))
    parts = found.parts
    others = (parts["encode"] + parts["load"]) / SMALL.chunks(2048)
    assert found.ready_s == pytest.approx(0.005 + parts["link"] + others)


def test_stage_after_stage_is_the_sum():
    rates = {"int8": CodecRates(1e9, 2e9)}
    found = predict(INT8, job(overlap=False), measures(codecs=rates))
    parts = found.parts
    assert found.ready_s == pytest.approx(
        parts["fixed"] + parts["encode"] + parts["link"] + parts["load"]
    )
    assert parts["encode"] == pytest.approx(2 * parts["load"])


def test_attention_makes_long_prefixes_dearer():
    prefill = Prefill(1e-3, 1e-7)
    assert prefill.seconds(0, 1000) == pytest.approx(1.1)
    assert prefill.seconds(1000, 2000) == pytest.approx(1.3)


def test_translation_is_a_stage_of_the_receiver():
    at = measures(codecs=free(), map_token_s=0.01)
    found = predict(Way("native", mapped=True), job(), at)
    link_s = 2048 * 23_040 / GBIT
    chunks = SMALL.chunks(2048)
    assert chunks == 48
    assert found.ready_s == pytest.approx(0.005 + 20.48 + link_s / chunks, rel=1e-6)


@pytest.mark.parametrize(
    ("way", "changes", "missing"),
    [
        (TEXT, {"receiver_prefill": None}, "the receiver's prefill not measured"),
        (NATIVE, {"sender_prefill": None}, "the sender's prefill not measured"),
        (Way("native", mapped=True), {}, "the receiver's translation not measured"),
    ],
)
def test_what_was_never_measured_is_not_predicted(way, changes, missing):
    found = predict(way, job(held=False), measures(**changes))
    assert (found.total_s, found.excluded) == (None, missing)


# --- choices -------------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_the_reason_has_both_sides():
    plan = choose(ALL, job(), measures())
    assert plan.chosen == "int4+zstd"
    assert "int4+zstd: 0." in plan.why
    assert "text: 4." in plan.why
    assert "mostly prefill 4.096 s" in plan.why


def test_re_reading_wins_on_a_slow_link():
    plan = choose(ALL, job(), measures(link=1e6))
    assert plan.text
    assert plan.chosen == "text"
    assert plan.predicted_s == pytest.approx(4.096)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (Wanted(), "int4+zstd"),
        (Wanted("exact"), "native+zstd"),
        (Wanted("lossy", 0.003), "int8+zstd"),
        (Wanted("mapped", 0.001), "native+zstd"),
        (Wanted("mapped", CODEC_KL_NATS["int4"]), "int4+zstd"),
    ],
)
def test_only_what_is_good_enough_is_taken(wanted, chosen):
    plan = choose(ALL, job(), measures(), wanted)
    assert plan.chosen == chosen
    refused = {p.way: p.excluded for p in plan.predictions if p.excluded}
    assert ("int4" in refused) == (chosen != "int4+zstd")


def test_a_mapped_cache_has_no_known_error_and_the_least_trust():
    mapped = Way("int4", mapped=True)
    assert Wanted("lossy").refusal(mapped, "bfloat16") == "trust is mapped, asked for lossy"
    assert "unknown" in Wanted("mapped", 0.1).refusal(mapped, "bfloat16")
    assert Wanted("mapped").refusal(mapped, "bfloat16") == ""


def test_rounding_a_float32_cache_is_lossy_and_native_is_not():
    ways = {way.codec for way in transfer_ways("float32")}
    assert {"bf16", "bf16+zstd"} <= ways
    assert Way("bf16").trust("float32") == "lossy"
    assert Way("bf16").trust("bfloat16") == "exact"
    assert not {"bf16"} & {way.codec for way in transfer_ways("bfloat16")}


def test_equally_fast_ways_go_to_the_more_exact_one():
    """On a fast link what differs is less than the tie: nothing is gained by rounding."""
    plan = choose(ALL, job(tokens=256), measures(link=1e12))
    assert plan.chosen == "native"


def test_no_admissible_way_is_said_with_every_reason():
    plan = choose((Way("int4", mapped=True),), job(), measures(), Wanted("exact"))
    assert (plan.chosen, plan.predicted_s) == ("", None)
    assert plan.why == "no way is admissible: mapped:int4: trust is mapped, asked for exact"


def test_without_a_measured_prefill_the_fastest_transfer_is_taken_and_said_so():
    plan = choose(ALL, job(), measures(receiver_prefill=None))
    assert plan.chosen == "int4+zstd"
    assert "the receiver's prefill not measured" in plan.why


@pytest.mark.parametrize("queue", ["link_queue", "receiver_queue"])
def test_a_queue_flips_the_choice_both_ways(queue):
    """Transfers ahead make re-reading win; answers ahead make the transfer win."""
    slow = measures(link=4.0e6 if queue == "link_queue" else 1.2e6)
    idle = choose((INT4, TEXT), job(), slow)
    busy = choose((INT4, TEXT), job(), msgspec.structs.replace(slow, **{queue: Queue(4, 3.0)}))
    assert idle.chosen == ("int4" if queue == "link_queue" else "text")
    assert busy.chosen == ("text" if queue == "link_queue" else "int4")


def test_a_busy_sender_delays_only_what_it_must_prefill():
    queued = measures(sender_queue=Queue(2, 1.5))
    assert predict(NATIVE, job(), queued).ready_s == predict(NATIVE, job(), measures()).ready_s
    cold, idle = (predict(NATIVE, job(held=False), m) for m in (queued, measures()))
    assert cold.ready_s == pytest.approx(idle.ready_s + 3.0)


# --- several questions ---------------------------------------------------------------------------


def test_the_break_even_count_is_where_the_totals_cross():
    slow = measures(link=2e6)
    one = job()
    count = break_even_questions(NATIVE, one, slow)
    assert count == 6
    costs = [
        (cost_per_question_s(NATIVE, one, slow, n), cost_per_question_s(TEXT, one, slow, n))
        for n in (count - 1, count)
    ]
    assert costs[0][0] > costs[0][1]
    assert costs[1][0] <= costs[1][1]


def test_the_totals_are_those_of_the_equation():
    at, n = measures(codecs=free()), 5
    cold = job(held=False, stream=False, overlap=False, questions=n)
    build, move = 2.048, 2048 * 23_040 / GBIT + 0.005
    each = 0.05 + 32 * 0.02
    assert predict(NATIVE, cold, at).total_s == pytest.approx(build + move + n * each, rel=1e-6)
    assert predict(TEXT, cold, at).total_s == pytest.approx(n * (4.096 + each))


def test_one_question_suffices_where_the_transfer_wins_at_once():
    assert break_even_questions(INT4, job(), measures()) == 1
    assert break_even_questions(INT4, job(), measures(receiver_prefill=None)) is None


def test_more_questions_turn_the_choice():
    slow = measures(link=2e6)
    assert choose((NATIVE, TEXT), job(questions=5), slow).chosen == "text"
    assert choose((NATIVE, TEXT), job(questions=6), slow).chosen == "native"


# --- where it flips ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["native", "native+zstd", "int8", "int4", "int4+zstd"])
@pytest.mark.parametrize("held", [True, False])
def test_the_decision_flips_at_the_computed_crossover(codec, held):
    """Fixed costs of 0.8 s are worth it only from some length on; one token less, and they are not."""
    at = measures(link=5e7, link_queue=Queue(1, 0.8))
    way = Way(codec)
    length = crossover_tokens(way, job(held=held), at)
    assert 100 < length < 2000
    below, above = (choose((way, TEXT), job(n, held=held), at) for n in (length - 1, length))
    totals = {p.way: p.total_s for p in below.predictions}
    assert totals[codec] > totals["text"]
    totals = {p.way: p.total_s for p in above.predictions}
    assert totals[codec] <= totals["text"]
    assert above.chosen == codec


def test_a_link_that_is_too_slow_has_no_crossover_and_a_fast_one_has_it_at_once():
    assert crossover_tokens(NATIVE, job(), measures(link=1e6)) is None
    at = measures(link=1e9)
    assert crossover_tokens(NATIVE, job(), at) < 10


def test_quadratic_attention_makes_a_slow_link_worth_it_in_the_end():
    at = measures(link=1.0e7, receiver_prefill=Prefill(0.002, 1e-7))
    length = crossover_tokens(NATIVE, job(), at)
    assert 1000 < length < 10_000
    assert crossover_tokens(NATIVE, job(), measures(link=1.0e7)) is None


# --- the published pairs -------------------------------------------------------------------------


def gbit(name: str, codec: str = "native") -> float:
    """The least link of a pair in Gb/s: link and translation one after the other, as published."""
    pair = PAIRS[name]
    whole = Job(shape=pair.shape, tokens=32_768, held_tokens=32_768, overlap=False)
    return break_even_rate(Way(codec, mapped=True), whole, pair.measures(1e9)) * 8 / 1e9


@pytest.mark.parametrize(
    ("name", "kib", "prefill_ms", "map_ms", "rate"),
    [
        ("qwen3-14b-32b", 160, 0.215, 0.0296, 7.1),
        ("ministral-8b-14b", 136, 0.0766, 0.0124, 17.3),
        ("qwen3-8b-14b", 144, 0.0970, 0.0185, 15.0),
        ("yi-9b-34b", 96, 0.2255, 0.0277, 4.0),
    ],
)
def test_the_four_pairs(name, kib, prefill_ms, map_ms, rate):
    """The first two are published; the others are scaled from the first and say so."""
    pair = PAIRS[name]
    assert pair.shape.native_bytes(1) == kib * 1024
    assert pair.prefill_s / 32_768 * 1e3 == pytest.approx(prefill_ms, rel=0.01)
    assert pair.map_s / 32_768 * 1e3 == pytest.approx(map_ms, rel=0.01)
    by_hand = kib * 1024 * 8 / (prefill_ms - map_ms) / 1e6
    assert gbit(name) == pytest.approx(by_hand, rel=0.01)
    assert gbit(name) == pytest.approx(rate, rel=0.01)
    assert pair.estimated == (name in ("qwen3-8b-14b", "yi-9b-34b"))
    scaled = [what for what in pair.measures(1e9).assumed if "scaled" in what]
    assert len(scaled) == pair.estimated


def test_eight_bits_halve_the_link_that_a_pair_needs():
    assert gbit("qwen3-14b-32b", "int8") == pytest.approx(3.6, rel=0.05)


def test_on_gigabit_a_32k_cache_of_the_largest_pair_is_refused():
    """About 45 s against 7 s of reading again."""
    pair = PAIRS["qwen3-14b-32b"]
    whole = Job(shape=pair.shape, tokens=32_768, held_tokens=32_768)
    plan = choose((Way("native", mapped=True), TEXT), whole, pair.measures(0.94 * GBIT))
    assert plan.text
    by_name = {p.way: p.ready_s for p in plan.predictions}
    assert by_name["mapped:native"] == pytest.approx(45.7, rel=0.01)
    assert by_name["text"] == pytest.approx(7.04, rel=0.01)


def test_an_unknown_pair_is_refused_with_the_known_ones():
    with pytest.raises(errors.InvalidRequest, match=r"'llama'; known: qwen3-14b-32b, ministral"):
        pair_named("llama")


def test_a_plan_survives_json():
    plan = choose(ALL, job(), measures())
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan
    assert math.isfinite(plan.predicted_s)
