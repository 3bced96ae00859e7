"""The command line of ``cachelink-bench link``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.environment import environment
from cachelink_bench.kept import bench_folder
from cachelink_bench.link.cases import CASES, SMOKE, pick
from cachelink_bench.link.hosts import PLANES, Plane
from cachelink_bench.link.results import FORMAT, Document, conditions_text, make_rows, rows_text
from cachelink_bench.link.rounds import Measured, measure
from cachelink_bench.link.socket_pair import NAME as SOCKET
from cachelink_bench.link.subjects import make_prefix
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
from cachelink_core.errors import ConfigError


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
        document = _run(options, command_line("link", argv), report)
    if options.json:
        write_result(options.json, document)
    report.write(options.markdown, "Link", document.date, document.command)
    if not options.strict:
        return 0
    judged = [row for row in document.rows if row.plane != SOCKET]
    why = next((row.verdict for row in judged if row.met is None), "")
    return strict_status("link", [row.met for row in judged], why.removeprefix("none: "))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench link",
        description="How much of a link a handoff fills, beside iperf3.",
        allow_abbrev=False,
    )
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--planes", default=",".join(PLANES), help="default: %(default)s")
    parser.add_argument("--model", default="demo", help="of case 1gbit (demo: SmolLM2)")
    parser.add_argument("--rounds", type=int, help="of each case, instead of its own")
    parser.add_argument(
        "--settle", type=float, default=240.0, metavar="SECONDS",
        help="wait at most so long for a quiet machine before a case's first round",
    )  # fmt: skip
    add_result_options(parser, smoke="one round of a tiny cache")
    return parser.parse_args(argv)


def _planes(text: str) -> tuple[Plane, ...]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in PLANES]
    if unknown:
        raise ConfigError(f"--planes has {unknown[0]!r}; there are {', '.join(PLANES)}")
    return tuple(plane for plane in PLANES if plane in wanted)


def _run(options: argparse.Namespace, command: str, report: Report) -> Document:
    """Measures and prints; returns the document."""
    load = load_average()
    cases = (SMOKE,) if options.smoke else pick(options.cases, options.rounds)
    planes = _planes(options.planes)
    check_tools()
    report.say(load_text(load))
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="cachelink-link-models-") as scratch:
        for case in cases:
            folder = Path(scratch) if case.subject == "tiny" else bench_folder()
            prefix = make_prefix(case, options.model, folder)
            measured[case.name] = measure(
                case,
                prefix,
                planes,
                captures=folder / "captured",
                settle_s=0.0 if options.smoke else options.settle,
                load_before=load,
            )
    rows = [row for case in cases for row in make_rows(case, measured[case.name])]
    report.say(f"{conditions_text(measured)}\n\n{rows_text(rows)}")
    return Document(
        format=FORMAT,
        date=date_text(),
        command=command,
        environment=environment(),
        planes=planes,
        cases=measured,
        rows=tuple(rows),
    )
