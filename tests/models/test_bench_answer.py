"""``cachelink-bench answer`` runs, holds answers against those asked alone, and judges by its ratios."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from cachelink_bench.answer import main
from cachelink_bench.answer.alone import Run
from cachelink_bench.answer.figures import (
    BARE,
    GENERATE,
    OURS,
    TIMED,
    alone_claims,
    alone_rows,
    together_claims,
    together_rows,
)
from cachelink_bench.answer.tables import claims_text
from cachelink_bench.answer.together import Together, ask
from cachelink_core.errors import ConfigError


@pytest.mark.smollm2
@pytest.mark.slow
def test_a_smoke_run_writes_its_figures(tmp_path, capsys):
    path, page = tmp_path / "answer.json", tmp_path / "answer.md"
    places = ("--cache-dir", tmp_path, "--json", path, "--markdown", page)
    assert main(["--smoke", "--strict", *map(str, places)]) == 1, "nothing was judged"
    document = json.loads(path.read_text())
    assert document["benchmark"] == "answer"
    assert "cache_dir" not in document["config"]
    arms = {(row["tokens"], row["arm"]): row for row in document["alone"]}
    assert len(arms) == 2 * 6
    for (tokens, arm), row in arms.items():
        assert row["first_s"]["median"] > 0
        made = 1 if arm.startswith("bare") else 4
        # Another attention may round a later token differently, never the query's.
        assert 1 <= row["agrees"] <= made, (tokens, arm)
    timed = arms[200, TIMED]
    assert 0 < timed["attention_s"]["median"] < timed["first_s"]["median"]
    ways = {(row["tokens"], row["way"]): row["exact"] for row in document["together"]}
    assert len(ways) == 2 * 4
    assert all(exact for (_, way), exact in ways.items() if way != "one batch")
    assert len(document["claims"]) == 2 * 2 + 2 + 2 * 2
    assert {claim["met"] for claim in document["claims"]} == {None}
    assert document["command"] == "cachelink-bench answer --smoke --strict"
    head = f"# Answers\n\n{document['date']}, `{document['command']}`\n\n"
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].endswith("--strict: no verdict: a smoke run")
    printed = shown.out
    assert page.read_text() == head + printed
    assert "every bit" in printed
    assert "first token / bare forward, 200 tokens" in printed


def a_run(first_s: float, per_token_s: float, attention_s: float = 0.0) -> Run:
    made = 5 if per_token_s else 1
    return Run(first_s, 4 * per_token_s, attention_s, (7, 8, 9, 10, 11)[:made])


def rows_at(tokens: int, *, first_s: float, ours_s: float, generate_s: float, attention_s: float):
    runs = {
        OURS: [a_run(first_s, ours_s)] * 3,
        BARE: [a_run(0.10 + attention_s, 0.0)] * 3,
        TIMED: [a_run(0.10 + attention_s, 0.0, attention_s)] * 3,
        GENERATE: [a_run(1.0, generate_s)] * 3,
    }
    return alone_rows(tokens, runs)


def test_claims_follow_from_the_runs():
    short = rows_at(1000, first_s=0.12, ours_s=0.02, generate_s=0.03, attention_s=0.02)
    long = rows_at(8000, first_s=0.21, ours_s=0.04, generate_s=0.12, attention_s=0.1)
    claims = {claim.what: claim for claim in alone_claims([*short, *long])}
    assert claims["first token / bare forward, 1000 tokens"].value == pytest.approx(1.0)
    late = claims["first token / bare forward, 8000 tokens"]
    assert late.value == pytest.approx(1.05)
    assert claims["tokens/s / generate, 8000 tokens"].value == pytest.approx(3.0)
    grown = claims["margin over generate, longest / shortest prefix"]
    assert (grown.value, grown.met) == (pytest.approx(2.0), True)
    flat = claims["first token without attention, longest / shortest prefix"]
    assert (flat.value, flat.met) == (pytest.approx(1.0), True)


def test_a_missed_target_is_said_and_a_busy_machine_gives_no_verdict():
    slow = rows_at(1000, first_s=0.2, ours_s=0.05, generate_s=0.03, attention_s=0.02)
    claims = alone_claims(slow)
    assert [claim.met for claim in claims[:2]] == [False, False]
    assert "MISSED" in claims_text(claims, "")
    busy = claims_text(claims, "NOT QUIET, load average 3.00")
    assert "MISSED" not in busy
    assert "NOT QUIET" in busy


def together_of(ids, logits, total_s: float, first_s: tuple[float, ...]) -> Together:
    done = (total_s,) * len(first_s)
    return Together(total_s, first_s, done, ids, tuple(torch.tensor([x]) for x in logits))


def test_an_answer_that_differs_in_one_bit_is_not_exact():
    alone = [
        together_of(((1, 2),), (0.5,), 1.0, (0.1,)),
        together_of(((3, 4),), (0.25,), 1.0, (0.1,)),
    ]
    runs = {
        "in order": [together_of(((1, 2), (3, 4)), (0.5, 0.25), 2.0, (0.1, 1.1))],
        "shared": [together_of(((1, 2), (3, 4)), (0.5, 0.25), 2.0, (0.1, 0.2))],
        "one batch": [together_of(((1, 2), (3, 4)), (0.5, 0.2500001), 1.0, (0.1, 0.1))],
        "other": [together_of(((1, 2), (3, 9)), (0.5, 0.25), 1.0, (0.1, 0.1))],
    }
    rows = together_rows(1000, 2, runs, alone)
    assert [(row.way, row.exact, row.agrees) for row in rows] == [
        ("in order", True, 2), ("shared", True, 2), ("one batch", False, 2), ("other", False, 1)
    ]  # fmt: skip
    total, first = together_claims(rows)
    assert (total.value, total.met) == (pytest.approx(1.0), True)
    assert (first.value, first.met) == (pytest.approx(0.15 / 0.6), True)


@pytest.mark.parametrize(
    "arguments", [("--questions", "5"), ("--questions", "0"), ("--rounds", "0")]
)
def test_wrong_arguments_end_with_two(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_what_a_question_raises_is_raised_as_it_is_and_no_thread_stays():
    def opened(_subject, _stack):
        raise ConfigError("no such prefix")

    before = threading.active_count()
    with pytest.raises(ConfigError, match="no such prefix"):
        ask(None, 3, opened)
    assert threading.active_count() == before
