"""The arithmetic of break-even, and figures from a result that is made here."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench import break_even as command
from cachelink_bench.break_even_model import (
    FAST_GBIT,
    Amortised,
    PrefillCurve,
    TransferLine,
    break_even,
)
from cachelink_bench.report import write_result
from cachelink_bench.two_node.plan import Plan
from cachelink_bench.two_node.results import (
    Results,
    make_prefills,
    make_rows,
    read_results,
)
from cachelink_bench.two_node.runs import FORMAT, PREFILL, Run
from cachelink_core.errors import ConfigError

TOKENS = {"1k": 1000, "2k": 2000, "4k": 4000}
LINK_GBIT = 0.8
TOKEN_BYTES = {"native": 20_000, "int4": 5_000}
FIXED_S = 0.05
MODES = {"overlapped": 1, "serial": 2}
SLOPE_S = 0.004


def _runs() -> tuple[Run, ...]:
    """Runs that obey the model exactly: reading is linear, a send takes its bytes at the rate.

    Those of serial nodes take twice as long, so that they show where they must not count.
    """
    runs: list[Run] = []
    answer = {"query_prefill": 0.2, "decode": 0.8, "total": 1.0}
    for context, tokens in TOKENS.items():
        prefill_s = SLOPE_S * tokens
        for mode, times in MODES.items():
            read = {"prefill": times * prefill_s}
            runs.append(Run(context, 0, 0, PREFILL, mode, tokens, handoff=read))
        for repeat in range(2):
            runs.append(
                Run(
                    context, 0, repeat, "text", "", tokens, 4 * tokens,
                    answer={**answer, "prefix": prefill_s, "total": 1.0 + prefill_s},
                    first_token_s=prefill_s + 0.2, round_trip_s=prefill_s + 1.0, ids=(1, 2),
                )
            )  # fmt: skip
            for (name, size), (mode, times) in product(TOKEN_BYTES.items(), MODES.items()):
                send_s = times * 8 * size * tokens / LINK_GBIT / 1e9
                stages = ("encode", "load", "load_busy", "install", "reserve", "tail")
                handoff = dict.fromkeys(stages, 0.01)
                handoff |= {"send": send_s, "total": send_s + FIXED_S}
                runs.append(
                    Run(
                        context, 0, repeat, name, mode, tokens, size * tokens, handoff, answer,
                        send_s + 0.3, send_s + FIXED_S + 1.0, (1, 2) if name == "native" else (1, 3),
                    )
                )  # fmt: skip
    return tuple(runs)


def _results(runs: tuple[Run, ...] | None = None) -> Results:
    plan = Plan(
        contexts=tuple(TOKENS), representations=("text", "native", "int4"), modes=tuple(MODES)
    )
    runs = _runs() if runs is None else runs
    return Results(
        format=FORMAT, date="2026-01-01 00:00 UTC", command="cachelink-bench two-node",
        config=plan, environment={}, nodes={"dtype": "bfloat16"}, load_average=0.0, documents=(),
        left_out=(), link=None, prefills=make_prefills(plan, runs), rows=make_rows(plan, runs),
        runs=runs,
    )  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "two-node.json"
    write_result(path, _results())
    return path


def test_the_model_finds_what_the_runs_were_made_from():
    found = break_even(_results())
    assert found.gbit_per_s == pytest.approx(LINK_GBIT)
    assert found.prefill.linear_s == pytest.approx(SLOPE_S)
    assert found.prefill.square_s == pytest.approx(0.0, abs=1e-12)
    for name, size in TOKEN_BYTES.items():
        line = found.lines[name]
        assert line.token_bytes == pytest.approx(size)
        assert line.fixed_s == pytest.approx(FIXED_S)
        for rate in (LINK_GBIT, FAST_GBIT):
            at = line.crossing(found.prefill, rate)
            assert at == pytest.approx(FIXED_S / (SLOPE_S - 8 * size / rate / 1e9))
            assert line.seconds(at, rate) == pytest.approx(found.prefill.seconds(at))


def test_a_curve_with_a_square_is_found_and_crossed():
    curve = PrefillCurve.fit([100, 400, 1600], [0.1 + 0.01, 0.4 + 0.16, 1.6 + 2.56])
    assert (curve.linear_s, curve.square_s) == pytest.approx((1e-3, 1e-6))
    line = TransferLine("native", 0.5, 250_000)  # 2 ms a token at 1 Gb/s: faster only far out
    at = line.crossing(curve, 1.0)
    assert at > 1000
    assert line.seconds(at, 1.0) == pytest.approx(curve.seconds(at))


def test_a_slope_that_is_never_passed_is_never_crossed():
    line = TransferLine("native", 0.1, 1_000_000)
    assert line.crossing(PrefillCurve(0.008, 0.0), 1.0) is None
    assert line.crossing(PrefillCurve(0.0081, 0.0), 1.0) == pytest.approx(1000.0)


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 1.9, 3.5]])
def test_points_that_no_upward_curve_fits_give_a_line(seconds):
    curve = PrefillCurve.fit([1000, 2000, 4000][: len(seconds)], seconds)
    assert curve.square_s == 0.0
    assert 0.0008 < curve.linear_s <= 0.001


def test_break_even_is_where_both_cost_the_same():
    item = Amortised("native", build_s=4.0, move_s=1.0, prefill_s=2.0, question_s=0.7)
    assert item.break_even == 2.5
    assert item.pays_from == 3
    assert item.moved_s(2.5) == pytest.approx(item.read_s)
    assert item.moved_s(2) > item.read_s > item.moved_s(3)
    assert item.kept_s(1) == item.read_s
    assert Amortised("native", 1.0, 1.0, 2.0, 0.7).pays_from == 2  # at 1 both cost the same


def test_rows_are_of_one_mode_and_count_equal_answers():
    results = _results()
    rows = {(row.context, row.representation, row.mode): row for row in results.rows}
    for mode, times in MODES.items():
        native, small = rows["1k", "native", mode], rows["1k", "int4", mode]
        assert (native.equal, native.compared) == (2, 2)
        assert (small.equal, small.compared) == (0, 2)
        sent_s = times * 8 * 5_000 * 1000 / LINK_GBIT / 1e9
        assert small.metrics["send_s"].median == pytest.approx(sent_s)
        assert {row.mode for row in results.rows_of(mode)} == {"", mode}
        (first, *_) = results.prefills_of(mode)
        assert first.seconds.median == pytest.approx(times * SLOPE_S * 1000)
    assert results.rows_of() == results.rows_of("overlapped")
    assert len([key for key in rows if key[1] == "text"]) == len(TOKENS)


def test_figures_are_written_twice_the_same(stored, tmp_path, capsys):
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        assert command.main([str(stored), "--out", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"{math.ceil(10 * FIXED_S / (SLOPE_S - 0.0002)) / 10:.1f} tokens" in shown
    names = {
        f"two-node-{figure}.{kind}"
        for figure in ("break-even", "amortised")
        for kind in ("png", "pdf")
    }
    for name in names:
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second
        assert len(first) > 5_000
        assert first.startswith(b"\x89PNG" if name.endswith("png") else b"%PDF")
    assert {path.name for path in folders[0].iterdir()} == names


def test_a_result_reads_back_as_it_was_written(stored):
    assert read_results(stored) == _results()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d | {"format": "cachelink-two-node-0"}, ("cachelink-two-node-0", FORMAT)),
        (lambda d: {"benchmark": "loopback"}, ("no result of the two-node benchmark",)),
        (lambda d: d | {"rows": 3}, ("no result of the two-node benchmark",)),
        (lambda d: d | {"rows": []}, ("rows of text", "0, 0 and 3")),
        (lambda d: d | {"prefills": d["prefills"][:1]}, ("no prefill", "'4k'")),
    ],
)
def test_a_file_that_is_no_such_result_is_one_clear_line(stored, capsys, change, words):
    stored.write_text(json.dumps(change(json.loads(stored.read_text()))))
    assert bench.main(["break-even", str(stored)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cachelink-bench break-even: ")
    assert all(word in line for word in words)
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


def test_no_file_is_one_clear_line(tmp_path, capsys):
    assert bench.main(["break-even", str(tmp_path / "missing.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "missing.json: No such file" in line
    with pytest.raises(ConfigError, match="Is a directory"):
        read_results(tmp_path)
