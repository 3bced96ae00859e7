"""``cachelink-bench loopback``: a handoff between two processes beside what the machine can do.

A captured cache goes from a sending to a receiving process, by CacheLink over both data planes and as
int8, by a bare gRPC stream and through a framed socket. ``bench/README.md`` describes the method.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cachelink_bench.capture import captured
from cachelink_bench.environment import environment
from cachelink_bench.handoff_ends import Subject
from cachelink_bench.loopback_arms import Arm, make_arms
from cachelink_bench.loopback_parts import Parts, measure_parts
from cachelink_bench.loopback_peer import ReceiverProcess
from cachelink_bench.loopback_results import (
    RateRow,
    Verdict,
    limits_text,
    parts_text,
    rate_rows,
    rows_text,
    verdicts,
)
from cachelink_bench.loopback_rounds import run_rounds
from cachelink_bench.physics import physics
from cachelink_bench.report import (
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
from cachelink_core import limits, logs
from cachelink_core.engine.loading import load_engine, set_threads

SMOKE_ROUNDS = 2
SMOKE_TOKENS = 300
"""More than one block, and a short last one."""


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless every target was met; 2 for wrong arguments.
    """
    options = _parse(argv)
    logs.install("error", "console")
    check_places(options.json, options.markdown)
    document, report = _run(options, command_line("loopback", argv))
    if options.json:
        write_json(options.json, document)
    report.write(options.markdown, "Loopback", document["date"], document["command"])
    print(json.dumps(document))
    if not options.strict:
        return 0
    met = [target["met"] for target in document["targets"]]
    return strict_status("loopback", met, document["no_verdict"])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench loopback", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", default="demo", help="name, folder or GGUF file (demo: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the captured cache")
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--rounds", type=int, default=15, help="measured runs of each arm")
    parser.add_argument("--cache-dir", type=Path, help="of captured caches (default: the user's)")
    add_result_options(parser, smoke="a short cache, two rounds")
    options = parser.parse_args(argv)
    if options.smoke:
        options.tokens, options.rounds = SMOKE_TOKENS, SMOKE_ROUNDS
    return options


def _run(options: argparse.Namespace, command: str) -> tuple[dict[str, Any], Report]:
    """Measures and prints; returns the document and what was printed."""
    load, report = load_average(), Report()
    say = report.say
    set_threads(1)
    say(load_text(load))
    best = physics()
    say("one core: " + ", ".join(f"{k.partition('_gb')[0]} {v:.1f} GB/s" for k, v in best.items()))
    subject = _subject(options)
    native_bytes = subject.header("native").layout.native_bytes
    say(f"{options.model}, {options.tokens} tokens, {native_bytes / 1e6:.1f} MB native\n")
    with _arms(subject, options) as (arms, peer):
        measured = run_rounds(arms, peer, options.rounds)
        rows = rate_rows({key: arm.name for key, arm in arms.items()}, measured, native_bytes)
        wire = {key: arm.wire_bytes for key, arm in arms.items()}
    say(rows_text(rows, wire) + "\n")
    parts = {codec: measure_parts(subject, codec) for codec in ("native", "int8")}
    say(parts_text(parts, rows["bare"], native_bytes))
    say(limits_text(parts["native"], rows))
    judged = verdicts(rows, native_bytes)
    why = no_verdict(load, smoke=options.smoke)
    for verdict in judged:
        say(verdict.text(why))
    document = _document(options, command, load, best, native_bytes, wire, rows, parts, judged, why)
    return document, report


def _subject(options: argparse.Namespace) -> Subject:
    engine = load_engine(options.model)
    held = captured(engine, options.tokens, options.block_tokens, options.cache_dir)
    return Subject(engine, held, options.block_tokens)


@contextmanager
def _arms(
    subject: Subject, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Arm], ReceiverProcess]]:
    payload_bytes = subject.header("native").layout.encoded_bytes
    arguments = ["--model", options.model, "--bytes", str(payload_bytes)]
    with ReceiverProcess(arguments) as peer:
        arms = make_arms(subject, peer)
        try:
            yield arms, peer
        finally:
            for arm in arms.values():
                arm.close()


def _document(
    options: argparse.Namespace,
    command: str,
    load: float,
    best: dict[str, float],
    native_bytes: int,
    wire: dict[str, int],
    rows: dict[str, RateRow],
    parts: dict[str, Parts],
    judged: Sequence[Verdict],
    why: str,
) -> dict[str, Any]:
    return {
        "benchmark": "loopback",
        "date": date_text(),
        "command": command,
        "config": settings(options),
        "environment": environment(),
        "load_average": load,
        "physics": best,
        "native_bytes": native_bytes,
        "arms": {key: asdict(row) | {"wire_bytes": wire[key]} for key, row in rows.items()},
        "parts_gb_per_s": {codec: part.rates(native_bytes) for codec, part in parts.items()},
        "no_verdict": why,
        "targets": [asdict(verdict) | {"met": None if why else verdict.met} for verdict in judged],
    }
