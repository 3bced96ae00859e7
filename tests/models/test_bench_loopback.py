"""``cachelink-bench loopback`` between two real processes, on a tiny model's cache."""

from __future__ import annotations

import json

import pytest

from cachelink_bench import __main__ as bench
from cachelink_bench import capture
from cachelink_bench.loopback import SMOKE_ROUNDS, SMOKE_TOKENS
from cachelink_bench.loopback_results import rate_rows, verdicts
from cachelink_bench.loopback_rounds import Measured
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread, ratios
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError
from cachelink_core.testing.tiny_models import save_tiny

pytestmark = pytest.mark.slow

TOKENS = 70
BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ran(model, tmp_path_factory):
    """The document and the whole standard output of one small run."""
    folder = tmp_path_factory.mktemp("bench")
    options = {
        "--model": model, "--tokens": TOKENS, "--block-tokens": BLOCK, "--rounds": 3,
        "--cache-dir": folder, "--json": folder / "out.json", "--markdown": folder / "out.md",
    }  # fmt: skip
    argv = ["loopback", "--smoke", *(str(part) for pair in options.items() for part in pair)]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(map(str, args))))
        assert bench.main(argv) == 0
    return json.loads((folder / "out.json").read_text()), lines, (folder / "out.md").read_text()


def test_every_arm_is_measured_in_every_round(ran):
    document, _, _ = ran
    assert document["config"]["tokens"] == SMOKE_TOKENS
    assert list(document["arms"]) == ["tcp", "native", "int8", "bare", "socket"]
    for arm in document["arms"].values():
        assert arm["cpu_to_bare"]["median"] > 0
        assert len(arm["wall_s"]["runs"]) == len(arm["to_bare"]["runs"]) == SMOKE_ROUNDS
        assert min(arm["wall_s"]["runs"]) > 0
        assert arm["wire_bytes"] > 0
    assert document["arms"]["bare"]["to_bare"]["runs"] == [1.0] * SMOKE_ROUNDS
    assert document["arms"]["native"]["wire_bytes"] == document["native_bytes"]
    assert document["arms"]["int8"]["wire_bytes"] < document["native_bytes"]


def test_the_last_line_is_the_document_and_the_report_has_the_rest(ran):
    document, lines, markdown = ran
    assert json.loads(lines[-1]) == document
    head = f"# Loopback\n\n{document['date']}, `{document['command']}`\n\n"
    assert markdown == head + "\n".join(lines[:-1]) + "\n"
    assert "memcpy" in lines[1]
    for word in ("CacheLink int8", "framed socket", "limits: ", "target: time over tcp"):
        assert word in markdown


def test_a_smoke_run_has_its_command_without_places_and_gives_no_verdict(ran, model):
    document, _, markdown = ran
    given = f"--smoke --model {model.name} --tokens {TOKENS} --block-tokens {BLOCK} --rounds 3"
    assert document["command"] == f"cachelink-bench loopback {given}"
    assert document["no_verdict"] == "a smoke run"
    assert [target["met"] for target in document["targets"]] == [None] * 4
    assert markdown.count("no verdict: a smoke run") == 4


def test_a_captured_cache_is_read_back_and_a_damaged_one_is_made_anew(model, tmp_path):
    engine = load_engine(str(model))
    first = capture.captured(engine, TOKENS, BLOCK, tmp_path)
    (path,) = tmp_path.iterdir()
    digest = capture.cache_digest(first.cache, TOKENS)
    tokens_read = engine.model_tokens
    again = capture.captured(engine, TOKENS, BLOCK, tmp_path)
    assert engine.model_tokens == tokens_read
    assert capture.cache_digest(again.cache, TOKENS) == digest
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    third = capture.captured(engine, TOKENS, BLOCK, tmp_path)
    assert engine.model_tokens == tokens_read + TOKENS
    assert capture.cache_digest(third.cache, TOKENS) == digest


def test_the_digest_sees_one_bit_in_any_tensor(model, tmp_path):
    held = capture.captured(load_engine(str(model)), TOKENS, BLOCK, tmp_path)
    before = capture.cache_digest(held.cache, TOKENS)
    held.cache.tensor(1, "V", TOKENS - 1, TOKENS)[0, 0, 0] += 1.0
    assert capture.cache_digest(held.cache, TOKENS) != before


def test_more_tokens_than_there_are_is_an_error(model, tmp_path):
    with pytest.raises(ConfigError, match="tokens is 1000000"):
        capture.captured(load_engine(str(model)), 1_000_000, BLOCK, tmp_path)


def test_the_dispatcher_lists_its_benchmarks_and_refuses_others(capsys):
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in bench.BENCHMARKS)
    assert bench.main(["nothing-like-it"]) == 2
    assert "nothing-like-it" in capsys.readouterr().err


def test_both_planes_are_held_against_a_bare_stream():
    walls = {"tcp": 1.0, "native": 1.3, "bare": 1.0, "socket": 0.95}
    measured = {key: [Measured(wall_s, 0.2, 0.3)] * 3 for key, wall_s in walls.items()}
    rows = rate_rows({key: key for key in walls}, measured, native_bytes=10**9)
    judged = verdicts(rows, native_bytes=10**9)
    assert {verdict.name: verdict.met for verdict in judged} == {
        "time over tcp by the socket's": True,
        "time over tcp by bare gRPC's": True,
        "CPU seconds a GB over tcp": True,
        "time over gRPC by bare gRPC's": False,
    }
    last = judged[-1]
    assert last.text("") == "target: time over gRPC by bare gRPC's 1.30 ≤ 1.1, MISSED"
    assert last.text("NOT QUIET").endswith("≤ 1.1, no verdict: NOT QUIET")


def test_ratios_are_those_of_one_round():
    spread = ratios([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert spread == Spread(2.0, 1.5, 2.5, (1.0, 2.0, 3.0))
    assert Spread.of([5.0]).text() == "5.00 (5.00–5.00)"


def test_a_table_is_markdown_of_one_width():
    lines = table(("a", "b"), [("x", "1"), ("yy", "10")]).splitlines()
    assert lines == ["| a  |  b |", "| :- | -: |", "| x  |  1 |", "| yy | 10 |"]


def test_a_place_that_cannot_be_written_ends_it_before_anything_is_measured(tmp_path, capsys):
    place = tmp_path / "none" / "out.json"
    assert bench.main(["loopback", "--json", str(place)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"cachelink-bench loopback: {place} cannot be written: No such file or directory"
    )
