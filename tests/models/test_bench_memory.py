"""``cachelink-bench memory``: real daemons, small caches; and how samples become verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench.memory.cases import FULL, SMOKE, Case, make_cases
from cachelink_bench.memory.measure import Sample, Side, prefix_ids
from cachelink_bench.memory.process_memory import ProcessMemory
from cachelink_bench.memory.report import make_rows, rows_text, verdict_text
from cachelink_core import limits
from cachelink_core.errors import ConfigError

MB = 1_000_000
NATIVE = Case("native", "tcp")
MAPPED = Case("native", "tcp", mapped=True)


@pytest.mark.slow
def test_a_smoke_run_is_plausible(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    out = tmp_path / "memory.json"
    argv = ["memory", "--smoke", "--cache-dir", str(tmp_path / "models"), "--json", str(out)]
    assert bench.main([*argv, "--strict"]) == 1, "the cache is too small for a verdict"
    document = json.loads(out.read_text())
    assert document["format"] == "cachelink-memory-1"
    assert document["target_met"] is None
    assert document["command"] == "cachelink-bench memory --smoke --strict"
    assert "no verdict: it takes a cache of 500 MB" in capsys.readouterr().out
    (sample,) = document["samples"]
    held = (SMOKE.tokens + limits.DEFAULT_HEADROOM_TOKENS) * SMOKE.sender.token_bytes
    for side in (sample["sender"], sample["receiver"]):
        assert side["cache_bytes"] == held
        assert 100 * MB < side["model_bytes"] < 2_000 * MB
        # Pages of the cache were touched, and little else.
        assert side["peak_bytes"] > side["model_bytes"] + 0.9 * held
        assert side["peak_bytes"] < side["model_bytes"] + held + 200 * MB


def sample_of(case: Case, receiver_mb: float, sender_mb: float) -> Sample:
    def side(above_mb: float) -> Side:
        return Side(300 * MB, int((300 + 700 + above_mb) * MB), 700 * MB)

    return Sample(case.name, side(sender_mb), side(receiver_mb))


@pytest.mark.parametrize(
    ("receiver_mb", "sender_mb", "met"),
    [((10, 20), (10, 130), True), ((10, 160), (10, 10), False), ((10, 10), (140, 10), False)],
)
def test_every_run_has_to_keep_to_the_targets(receiver_mb, sender_mb, met):
    samples = [sample_of(NATIVE, *each) for each in zip(receiver_mb, sender_mb, strict=True)]
    (row,) = make_rows([NATIVE], FULL, samples)
    assert row.receiver_limit == FULL.cache_bytes // 4
    assert row.sender_limit == 4 * 256 * 131_072
    assert row.met is met
    assert ("MISSED by native, tcp" in verdict_text([row])) is not met
    assert ("MISSED" in rows_text([row], FULL)) is not met


def test_a_translating_receiver_has_one_source_block():
    assert FULL.scratch_bytes == 256 * 32 * 2 * 8 * 128 * 4
    for above_mb, met in ((60, True), (70, False)):
        (row,) = make_rows([MAPPED], FULL, [sample_of(MAPPED, above_mb, 5)])
        assert row.met is met


def test_a_small_cache_gives_no_verdict():
    small = msgspec.structs.replace(FULL, tokens=1000)
    rows = make_rows([NATIVE, MAPPED], small, [sample_of(NATIVE, 500, 500)])
    assert [row.met for row in rows] == [None]
    assert "no verdict" in verdict_text(rows)


def test_codecs_and_planes_are_checked():
    names = [case.name for case in make_cases("native, int4", "tcp,grpc", mapped=True)]
    assert names == ["native, tcp", "native, grpc", "int4, tcp", "int4, grpc", "mapped native, tcp"]
    for codecs, planes, words in (
        ("int5", "tcp", "'int5'"), ("int4", "pigeon", "'pigeon'"), ("", "tcp", "some of each"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            make_cases(codecs, planes, mapped=False)


def test_wrong_values_are_one_clear_line(capsys):
    assert bench.main(["memory", "--codecs", "int5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cachelink-bench memory: codec 'int5'")
    with pytest.raises(SystemExit, match="2"):
        bench.main(["memory", "--rounds", "0"])


def test_the_peak_of_another_process_is_what_it_took_at_once():
    script = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    taken = bytearray(b'x') * int(line)\n"
        "    del taken\n"
        "    print('done', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def take(nbytes: int) -> None:
            process.stdin.write(f"{nbytes}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        take(1)
        memory = ProcessMemory(process.pid)
        before = memory.resident_bytes()
        take(200 * MB)
        assert 195 * MB < memory.peak_bytes() - before < 210 * MB
        assert memory.resident_bytes() < before + 10 * MB
        memory.reset_peak()
        assert memory.peak_bytes() < before + 10 * MB
        process.stdin.close()


def test_a_process_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="peak of a process cannot be reset"):
        ProcessMemory(2**22 + 1)


def test_the_prefix_is_the_same_each_time():
    assert prefix_ids(50) == prefix_ids(60)[:50]
    assert min(prefix_ids(5000)) >= 4
    assert max(prefix_ids(5000)) < 277
