"""The command line of ``cachelink-bench two-node``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cachelink_bench.emulation.spec import parse_link
from cachelink_bench.kept import bench_folder
from cachelink_bench.report import write_result
from cachelink_bench.two_node.client import Addresses
from cachelink_bench.two_node.plan import CONTEXTS, REPRESENTATIONS, Mode, Plan, split
from cachelink_bench.two_node.running import Settings, run
from cachelink_bench.two_node.tables import markdown, write_csv
from cachelink_core import logs
from cachelink_core.cli.demo.daemons import ended_by_sigterm
from cachelink_core.errors import CacheLinkError, ConfigError

INTERRUPTED: Final = 130

_EPILOG: Final = (
    "The paper's table on one machine that has nothing else to do, about 50 minutes on two cores, half "
    "of it without --serial; 16k takes half an hour more: "
    "cachelink-bench two-node --emulate 1gbit --contexts 2k,8k --serial --out bench/results. Then "
    "the figures: cachelink-bench break-even bench/results/two-node.json"
)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error; 2 for wrong arguments; 130 after Ctrl-C.
    """
    options = _parse(argv)
    logs.install("error", "console")
    try:
        with ended_by_sigterm():
            _run(options, f"cachelink-bench two-node {shlex.join(argv)}")
    except ConfigError as error:
        return _say(str(error), 1)
    except CacheLinkError as error:
        return _say(f"{error}{_rest(options)}", 1)
    except KeyboardInterrupt:
        return _say(f"interrupted{_rest(options)}", INTERRUPTED)
    return 0


def _say(message: str, status: int) -> int:
    print(f"cachelink-bench two-node: {' '.join(message.split())}", file=sys.stderr)
    return status


def _rest(options: argparse.Namespace) -> str:
    """How to go on, if anything was measured."""
    return "; --resume goes on with what was measured" if _log(options).exists() else ""


def _log(options: argparse.Namespace) -> Path:
    path: Path = options.out / f"{options.name}.runs.jsonl"
    return path


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench two-node",
        description="Moves caches between two nodes, beside sending the text.",
        epilog=_EPILOG,
    )
    nodes = parser.add_argument_group("two daemons that run already")
    nodes.add_argument("--sender", metavar="HOST:PORT")
    nodes.add_argument("--receiver", metavar="HOST:PORT")
    nodes.add_argument(
        "--receiver-name", default="", help="in the sender's list, if it has several"
    )
    nodes.add_argument(
        "--token-file", default="", metavar="FILE", help="with the bearer token that they ask for"
    )
    nodes.add_argument(
        "--tls-ca",
        default="",
        metavar="FILE",
        help="roots of their certificates; then TLS is spoken",
    )
    link = parser.add_argument_group("or two that are started here, which needs root")
    link.add_argument("--emulate", metavar="RATE", help="of the link between them, such as 1gbit")
    link.add_argument("--delay", default="0s", help="one way, such as 0.2ms")
    link.add_argument("--loss", default="0", metavar="PERCENT", help="of packets")
    link.add_argument("--threads", type=int, help="CPU threads of each daemon")
    parser.add_argument("--contexts", default=",".join(CONTEXTS))
    parser.add_argument("--representations", default=",".join(REPRESENTATIONS))
    parser.add_argument("--documents", type=int, default=6, help="of each context class")
    parser.add_argument("--repeats", type=int, default=3, help="of each document")
    parser.add_argument("--decode", type=int, default=32, help="tokens of each answer")
    parser.add_argument(
        "--serial",
        action="store_true",
        help="with --emulate: also nodes that work one stage after another, started here too; "
        "with daemons that run: these are such nodes",
    )
    parser.add_argument(
        "--wide-kv",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --emulate: move caches of classes beyond the model's window on a bytes-only "
        "model of 131,072 bytes a token (default: do)",
    )
    parser.add_argument(
        "--capture-dir",
        type=Path,
        default=bench_folder() / "two-node-captures",
        metavar="DIR",
        help="with --emulate: where the senders keep prefilled caches for --resume and later runs, apart "
        "for each mode and number of threads, 2.1 GB for a 16k document (default: in the user's "
        "cache folder)",
    )
    parser.add_argument(
        "--no-capture", action="store_true", help="prefill each document in this run"
    )
    parser.add_argument("--model", default="demo", help="of both nodes (demo: SmolLM2)")
    parser.add_argument("--out", type=Path, default=Path("two-node"), metavar="DIR")
    parser.add_argument("--name", default="two-node", help="of the files in DIR")
    parser.add_argument("--note", default="", help="for the report: what limits the numbers")
    parser.add_argument("--resume", action="store_true", help="go on with the runs in DIR")
    options = parser.parse_args(argv)
    remote = options.sender is not None and options.receiver is not None
    if remote == (options.emulate is not None) or (options.sender is None) != (
        options.receiver is None
    ):
        parser.error("give --sender and --receiver, or --emulate")
    return options


def _addresses(options: argparse.Namespace) -> Addresses | None:
    if options.emulate is not None:
        return None
    return Addresses(
        sender=options.sender,
        receiver=options.receiver,
        receiver_name=options.receiver_name,
        token_file=options.token_file,
        tls_ca=options.tls_ca,
    )


def _modes(options: argparse.Namespace) -> tuple[Mode, ...]:
    if not options.serial:
        return ("overlapped",)
    return ("serial",) if options.emulate is None else ("overlapped", "serial")


def _run(options: argparse.Namespace, command: str) -> None:
    """Measures, prints the report and writes every file."""
    plan = Plan(
        contexts=split(options.contexts),
        representations=split(options.representations),
        documents=options.documents,
        repeats=options.repeats,
        decode=options.decode,
        modes=_modes(options),
        model=options.model,
        wide_kv=options.wide_kv,
    )
    settings = Settings(
        at=_addresses(options),
        link=parse_link(options.emulate, options.delay, options.loss) if options.emulate else None,
        threads=options.threads,
        log=_log(options),
        resume=options.resume,
        command=command,
        note=options.note,
        capture_dir=None if options.no_capture else options.capture_dir,
    )
    results = run(plan, settings)
    report = markdown(results)
    print(report, end="")
    try:
        write_result(options.out / f"{options.name}.json", results)
        write_csv(options.out / f"{options.name}.csv", results)
        (options.out / f"{options.name}.md").write_text(report, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error.strerror}") from error
