"""The command line of ``cachelink-bench answer``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cachelink_bench.answer import alone, together
from cachelink_bench.answer.figures import (
    AloneRow,
    TogetherRow,
    alone_claims,
    alone_rows,
    together_claims,
    together_rows,
)
from cachelink_bench.answer.subject import Subject, make_subject
from cachelink_bench.answer.tables import alone_text, claims_text, together_text
from cachelink_bench.answer.together import Together
from cachelink_bench.capture import captured
from cachelink_bench.environment import environment
from cachelink_bench.report import (
    QUIET_LOAD,
    Report,
    add_result_options,
    check_places,
    command_line,
    date_text,
    load_average,
    load_text,
    no_verdict,
    settings,
    strict_status,
    write_json,
)
from cachelink_bench.turns import turned
from cachelink_core import limits, logs
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import InternalError

T = TypeVar("T")

_SMOKE = {"tokens": (64, 200), "questions": (2,), "rounds": 1, "new_tokens": 4, "threads": 1}
BATCHED = "one batch"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless every target was met; 2 for wrong arguments.
    """
    options = _parse(argv)
    logs.install("error", "console")
    report, load = Report(), load_average()
    check_places(options.json, options.markdown)
    document = _run(options, command_line("answer", argv), load, report)
    if options.json:
        write_json(options.json, document)
    report.write(options.markdown, "Answers", document["date"], document["command"])
    if not options.strict:
        return 0
    met = [claim["met"] for claim in document["claims"]]
    return strict_status("answer", met, document["no_verdict"])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench answer",
        description="Answers from a cache that lies ready, alone and several at once.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="demo", help="name, folder or GGUF file (demo: SmolLM2)")
    parser.add_argument("--tokens", type=_numbers, default=(1024, 4096, 8000), help="of prefixes")
    parser.add_argument("--questions", type=_numbers, default=(2, 4), help="at once; up to 4")
    parser.add_argument("--query-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--cache-dir", type=Path, help="of captured caches (default: the user's)")
    add_result_options(parser, smoke="short prefixes, one round")
    options = parser.parse_args(argv)
    if options.smoke:
        vars(options).update(_SMOKE)
    if not 1 <= min(options.questions) <= max(options.questions) <= together.MOST:
        parser.error(f"--questions is {options.questions}; 1 to {together.MOST} can be asked")
    if min(*options.tokens, options.rounds, options.query_tokens, options.new_tokens - 1) < 1:
        parser.error("at least a token, a round, and an answer of two tokens")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.split(",")))


def _run(options: argparse.Namespace, command: str, load: float, report: Report) -> dict[str, Any]:
    """Measures and prints; returns the document."""
    report.say(load_text(load))
    set_threads(options.threads)
    engine = load_engine(options.model, device="cpu")
    singles: list[AloneRow] = []
    several: list[TogetherRow] = []
    for tokens in options.tokens:
        subject = _subject(engine, tokens, options)
        singles += alone_rows(tokens, _rounds(alone.arms(subject), options.rounds))
        if tokens in (options.tokens[0], options.tokens[-1]):
            several += _several(subject, options)
    claims = [*alone_claims(singles), *together_claims(several)]
    why = no_verdict(load, smoke=options.smoke)
    report.say(
        f"{options.model}, question of {options.query_tokens} tokens, {options.threads} threads\n"
    )
    report.say(alone_text(singles, options.new_tokens) + "\n")
    report.say(together_text(several) + "\n")
    report.say(claims_text(claims, why))
    return {
        "benchmark": "answer",
        "date": date_text(),
        "command": command,
        "config": settings(options),
        "environment": environment(),
        "load_average": load,
        "quiet": load <= QUIET_LOAD,
        "no_verdict": why,
        "alone": [asdict(row) for row in singles],
        "together": [asdict(row) for row in several],
        "claims": [asdict(claim) | {"met": None if why else claim.met} for claim in claims],
    }


def _subject(engine: TransformersEngine, tokens: int, options: argparse.Namespace) -> Subject:
    held = captured(engine, tokens, options.block_tokens, options.cache_dir)
    return make_subject(engine, held, options.query_tokens, options.new_tokens)


def _several(subject: Subject, options: argparse.Namespace) -> list[TogetherRow]:
    """Every number of questions, by every way; an answer that sharing changed is an error."""
    asked = [
        together.ask(subject, 1, together.in_order, first=number)
        for number in range(max(options.questions))
    ]
    rows = []
    for questions in options.questions:
        ways: dict[str, Callable[[], Together]] = {
            name: partial(together.ask, subject, questions, opened)
            for name, opened in together.POLICIES.items()
        }
        ways[BATCHED] = partial(together.ask_batched, subject, questions)
        runs = _rounds(ways, options.rounds)
        rows += together_rows(subject.tokens, questions, runs, asked)
    for row in rows:
        if row.way in together.POLICIES and not row.exact:
            raise InternalError(
                f"{row.way}, {row.questions} questions, {row.tokens} tokens: an answer differs from "
                "the one asked alone"
            )
    return rows


def _rounds(arms: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Runs of each arm: one to warm up, then rounds in an order that rotates."""
    for arm in arms.values():
        arm()
    runs: dict[str, list[T]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in turned(arms, number):
            runs[name].append(arms[name]())
    return runs
