"""The table and the verdicts of ``cachelink-bench planner``, from recorded and from invented runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.planner import _parse, _status, _write
from cachelink_bench.planner_report import (
    Document,
    LinkRuns,
    holds,
    judge,
    judged,
    report_text,
    times,
    verdict_text,
)
from cachelink_bench.planner_runs import Case, Run
from cachelink_bench.report import Report, without_folder
from cachelink_core.planner import Plan

RECORDED = Path(__file__).parents[1] / "golden" / "planner" / "fast-links.json"


def recorded(load: float) -> Document:
    document = msgspec.json.decode(RECORDED.read_bytes(), type=Document)
    return judged(msgspec.structs.replace(document, load_average=load))


def a_case(chosen=("int4", "int4", "text")) -> Case:
    """int4 is best: 2.0 s of 1.6 to 2.4; text takes 2.1 s, native 4."""
    runs = []
    for moved_s, way in zip((1.6, 2.0, 2.4), chosen, strict=True):
        runs += [Run("native", 4.0, 3.5), Run("int4", moved_s, moved_s - 0.5)]
        runs += [Run("text", 2.1, 0.0), Run("auto", 9.0, 0.0, Plan(chosen=way, why="because"))]
    return Case(256, (), (), tuple(runs))


def a_document(*cases: Case, load: float = 0.1) -> Document:
    links = (LinkRuns("10mbit", 3, cases),)
    return judged(Document("f", "d", "cachelink-bench planner", "demo", {}, load, links))


def test_every_recorded_cell_has_its_row_and_its_verdict():
    document = recorded(load=0.3)
    assert len(document.verdicts) == 6
    shown = report_text(document)
    lines = shown.splitlines()
    cells = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines[2:8]}
    assert {(row[0], row[1]) for row in cells} == {
        (rate, tokens) for rate in ("100mbit", "1gbit") for tokens in ("256", "512", "1024")
    }
    assert all(len(row) == 2 + 7 + 4 for row in cells)
    (row,) = (row for row in cells if row[:2] == ("100mbit", "256"))
    assert row[9] == "int4+zstd ×2, int4 ×3"
    held = sum(row[-1] == "holds" for row in cells)
    assert {row[-1] for row in cells} <= {"holds", "MISSED"}
    assert lines[-1] == f"{held} of 6 cells hold"


def test_verdicts_are_those_of_the_rule():
    for verdict, case in zip(recorded(0.3).verdicts, cases(recorded(0.3)), strict=True):
        assert verdict.holds == all(holds(times(case), way) for way in verdict.chosen)
        assert len(verdict.chosen) == 5
        assert verdict.over_best >= 1.0


def cases(document: Document) -> list[Case]:
    return [case for link in document.links for case in link.cases]


def test_a_busy_machine_gets_no_verdict():
    document = recorded(load=0.51)
    assert {verdict.holds for verdict in document.verdicts} == {None}
    assert report_text(document).count("none: NOT QUIET") == 6
    assert verdict_text(document) == "no verdict: NOT QUIET, load average 0.51"
    assert _status(document) == 1, "nothing was judged"


@pytest.mark.parametrize(
    ("best", "other", "good"),
    [
        ([1.0, 1.0, 1.0], 1.1, True),  # within 10 %
        ([1.0, 1.0, 1.0], 1.101, False),
        ([0.8, 1.0, 1.4], 1.2, True),  # at the best way's p75
        ([0.8, 1.0, 1.4], 1.201, False),
        ([1.0], 1.05, True),  # a single round has no spread
    ],
)
def test_a_choice_holds_near_the_best_median_or_inside_its_quartiles(best, other, good):
    timed = {"int4": best, "text": [other] * len(best)}
    assert holds(timed, "text") is good
    assert holds(timed, "int4")


def test_every_handoff_is_given_the_median_of_all_queries():
    case = Case(1, (), (), (Run("native", 3.0, 1.0), Run("int4", 2.5, 2.0), Run("text", 7.0, 0.0)))
    assert times(case) == {"native": [2.25], "int4": [3.25], "text": [7.0]}


def test_the_slowest_choice_counts():
    verdict = judge("10mbit", a_case(), quiet=True)
    assert (verdict.best, verdict.chosen) == ("int4", ("int4", "int4", "text"))
    assert verdict.over_best == pytest.approx(2.1 / 2.0)
    assert verdict.holds
    poor = judge("10mbit", a_case(("int4", "native", "text")), quiet=True)
    assert poor.over_best == pytest.approx(2.0)
    assert poor.holds is False


def test_a_missed_cell_is_counted_and_strict_fails_on_it():
    good, mixed = a_document(a_case()), a_document(a_case(), a_case(("native",) * 3))
    assert verdict_text(good) == "1 of 1 cells hold"
    assert verdict_text(mixed) == "1 of 2 cells hold"
    assert "MISSED" in report_text(mixed)
    assert [_status(each) for each in (good, mixed)] == [0, 1]


def test_both_files_are_written_and_verdicts_are_read_back(tmp_path):
    document = a_document(a_case())
    out, report = tmp_path / "out.json", tmp_path / "out.md"
    said = Report()
    said.say(report_text(document))
    _write(_parse(["--json", str(out), "--markdown", str(report)]), document, said)
    assert msgspec.json.decode(out.read_bytes(), type=Document) == document
    text = report.read_text()
    assert "`cachelink-bench planner`" in text
    assert text.endswith("\n1 of 1 cells hold\n")


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_place_that_cannot_be_written_is_one_line_before_anything_runs(tmp_path, capsys, option):
    taken = tmp_path / "file"
    taken.touch()
    for path, why in ((taken / "out", "Not a directory"), (tmp_path, "Is a directory")):
        assert bench.main(["planner", option, str(path)]) == 1
        shown = capsys.readouterr()
        assert shown.err == f"cachelink-bench planner: {path} cannot be written: {why}\n"
        assert shown.out == ""


def test_of_a_model_in_a_folder_its_name_is_kept():
    names = ("demo", "owner/name", "/srv/models/some")
    assert [without_folder(name) for name in names] == ["demo", "owner/name", "some"]


@pytest.mark.parametrize(
    ("option", "value"), [("--tokens", "256,no"), ("--tokens", "0"), ("--repeats", "0")]
)
def test_wrong_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit) as left:
        bench.main(["planner", option, value])
    assert left.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]
