"""The planner against recorded runs: its choice beside the fastest way as it was measured.

The fixtures are what ``cachelink-bench planner`` wrote: two daemons with SmolLM2-135M in two network
namespaces, the sender holding the prefix, on a machine with two cores and much else to do. Times and
rule are those of the benchmark itself.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest

from cachelink_bench.planner_report import FORMAT, Document, holds, times
from cachelink_bench.planner_runs import Case
from cachelink_core.planner import (
    TEXT,
    CacheShape,
    Job,
    LayerShape,
    Measures,
    Queue,
    Wanted,
    choose,
    transfer_ways,
)
from cachelink_core.planner.readings import measures_of

FOLDER = Path(__file__).parents[1] / "golden" / "planner"
SHAPE = CacheShape((LayerShape(3, 64, count=30),), "bfloat16")
"""SmolLM2-135M."""

PEER = "emulated"


def load() -> dict[tuple[str, int], Case]:
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        document = msgspec.json.decode(path.read_bytes(), type=Document)
        assert document.format == FORMAT
        for link in document.links:
            for case in link.cases:
                found[link.rate, case.tokens] = case
    return found


CASES = load()
NAMES = [f"{rate}-{tokens}" for rate, tokens in CASES]
EACH = pytest.mark.parametrize("case", CASES.values(), ids=NAMES)


def measures(case: Case) -> Measures:
    return measures_of(case.sender, case.receiver, PEER)


def job(case: Case) -> Job:
    return Job(shape=SHAPE, tokens=case.tokens, held_tokens=case.tokens, answer_tokens=1)


def plan(case: Case, at: Measures | None = None, wanted: Wanted | None = None):
    return choose((*transfer_ways("bfloat16"), TEXT), job(case), at or measures(case), wanted)


def test_three_links_and_three_lengths_are_there():
    assert {rate for rate, _ in CASES} == {"10mbit", "100mbit", "1gbit"}
    assert len({tokens for _, tokens in CASES}) == 3
    assert len(CASES) == 9
    for case in CASES.values():
        ways = times(case)
        assert len(ways) == 7
        assert all(len(each) >= 3 for each in ways.values())


@EACH
def test_the_choice_is_as_good_as_the_best_recorded_way(case):
    """Within 10 % of the best median, or inside the best's p25 to p75."""
    recorded = times(case)
    medians = {way: statistics.median(each) for way, each in recorded.items()}
    assert holds(recorded, plan(case).chosen), medians


@EACH
def test_the_choice_at_run_time_was_the_same_kind(case):
    """``codec: auto`` took part in the runs; it knew more with every run than before the first."""
    recorded = {way: statistics.median(each) for way, each in times(case).items()}
    for run in case.runs:
        if run.plan is not None:
            assert recorded[run.plan.chosen] <= 1.5 * min(recorded.values())


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("1gbit")])
def test_predicted_times_are_those_that_were_recorded(name):
    """Where the link takes most of it; on the fast link it is the busy cores, in equal runs as well."""
    case = dict(zip(NAMES, CASES.values(), strict=True))[name]
    recorded: dict[str, list[float]] = {}
    for run in case.runs:
        recorded.setdefault(run.way, []).append(run.ready_s)
    for prediction in plan(case).predictions:
        if prediction.way != "text":
            took_s = statistics.median(recorded[prediction.way])
            assert prediction.ready_s == pytest.approx(took_s, rel=0.2), prediction.way


def test_reading_again_won_on_the_slow_link_and_was_chosen():
    slow = {tokens: case for (rate, tokens), case in CASES.items() if rate == "10mbit"}
    won = [
        case for case in slow.values()
        if statistics.median(times(case)["text"])
        == min(statistics.median(each) for each in times(case).values())
    ]  # fmt: skip
    assert won
    assert any(plan(case).text for case in won)


@EACH
def test_a_queue_flips_the_choice(case):
    """With enough answers ahead the cache travels meanwhile; with enough transfers, it waits."""
    at = measures(case)
    answers = msgspec.structs.replace(at, receiver_queue=Queue(10, 10.0))
    transfers = msgspec.structs.replace(at, link_queue=Queue(10, 10.0))
    assert not plan(case, answers).text
    assert plan(case, transfers).text
