"""``cachelink-bench planner``: every way timed on emulated links, beside what the planner picks.

Two daemons in two network namespaces; for each link rate and prefix length every way is run in turn
(transfer by each codec of a cache that the sender holds, and the receiver reading the ids itself), with
``codec: auto`` among them. Recorded per run: seconds from the request to the first token, client's clock.
The readings of both nodes before each length are kept, so that a plan can be made again from the file.
Needs root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cachelink_bench.emulation.namespaces import emulated_link
from cachelink_bench.emulation.nodes import RECEIVER_NAME, emulated_nodes
from cachelink_bench.emulation.spec import LinkSpec, parse_link
from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.environment import environment
from cachelink_bench.planner_report import FORMAT, Document, LinkRuns, judged, report_text
from cachelink_bench.planner_runs import Case, Task
from cachelink_bench.report import (
    Report,
    check_places,
    command_line,
    date_text,
    load_average,
    load_text,
    no_verdict,
    strict_status,
    without_folder,
    write_result,
)
from cachelink_core import logs, texts
from cachelink_core.cli.demo.daemons import ended_by_sigterm
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError, InternalError
from cachelink_core.planner import transfer_ways


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless every choice holds; 2 for wrong arguments; 130
        after Ctrl-C.
    """
    options = _parse(argv)
    logs.install("error", "console")
    with ended_by_sigterm():
        check_places(options.json, options.markdown)
        report = Report()
        document = _run(options, command_line("planner", argv), report)
        _write(options, document, report)
    return _status(document) if options.strict else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench planner",
        description="Times every way on emulated links, beside what the planner picks. Needs root.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="demo", help="name, folder or GGUF file")
    parser.add_argument("--emulate", default="10mbit,100mbit,1gbit", help="link rates")
    parser.add_argument("--tokens", default="256,512,1024", help="prefix lengths")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each length")
    parser.add_argument("--threads", type=int, default=1, help="of each daemon's model")
    parser.add_argument("--strict", action="store_true", help="exit 1 unless every choice holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")
    options = parser.parse_args(argv)
    lengths = options.tokens.split(",")
    if not all(each.isdecimal() and int(each) for each in lengths):
        parser.error(f"--tokens is {options.tokens!r}, not numbers of tokens")
    for name in ("repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, not at least 1")
    return options


def _run(options: argparse.Namespace, command: str, report: Report) -> Document:
    """Measures and prints."""
    load = load_average()
    specs = [parse_link(rate) for rate in options.emulate.split(",")]
    check_tools()
    report.say(load_text(load) + "\n")
    ids, codecs = _prepared(options)
    links = []
    for spec in specs:
        print(f"{spec.rate} …", file=sys.stderr)
        links.append(LinkRuns(spec.rate, options.repeats, _cases(options, spec, ids, codecs)))
    document = judged(
        Document(
            format=FORMAT,
            date=date_text(),
            command=command,
            model=without_folder(options.model),
            environment=environment(),
            load_average=load,
            links=tuple(links),
        )
    )
    report.say(report_text(document))
    return document


def _prepared(options: argparse.Namespace) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids of a text that is long enough, and every codec for the model's caches."""
    engine = load_engine(options.model, device="cpu")
    text = "\n".join(texts.read(name) for name in ("prose", "essay", "dialogue", "manual"))
    ids = engine.tokens.document(text).ids
    longest = max(_lengths(options))
    if longest + options.repeats > len(ids):
        raise ConfigError(
            f"--tokens has {longest}; {options.repeats} cuts of the texts allow "
            f"{len(ids) - options.repeats}"
        )
    return ids, tuple(way.name for way in transfer_ways(engine.identity.dtype))


def _lengths(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(int(each) for each in options.tokens.split(","))


def _cases(
    options: argparse.Namespace, spec: LinkSpec, ids: tuple[int, ...], codecs: tuple[str, ...]
) -> tuple[Case, ...]:
    """Makes a link with two daemons, and runs everything on it."""
    daemon = ["--model.name", options.model, "--model.device", "cpu"]
    daemon += ["--model.threads", str(options.threads)]
    with (
        tempfile.TemporaryDirectory(prefix="cachelink-planner-") as folder,
        emulated_link(spec) as link,
        emulated_nodes(link, daemon, Path(folder)) as nodes,
    ):
        task = Task(
            sender=nodes.sender_address,
            receiver=nodes.receiver_address,
            receiver_name=RECEIVER_NAME,
            ids=ids,
            lengths=_lengths(options),
            codecs=codecs,
            repeats=options.repeats,
        )
        return _run_within(link.within("sender"), task)


def _run_within(within: Sequence[str], task: Task) -> tuple[Case, ...]:
    """Runs a task in a process of its own, inside the sender's namespace."""
    command = [*within, sys.executable, "-m", "cachelink_bench.planner_runs"]
    done = subprocess.run(
        command,
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for this process, which ends it
        check=False,
    )
    if done.returncode:
        raise InternalError(f"the measuring process ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=tuple[Case, ...])


def _status(document: Document) -> int:
    held = [verdict.holds for verdict in document.verdicts]
    return strict_status("planner", held, no_verdict(document.load_average, smoke=False))


def _write(options: argparse.Namespace, document: Document, report: Report) -> None:
    try:
        if options.json:
            write_result(options.json, document)
        report.write(options.markdown, "What the planner picks", document.date, document.command)
    except OSError as error:
        raise ConfigError(f"the result cannot be written: {error}") from error
