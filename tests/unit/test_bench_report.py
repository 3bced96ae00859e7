"""What the benchmarks' outputs have in common: commands without places, places, verdicts."""

from __future__ import annotations

import pytest

from cachelink_bench.report import Report, check_places, command_line, no_verdict, strict_status
from cachelink_core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], ""),
        (["--rounds", "3", "--json", "/root/x/out.json", "--strict"], " --rounds 3 --strict"),
        (["--json=/root/out.json", "--markdown", "out.md"], ""),
        (["--timeline", "/tmp/line", "--cache-dir", "/root/.cache", "--smoke"], " --smoke"),
        (["--model", "/root/models/small", "--ratios", "1"], " --model small --ratios 1"),
        (
            ["--model=/root/models/small", "--note", "two words"],
            " --model=small --note 'two words'",
        ),
    ],
)
def test_a_command_is_kept_without_paths_of_this_machine(given, kept):
    assert command_line("link", given) == f"cachelink-bench link{kept}"


def test_places_are_checked_and_left_as_they_were(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("kept", encoding="utf-8")
    check_places(tmp_path / "new.json", None, old)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text(encoding="utf-8") == "kept"


def test_a_place_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    for place, reason in (
        (tmp_path / "none" / "out.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "out.json", "Not a directory"),
    ):
        with pytest.raises(ConfigError) as raised:
            check_places(place)
        assert str(raised.value) == f"{place} cannot be written: {reason}"


@pytest.mark.parametrize(
    ("met", "why", "said"),
    [
        ([True, True], "", ""),
        ([True, False, None], "", "1 of 3 targets missed"),
        ([True, None], "", "no verdict: not everything was judged"),
        ([None, None], "a smoke run", "no verdict: a smoke run"),
        ([], "", "no verdict: not everything was judged"),
    ],
)
def test_strict_passes_only_when_every_target_was_judged_and_met(capsys, met, why, said):
    assert strict_status("link", met, why) == bool(said)
    assert capsys.readouterr().err == (f"cachelink-bench link: --strict: {said}\n" if said else "")


def test_busy_machines_and_smoke_runs_give_no_verdict():
    assert no_verdict(0.5, smoke=False) == ""
    assert no_verdict(0.51, smoke=False) == "NOT QUIET, load average 0.51"
    assert no_verdict(0.0, smoke=True) == "a smoke run"


def test_a_report_has_its_date_and_command_before_what_was_printed(tmp_path, capsys):
    report = Report()
    report.say("one")
    report.write(tmp_path / "out.md", "Title", "2026-11-30 08:00 UTC", "cachelink-bench link")
    report.write(None, "Title", "", "")
    text = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert text == "# Title\n\n2026-11-30 08:00 UTC, `cachelink-bench link`\n\none\n"
    assert capsys.readouterr().out == "one\n"
