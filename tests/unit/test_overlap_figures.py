"""The figures of ``cachelink-bench overlap`` from receipts whose every time is known."""

from __future__ import annotations

import msgspec
import pytest

from cachelink_bench.overlap.figures import figures, make_rows, make_verdicts, typical
from cachelink_bench.overlap.measure import rounded
from cachelink_bench.overlap.tables import rows_text, verdicts_text
from cachelink_bench.overlap.task import Run
from cachelink_core.rpc.types import Receipt, Timeline

BLOCKS = 4
RESERVE_S = 0.25
"""From the begin of the prefill to the reply to Reserve."""


def a_run(way: str, push_s: float = 0.0, ready_s=(), number: int = 0, **phases: float) -> Run:
    receipt = Receipt(
        handoff_id="h", cache_id="c", sender_cache_id="s", tokens=BLOCKS, prefilled_tokens=BLOCKS,
        codec="native", trust="exact", wire_bytes=1_000,
        phases={"push": push_s, "prefill": 4.0, "load_busy": 0.0, "transform": 0.0, **phases},
        timeline=Timeline(prefilled_at_s=tuple(ready_s)),
    )  # fmt: skip
    return Run(number, "native", 1.0, way, 8_000_000, receipt)


def ways(link_s: float, received_s: float, number: int = 0, **phases: float) -> dict[str, Run]:
    """A prefill of a second a block, over a link that needs ``link_s`` for all of them."""
    ready_s = [block + 1 - RESERVE_S for block in range(BLOCKS)]
    return {
        "prefill": a_run("prefill", number=number),
        "link": a_run("link", link_s, [0.0] * BLOCKS, number, **phases),
        "overlap": a_run("overlap", received_s, ready_s, number),
        # The prefill of serial nodes is over before Reserve.
        "serial": a_run("serial", link_s + 0.5, [-0.1] * BLOCKS, number),
    }


def test_a_faster_link_hides_behind_the_prefill_but_for_one_block():
    found = figures(ways(link_s=2.0, received_s=4.0 - RESERVE_S + 0.5), mapped=False)
    assert found.total_s == pytest.approx(4.5)
    assert found.block_s == 0.5
    assert found.ratio == 2.0
    assert found.over_floor == pytest.approx(1.0)
    assert found.tail_blocks == found.entry_blocks == pytest.approx(1.0)
    assert found.serial_s == pytest.approx(4.0 + 0.1 + 2.5)
    assert found.speed_up == pytest.approx(6.6 / 4.5)


def test_a_slower_link_holds_blocks_back_that_are_no_fault_of_the_pipeline():
    first_s = 1.0 - RESERVE_S
    found = figures(ways(link_s=8.0, received_s=first_s + 8.0), mapped=False)
    assert found.total_s == pytest.approx(9.0)
    assert found.over_floor == pytest.approx((9.0 - 2.0) / 8.0)
    assert found.tail_blocks == pytest.approx((first_s + 8.0 - (4.0 - RESERVE_S)) / 2.0)
    assert found.entry_blocks == pytest.approx(1.0)


def test_translation_can_be_the_slowest_stage_and_only_counts_for_another_model():
    runs = ways(link_s=2.0, received_s=9.0, load_busy=1.0, transform=5.0)
    assert figures(runs, mapped=True).floor_s == 6.0
    assert figures(runs, mapped=False).floor_s == 4.0


@pytest.mark.parametrize(("late_s", "missed"), [(0.0, 0), (0.3, 1), (3.0, 3)])
def test_a_verdict_is_of_the_median_and_of_quiet_machines_only(late_s, missed):
    runs = [
        run
        for number in range(3)
        for run in ways(2.0, 4.0 - RESERVE_S + 0.5 + late_s, number).values()
    ]
    rows = make_rows(runs, mapped=())
    judged = make_verdicts(rows, "")
    assert [verdict.figure for verdict in judged] == ["over_floor", "tail_blocks", "entry_blocks"]
    assert [verdict.met for verdict in judged].count(False) == missed
    assert verdicts_text(judged, "").count("MISSED") == missed
    busy = make_verdicts(rows, "NOT QUIET")
    assert [verdict.met for verdict in busy] == [None] * 3
    assert verdicts_text(busy, "NOT QUIET").count("no verdict: NOT QUIET") == 3
    assert "2.00" in rows_text(rows)


def test_rows_are_sorted_from_slow_links_to_fast_ones_and_judged_by_the_ratio_aimed_at():
    runs = [
        msgspec.structs.replace(run, ratio=ratio)
        # At 1 the measured link is slower than the prefill by noise.
        for ratio, link_s in ((2.0, 2.0), (1.0, 4.1), (0.5, 8.0))
        for run in ways(link_s, 9.0 - RESERVE_S).values()
    ]
    rows = make_rows(runs, mapped=())
    both = ("over_floor", "tail_blocks", "entry_blocks")
    assert [(row.ratio, row.applying) for row in rows] == [
        (0.5, ("over_floor", "entry_blocks")),
        (1.0, both),
        (2.0, both),
    ]
    judged = make_verdicts(rows, "")
    assert len(judged) == 3 * 3, "the tail after the last block too, where it does not count"
    (left,) = [verdict for verdict in judged if not verdict.applies]
    assert (left.ratio, left.figure, left.met) == (0.5, "tail_blocks", False)
    line = verdicts_text([left], "")
    assert line.startswith("native at 0.5: blocks after the last one was prefilled: 2.5")
    assert line.endswith("MISSED, does not count: the link is slower than the prefill")


def test_the_typical_handoff_is_the_median_at_the_ratio_nearest_to_one():
    runs = []
    for ratio in (0.5, 1.1, 2.0):
        for number, received_s in enumerate((9.0, 7.0, 8.0)):
            made = ways(2.0, received_s + ratio, number).values()
            runs += [msgspec.structs.replace(run, ratio=ratio) for run in made]
    assert typical(runs).phases["push"] == 8.0 + 1.1


def test_receipts_are_kept_to_the_microsecond():
    receipt = a_run("overlap", 1.23456789, [0.1111111111]).receipt
    kept = rounded(receipt)
    assert kept.phases["push"] == 1.234568
    assert kept.timeline == Timeline(prefilled_at_s=(0.111111,))
    assert kept.wire_bytes == receipt.wire_bytes
