"""The command line of ``cachelink-bench codec-speed``."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import torch

from cachelink_bench.capture import captured
from cachelink_bench.codec_speed.figures import Row, make_row, rows_table, verdicts
from cachelink_bench.codec_speed.measure import Arm, Sample, Subject, arms, memcpy_s, prepare
from cachelink_bench.environment import environment
from cachelink_bench.kept import bench_folder
from cachelink_bench.report import (
    Report,
    add_result_options,
    check_places,
    command_line,
    date_text,
    load_average,
    load_text,
    no_verdict,
    strict_status,
    write_json,
)
from cachelink_bench.statistics import Spread
from cachelink_bench.turns import turned
from cachelink_core import limits, logs
from cachelink_core.codec_spec import CODECS
from cachelink_core.codecs.compiled import CompiledKernels, missing_compiler
from cachelink_core.codecs.kernels import Kernels
from cachelink_core.engine.compile_codecs import TOPS, compile_codecs
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.errors import ConfigError
from cachelink_core.testing.wide_kv import wide_kv_folder

SUBJECTS: Final = ("smollm2", "wide")
TIMED_BLOCKS: Final = {"smollm2": 4, "wide": 1}
_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless every target was met; 2 for wrong arguments.
    """
    options = _parse(argv)
    logs.install("warning", "console")
    report = Report()
    check_places(options.json, options.markdown)
    document = _run(options, command_line("codec-speed", argv), report)
    if options.json:
        write_json(options.json, document)
    report.write(options.markdown, "Codec speed", document["date"], document["command"])
    if not options.strict:
        return 0
    met = [verdict["met"] for verdict in document["verdicts"] if not verdict["goal"]]
    return strict_status("codec-speed", met, document["no_verdict"])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench codec-speed", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--subject", action="append", choices=SUBJECTS, help="default: both")
    parser.add_argument("--model", default="demo", help="of smollm2: name, folder or GGUF file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="to run on")
    add_result_options(parser, smoke="smollm2, eager, one round")
    options = parser.parse_args(argv)
    options.subject = options.subject or list(SUBJECTS)
    if options.smoke:
        options.subject, options.rounds = ["smollm2"], 1
    return options


def _run(options: argparse.Namespace, command: str, report: Report) -> dict[str, Any]:
    """Measures and prints; returns the document."""
    load = load_average()
    report.say(load_text(load) + "\n")
    if not options.smoke and (missing := missing_compiler(torch.device("cpu"))):
        raise ConfigError(f"the codecs cannot be compiled here: {missing}")
    with _one_core(options.cpu), _fresh_compiler_cache():
        found = {name: _run_subject(name, options) for name in options.subject}
    rows = [row for _, part, _ in found.values() for row in part]
    copies = {name: copy for name, (copy, _, _) in found.items()}
    report.say(rows_table(rows, copies) + "\n")
    seconds = {name: spent for name, (_, _, spent) in found.items()}
    for name, (first_s, again_s) in seconds.items():
        again = f"{again_s:.1f} s from the compiler's cache"
        report.say(f"{name}: compiled in {first_s:.1f} s, {again}")
    judged, why = verdicts(rows), no_verdict(load, smoke=options.smoke)
    for verdict in judged:
        report.say(verdict.text(why))
    return {
        "benchmark": "codec-speed",
        "date": date_text(),
        "command": command,
        "environment": environment(),
        "load_average": load,
        "compile_s": seconds,
        "memcpy_gb_per_s": {name: asdict(copy) for name, copy in copies.items()},
        "rows": [asdict(row) for row in rows],
        "no_verdict": why,
        "verdicts": [asdict(verdict) | {"met": None if why else verdict.met} for verdict in judged],
    }


def _run_subject(
    name: str, options: argparse.Namespace
) -> tuple[Spread, list[Row], tuple[float, float]]:
    subject = _load(name, options.model, smoke=options.smoke)
    kernels, seconds = (None, (0.0, 0.0)) if options.smoke else _compiled(subject)
    every = arms(compiled=kernels is not None)
    work = {arm: prepare(subject, arm, kernels or subject.engine.kernels) for arm in every}
    samples: dict[Arm, list[Sample]] = {arm: [] for arm in every}
    copies: list[float] = []
    for number in range(options.rounds):
        copies.append(memcpy_s(subject.native_bytes))
        for arm in turned(every, number):
            samples[arm].append(work[arm].run())
    native = subject.native_bytes
    rows = [make_row(name, arm, samples[arm], native, work[arm].wire_bytes) for arm in every]
    return Spread.of([native / taken / 1e9 for taken in copies]), rows, seconds


def _load(name: str, model: str, *, smoke: bool) -> Subject:
    set_threads(1)
    if name == "wide":
        model = str(wide_kv_folder(bench_folder() / "models"))
    engine = load_engine(model, device="cpu")
    blocks = range(1, 2 if smoke else 1 + TIMED_BLOCKS[name])
    tokens = blocks.stop * limits.DEFAULT_BLOCK_TOKENS
    held = captured(engine, tokens, limits.DEFAULT_BLOCK_TOKENS)
    return Subject(name, engine, held, limits.DEFAULT_BLOCK_TOKENS, blocks)


def _compiled(subject: Subject) -> tuple[Kernels, tuple[float, float]]:
    """Kernels of both sides, and how long they took at first and again.

    Raises:
        ConfigError: they could not be compiled.
    """
    engine = subject.engine
    seconds = [compile_codecs(engine, "compiled", ("sender", "receiver")) for _ in range(2)]
    kernels = engine.kernels
    if not isinstance(kernels, CompiledKernels):
        raise ConfigError("the codecs could not be compiled: the warning above says why")
    for geometry in dict.fromkeys(subject.held.cache.layers):
        shape = geometry.kv_heads, subject.block_tokens, geometry.head_dim
        content = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for codec, top in TOPS.items():
            for encode in (True, False):
                group = CODECS[codec].key_group_tokens
                kernels.compile_keys(content, None, top, group, encode=encode)
    return kernels, (seconds[0], seconds[1])


@contextmanager
def _one_core(cpu: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _fresh_compiler_cache() -> Iterator[None]:
    """An empty cache, so that the seconds are those of a node's first start."""
    before = os.environ.get(_CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[_CACHE_VARIABLE]
            if before is not None:
                os.environ[_CACHE_VARIABLE] = before
