"""``cachelink-bench codec-speed`` runs, and its verdicts follow from its rates."""

from __future__ import annotations

import json

import pytest

from cachelink_bench import codec_speed
from cachelink_bench.codec_speed.figures import make_row, verdicts
from cachelink_bench.codec_speed.measure import Arm, Sample, arms


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_smoke_run_times_every_eager_arm(tmp_path, capsys):
    path = tmp_path / "speed.json"
    assert codec_speed.main(["--smoke", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    rows = {(row["arm"]["codec"], row["arm"]["rope"]): row for row in document["rows"]}
    assert rows.keys() >= {("native", True), ("int4", True), ("int4", False), ("int4+zstd", True)}
    assert all(row["encode"]["median"] > 0 < row["decode"]["median"] for row in rows.values())
    assert rows["native", True]["wire_share"] == 1.0
    assert rows["int4", True]["wire_share"] < 0.29
    assert document["verdicts"] == [], "a smoke run judges nothing"
    assert "memcpy" in capsys.readouterr().out


def test_a_verdict_is_the_median_against_its_limit():
    arm = Arm("int4", "compiled", rope=True)
    samples = [Sample(encode_s, 0.5) for encode_s in (1.0, 1.0, 0.1)]
    row = make_row("wide", arm, samples, native_bytes=10**9, wire_bytes=250_000_000)
    assert row.encode.median == 1.0
    assert row.encode_cores == 5.0, "1.25 GB/s over a quarter of 1 GB/s"
    assert row.decode_cores == 2.5
    found = {verdict.name: verdict.met for verdict in verdicts([row])}
    assert found == {
        "wide int4 encode, target": True,
        "wide int4 encode, goal": False,
        "wide int4 decode, target": True,
        "wide int4 decode, goal": True,
    }


def test_only_compiled_arms_of_a_handoff_are_judged():
    rows = [make_row("wide", arm, [Sample(1.0, 1.0)], 10**9, 10**9) for arm in arms(compiled=True)]
    assert {verdict.name.split(",")[0] for verdict in verdicts(rows)} == {
        f"wide {codec} {what}" for codec in ("int8", "int4") for what in ("encode", "decode")
    }
