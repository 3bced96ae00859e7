"""``cachelink-bench codec-speed`` runs, and its verdicts follow from its rates."""

from __future__ import annotations

import json

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench import codec_speed
from cachelink_bench.codec_speed.figures import make_row, rows_table, verdicts
from cachelink_bench.codec_speed.measure import Arm, Sample, arms
from cachelink_bench.statistics import Spread


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_smoke_run_times_every_eager_arm(tmp_path, capsys):
    path = tmp_path / "speed.json"
    page = tmp_path / "speed.md"
    places = ("--json", str(path), "--markdown", str(page))
    assert codec_speed.main(["--smoke", "--strict", *places]) == 1, "nothing was judged"
    document = json.loads(path.read_text())
    rows = {(row["arm"]["codec"], row["arm"]["rope"]): row for row in document["rows"]}
    assert rows.keys() >= {("native", True), ("int4", True), ("int4", False), ("int4+zstd", True)}
    assert all(row["encode"]["median"] > 0 < row["decode"]["median"] for row in rows.values())
    assert rows["native", True]["wire_share"] == 1.0
    assert rows["int4", True]["wire_share"] < 0.29
    assert document["verdicts"] == [], "a smoke run judges nothing"
    assert document["command"] == "cachelink-bench codec-speed --smoke --strict"
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].endswith("--strict: no verdict: a smoke run")
    assert "memcpy" in shown.out
    head = f"# Codec speed\n\n{document['date']}, `{document['command']}`\n\n"
    assert page.read_text() == head + shown.out


def test_a_verdict_is_the_median_against_its_limit():
    arm = Arm("int4", "compiled", rope=True)
    samples = [Sample(encode_s, 0.5) for encode_s in (1.0, 1.0, 0.1)]
    row = make_row("wide", arm, samples, native_bytes=10**9, wire_bytes=250_000_000)
    assert row.encode.median == 1.0
    assert row.encode_cores == 5.0, "1.25 GB/s over a quarter of 1 GB/s"
    assert row.decode_cores == 2.5
    judged = verdicts([row])
    assert [(verdict.name, verdict.goal, verdict.met) for verdict in judged] == [
        ("wide int4 encode", False, True),
        ("wide int4 encode", True, False),
        ("wide int4 decode", False, True),
        ("wide int4 decode", True, True),
    ]
    assert [verdict.text("") for verdict in judged[:2]] == [
        "target: wide int4 encode: 1.00 GB/s, at least 0.9: met",
        "goal: wide int4 encode: 1.00 GB/s, at least 1.25: not reached",
    ]
    assert judged[0].text("NOT QUIET").endswith("at least 0.9: no verdict: NOT QUIET")


def test_only_compiled_arms_of_a_handoff_are_judged():
    rows = [make_row("wide", arm, [Sample(1.0, 1.0)], 10**9, 10**9) for arm in arms(compiled=True)]
    assert {verdict.name for verdict in verdicts(rows)} == {
        f"wide {codec} {what}" for codec in ("int8", "int4") for what in ("encode", "decode")
    }


def test_encoding_native_has_no_rate_since_nothing_is_moved():
    samples = [Sample(1e-6, 0.5)]
    rows = [
        make_row("wide", Arm(codec, "-", rope=True), samples, 10**9, 10**9)
        for codec in ("native", "native+zstd")
    ]
    lines = rows_table(rows, {"wide": Spread.of([4.0])}).splitlines()[-2:]
    native, packed = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert native[4:7] == ["-", "2.00 (2.00–2.00)", "-/0.50"]
    assert native[-2] == "-/0.62"
    assert "-" not in packed[4:]


def test_without_a_compiler_it_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.main(["codec-speed"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "cachelink-bench codec-speed: the codecs cannot be compiled here: none of"
    )
