"""The command line of ``cachelink-bench memory``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cachelink_bench.environment import environment
from cachelink_bench.kept import bench_folder
from cachelink_bench.memory.cases import FULL, SMOKE, Case, Size, make_cases
from cachelink_bench.memory.measure import Sample, measure
from cachelink_bench.memory.models import make_models
from cachelink_bench.memory.report import Row, make_rows, rows_text, verdict_text
from cachelink_bench.report import (
    Report,
    add_result_options,
    check_places,
    command_line,
    date_text,
    load_average,
    load_text,
    strict_status,
    write_result,
)
from cachelink_core import logs
from cachelink_core.cli.demo.daemons import ended_by_sigterm

FORMAT = "cachelink-memory-1"


class Document(msgspec.Struct, frozen=True):
    """The result file.

    Attributes:
        format: of the file.
        date: of its end, UTC.
        command: that made it.
        size: of the cache, with both shapes.
        rounds: runs of each case.
        threads: of each daemon.
        environment: versions and machine.
        load_average: at the start.
        rows: one a case.
        samples: every run.
        target_met: by every case; None without a verdict.
    """

    format: str
    date: str
    command: str
    size: Size
    rounds: int
    threads: int
    environment: dict[str, object]
    load_average: float
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    target_met: bool | None


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless every target was met; 2 for wrong arguments;
        130 after Ctrl-C.
    """
    options = _parse(argv)
    logs.install("error", "console")
    report = Report()
    check_places(options.json, options.markdown)
    with ended_by_sigterm():
        document = _run(options, command_line("memory", argv), report)
    if options.json:
        write_result(options.json, document)
    report.write(options.markdown, "Memory of a handoff", document.date, document.command)
    if not options.strict:
        return 0
    return strict_status("memory", [row.met for row in document.rows], "the cache is too small")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench memory",
        description="Peak memory of both daemons during a handoff, above models and caches.",
        allow_abbrev=False,
    )
    parser.add_argument("--codecs", default="native,native+zstd,int8,int4")
    parser.add_argument("--planes", default="tcp,grpc", help="data planes")
    parser.add_argument("--tokens", type=int, default=FULL.tokens, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each daemon")
    parser.add_argument(
        "--mapped",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a receiver of another model too (default: do)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=bench_folder() / "models",
        metavar="DIR",
        help="of the models, 250 MB (default: in the user's cache folder)",
    )
    add_result_options(parser, smoke="a small cache, int4, one round")
    options = parser.parse_args(argv)
    for name in ("tokens", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, not at least 1")
    return options


def _run(options: argparse.Namespace, command: str, report: Report) -> Document:
    """Measures and prints; returns the document."""
    load, say = load_average(), report.say
    size, cases, rounds = _plan(options)
    say(f"{load_text(load)}; memory does not depend on it\n")
    say(
        f"wide-KV model, {size.tokens} tokens, cache {size.cache_bytes / 1e6:.0f} MB, block "
        f"{size.block_bytes / 1e6:.1f} MB; peaks above model and cache, {rounds} runs each\n"
    )
    models = make_models(options.cache_dir, size, mapped=any(case.mapped for case in cases))
    samples = _samples(
        cases, size, rounds, lambda case: measure(case, size, models, options.threads)
    )
    rows = make_rows(cases, size, samples)
    say(rows_text(rows, size) + "\n")
    say(verdict_text(rows))
    judged = [row.met for row in rows if row.met is not None]
    return Document(
        format=FORMAT,
        date=date_text(),
        command=command,
        size=size,
        rounds=rounds,
        threads=options.threads,
        environment=environment(),
        load_average=load,
        rows=rows,
        samples=samples,
        target_met=all(judged) if judged else None,
    )


def _plan(options: argparse.Namespace) -> tuple[Size, tuple[Case, ...], int]:
    if options.smoke:
        return SMOKE, (Case("int4", "tcp"),), 1
    size = msgspec.structs.replace(FULL, tokens=options.tokens)
    return size, make_cases(options.codecs, options.planes, mapped=options.mapped), options.rounds


def _samples(
    cases: Sequence[Case], size: Size, rounds: int, run: Callable[[Case], Sample]
) -> tuple[Sample, ...]:
    """Every case once a round, progress on standard error."""
    samples = []
    for turn in range(rounds):
        for case in cases:
            sample = run(case)
            samples.append(sample)
            share = sample.receiver.above_bytes / size.cache_bytes
            blocks = sample.sender.above_bytes / size.block_bytes
            print(
                f"round {turn + 1} of {rounds}, {case.name}: receiver {share:.3f} of the cache, "
                f"sender {blocks:.2f} blocks",
                file=sys.stderr,
            )
    return tuple(samples)
