"""The command line of ``cachelink-bench link``."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import platformdirs

from cachelink_bench.emulation.system_commands import check_tools
from cachelink_bench.environment import environment
from cachelink_bench.link.cases import CASES, SMOKE, pick
from cachelink_bench.link.hosts import PLANES, Plane
from cachelink_bench.link.results import FORMAT, Document, conditions_text, make_rows, rows_text
from cachelink_bench.link.rounds import Measured, measure
from cachelink_bench.link.subjects import make_prefix
from cachelink_bench.report import load_average, load_text
from cachelink_core import logs
from cachelink_core.cli.demo.daemons import ended_by_sigterm
from cachelink_core.errors import CacheLinkError, ConfigError

INTERRUPTED: Final = 130


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or a missed target with ``--strict``; 2 for wrong arguments; 130 after
        Ctrl-C.
    """
    options = _parse(argv)
    logs.install("error", "console")
    try:
        with ended_by_sigterm():
            document = _run(options)
    except CacheLinkError as error:
        print(f"cachelink-bench link: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    if options.json:
        encoded = msgspec.json.format(msgspec.json.encode(document), indent=1)
        options.json.write_bytes(encoded + b"\n")
    missed = any(row.verdict == "MISSED" for row in document.rows)
    return 1 if options.strict and missed else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench link",
        description="How much of a link a handoff fills, beside iperf3.",
    )
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--planes", default=",".join(PLANES), help="default: %(default)s")
    parser.add_argument("--model", default="demo", help="of case 1gbit (demo: SmolLM2)")
    parser.add_argument("--rounds", type=int, help="of each case, instead of its own")
    parser.add_argument(
        "--settle", type=float, default=240.0, metavar="SECONDS",
        help="wait at most so long for a quiet machine before a case's first round",
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="one round of a tiny cache")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document")
    return parser.parse_args(argv)


def _planes(text: str) -> tuple[Plane, ...]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in PLANES]
    if unknown:
        raise ConfigError(f"--planes has {unknown[0]!r}; there are {', '.join(PLANES)}")
    return tuple(plane for plane in PLANES if plane in wanted)


def _run(options: argparse.Namespace) -> Document:
    load = load_average()
    cases = (SMOKE,) if options.smoke else pick(options.cases, options.rounds)
    planes = _planes(options.planes)
    check_tools()
    print(load_text(load), flush=True)
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="cachelink-link-models-") as scratch:
        for case in cases:
            folder = Path(scratch) if case.subject == "tiny" else _kept()
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
    print(f"{conditions_text(measured)}\n\n{rows_text(rows)}", flush=True)
    return Document(
        format=FORMAT,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(options),
        environment=environment(),
        planes=planes,
        cases=measured,
        rows=tuple(rows),
    )


def _command(options: argparse.Namespace) -> str:
    """What makes the same runs; where the result went is nobody's business."""
    if options.smoke:
        return "cachelink-bench link --smoke"
    names = ("cases", "planes", "model", "rounds", "settle")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    words = (word for name, value in given.items() for word in (f"--{name}", str(value)))
    return shlex.join(["cachelink-bench", "link", *words])


def _kept() -> Path:
    """Where captured caches and models of random weights stay from run to run."""
    return Path(platformdirs.user_cache_dir("cachelink")) / "bench"
