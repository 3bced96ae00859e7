"""The command line of ``cachelink-bench overlap``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.emulation.namespaces import EmulatedLink, emulated_link
from cachelink_bench.emulation.spec import parse_link
from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.environment import environment
from cachelink_bench.overlap.figures import Row, Verdict, make_rows, make_verdicts, typical
from cachelink_bench.overlap.nodes import OVERLAP_DAEMONS, SERIAL_DAEMONS, Cores, pinned_nodes
from cachelink_bench.overlap.tables import LEGEND, rows_text, verdicts_text
from cachelink_bench.overlap.task import Case, Failed, Measured, Nodes, Run, Task
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
)
from cachelink_core import limits, logs, texts
from cachelink_core.atomic_write import new_file
from cachelink_core.cli.demo.daemons import ended_by_sigterm
from cachelink_core.cli.timeline import write_trace
from cachelink_core.cli.timeline_plot import draw_timeline
from cachelink_core.engine.gguf_model import converted_folder, demo_gguf
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.errors import ConfigError, InternalError

FORMAT: Final = "cachelink overlap 1"
CASES: Final = {
    "native": Case("native", "native", "same"),
    "int4": Case("int4", "int4", "same"),
    "mapped": Case("mapped", "native", "other", "any"),
}
_FIRST_RATE: Final = "1gbit"
_SMOKE: Final = {"tokens": 96, "block_tokens": 16, "rounds": 1, "ratios": "1", "cases": "native"}


class Document(msgspec.Struct, frozen=True):
    """The result file.

    Attributes:
        format: of the file.
        date: of its end, UTC.
        command: that made it.
        model: as named.
        tokens: of the prefix.
        block_tokens: of a block.
        cores: of the sender's side and of the receiver's.
        environment: versions and machine.
        load_average: at the start.
        no_verdict: why nothing is said about targets; empty if something is.
        verdicts: each figure that has a target, of every row.
        prefill_s: alone, before the rounds; the rates follow from it.
        rows: one a case and ratio.
        runs: every call.
    """

    format: str
    date: str
    command: str
    model: str
    tokens: int
    block_tokens: int
    cores: tuple[int, int]
    environment: dict[str, object]
    load_average: float
    no_verdict: str
    verdicts: tuple[Verdict, ...]
    prefill_s: float
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless every target was met; 2 for wrong arguments;
        130 after Ctrl-C.
    """
    options = _parse(argv)
    logs.install("error", "console")
    report = Report()
    check_places(options.json, options.markdown, *_drawn(options.timeline))
    with ended_by_sigterm():
        document = _run(options, command_line("overlap", argv), report)
    if options.timeline:
        _draw(options.timeline, document.runs)
    report.write(options.markdown, "Overlap", document.date, document.command)
    if options.json:
        with new_file(options.json) as aside:
            aside.write_bytes(msgspec.json.encode(document) + b"\n")
    if not options.strict:
        return 0
    met = [verdict.met for verdict in document.verdicts if verdict.applies]
    return strict_status("overlap", met, document.no_verdict)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench overlap",
        description="Hands prefixes over while they are prefilled, on emulated links. Needs root.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="demo", help="folder of a Llama or Qwen (demo: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=3072, help="of the prefix")
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--ratios", default="0.5,1,2", help="prefill seconds over link seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--plane", choices=("grpc", "tcp"), default="", help="default: the daemons'"
    )
    add_result_options(parser, smoke="one short round")
    parser.add_argument(
        "--timeline", type=Path, metavar="BASE",
        help="write BASE.json and BASE.png: a typical handoff of the first case, link as the prefill",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.smoke:
        vars(options).update(_SMOKE)
    options.cases = _known(options.cases)
    options.ratios = tuple(_ratio(text) for text in options.ratios.split(","))
    if min(options.tokens // options.block_tokens, options.rounds) < 1 or options.tokens < 2:
        parser.error("at least a block and a round")
    return options


def _known(names: str) -> tuple[Case, ...]:
    try:
        return tuple(CASES[name] for name in names.split(","))
    except KeyError as error:
        raise SystemExit(f"--cases: {error} is none of {', '.join(CASES)}") from None


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0.01 <= ratio <= 100:
        raise SystemExit(f"--ratios: {text!r} is not a number from 0.01 to 100")
    return ratio


def _run(options: argparse.Namespace, command: str, report: Report) -> Document:
    """Measures and prints."""
    load = load_average()
    check_tools()
    cores = Cores.pick()
    set_threads(1)
    report.say(load_text(load))
    with tempfile.TemporaryDirectory(prefix="cachelink-overlap-") as folder:
        measured = _measured(options, cores, Path(folder))
    rows = make_rows(measured.runs, [case.name for case in options.cases if case.mapper])
    why = no_verdict(load, smoke=options.smoke)
    verdicts = make_verdicts(rows, why)
    report.say(
        f"{options.model}, {options.tokens} tokens in blocks of {options.block_tokens}; sender's "
        f"side on core {cores.sender}, receiver's on core {cores.receiver}\n"
    )
    report.say(f"{rows_text(rows)}\n\n{LEGEND}\n\n{verdicts_text(verdicts, why)}")
    return Document(
        format=FORMAT,
        date=date_text(),
        command=command,
        model=options.model,
        tokens=options.tokens,
        block_tokens=options.block_tokens,
        cores=(cores.sender, cores.receiver),
        environment=environment(),
        load_average=load,
        no_verdict=why,
        verdicts=verdicts,
        prefill_s=measured.prefill_s,
        rows=rows,
        runs=measured.runs,
    )


def _drawn(base: Path | None) -> tuple[Path, ...]:
    """Files of a timeline: the trace and the picture."""
    if base is None:
        return ()
    return base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.png")


def _draw(base: Path, runs: Sequence[Run]) -> None:
    receipt, (trace, picture) = typical(runs), _drawn(base)
    write_trace(receipt, trace)
    draw_timeline(receipt, picture)


def _measured(options: argparse.Namespace, cores: Cores, folder: Path) -> Measured:
    """Prepares models and prefix, starts link and nodes, and measures within the namespace."""
    source = _source(options.model)
    ids, receivers = _prepare(options, source, folder)
    with (
        emulated_link(parse_link(_FIRST_RATE)) as link,
        _nodes(link, cores, source, options, receivers, folder) as both,
    ):
        task = Task(link, *both, options.cases, options.ratios, ids, options.rounds)
        command = [*link.within("sender"), sys.executable, "-m", "cachelink_bench.overlap.measure"]
        done = subprocess.run(
            command,
            input=msgspec.json.encode(task),
            stdout=subprocess.PIPE,
            check=False,
            process_group=0,  # Ctrl-C is for the parent, which ends it
        )
        if done.returncode:
            raise InternalError(f"the measuring process ended with {done.returncode}")
        said: Measured | Failed = msgspec.json.decode(done.stdout, type=Measured | Failed)
        if isinstance(said, Failed):
            raise InternalError(said.message)
    return said


def _prepare(
    options: argparse.Namespace, source: Path, folder: Path
) -> tuple[tuple[int, ...], dict[str, list[str]]]:
    """The prefix's ids, and the options of each receiver by its name."""
    engine = load_engine(str(source), device="cpu")
    text = "\n".join(map(texts.read, texts.names()))
    ids = engine.tokens.document(text, chat=False).ids[: options.tokens]
    if len(ids) < options.tokens or options.tokens > engine.identity.max_positions:
        raise ConfigError(f"--tokens is {options.tokens}; the texts have {len(ids)}, the model's "
                          f"window {engine.identity.max_positions}")  # fmt: skip
    receivers = {}
    wanted = {case.receiver for case in options.cases}
    if "same" in wanted:
        receivers["same"] = _daemon(source)
    if "other" in wanted:
        from cachelink_bench.overlap.planted import plant_pair

        pair = plant_pair(engine, source, folder)
        receivers["other"] = [
            *_daemon(pair.model),
            *("--mappers", str(pair.mapper), "--allow-failed-gate"),
        ]
    return ids, receivers


def _source(model: str) -> Path:
    """The folder of a model."""
    if model != "demo":
        return Path(model)
    from platformdirs import user_cache_dir

    return converted_folder(demo_gguf(), Path(user_cache_dir("cachelink")))


def _daemon(model: Path) -> list[str]:
    return ["--model.name", str(model), "--model.device", "cpu"]


@contextmanager
def _nodes(
    link: EmulatedLink,
    cores: Cores,
    source: Path,
    options: argparse.Namespace,
    receivers: Mapping[str, Sequence[str]],
    folder: Path,
) -> Iterator[tuple[Nodes, Nodes]]:
    sender = [*_daemon(source), "--block-tokens", str(options.block_tokens)]
    rest = (sender, receivers, options.plane, folder)
    with (
        pinned_nodes(link, cores, OVERLAP_DAEMONS, *rest) as overlap,
        pinned_nodes(link, cores, SERIAL_DAEMONS, *rest) as serial,
    ):
        yield overlap, serial
