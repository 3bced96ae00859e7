"""The command line of ``cachelink-bench peers``, and its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Final

import msgspec

from cachelink_bench.emulation.spec import LinkSpec, parse_link
from cachelink_bench.environment import environment
from cachelink_bench.peers.plan import ROUNDS, SIZES, Plan, numbers
from cachelink_bench.peers.results import Results, is_right, results_text, summed_up
from cachelink_bench.peers.rows import ALL_ROWS, DEFAULT_ROWS, OURS, PLANES, Row
from cachelink_bench.peers.running import Measured, run
from cachelink_bench.peers.verdicts import LINK_BOUND_BITS, Verdict, judge
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
    strict_status,
    write_json,
)
from cachelink_core import limits, logs
from cachelink_core.cli.demo.daemons import ended_by_sigterm

_MOST_BURST_BYTES: Final = 1_000_000
_SOCKET_BUFFER_BYTES: Final = 16 * limits.MIB

_SMOKE_MIB: Final = 0.25
_SMOKE_ROUNDS: Final = 2


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, wrong content from CacheLink, a row of it that failed, or with ``--strict``
        unless every target was judged and met; 2 for wrong arguments; 130 after Ctrl-C.
    """
    options = _parse(argv)
    logs.install("error", "console")
    load = load_average()
    check_places(options.json, options.markdown)
    plan = _plan(options)
    plan.check()
    with ended_by_sigterm():
        measured = run(plan, _progress)
    return _report(options, command_line("peers", argv), plan, measured, load)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench peers",
        description="The same cache bytes by CacheLink and by what else moves bytes.",
        epilog=f"Rows: {', '.join(ALL_ROWS)}.",
        allow_abbrev=False,
    )
    parser.add_argument("--sizes", default=",".join(f"{s:g}" for s in SIZES), help="in MiB")
    parser.add_argument(
        "--rounds", default=",".join(map(str, ROUNDS)), help="one number, or one for each size"
    )
    parser.add_argument("--rows", default=",".join(DEFAULT_ROWS), help="see below")
    parser.add_argument("--planes", default=",".join(PLANES), help="of CacheLink's rows")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    link = parser.add_argument_group("a link between the two sides, which needs root")
    link.add_argument("--emulate", metavar="RATE", help="such as 1gbit; loopback without it")
    link.add_argument("--delay", default="0s", help="one way, such as 0.2ms")
    parser.add_argument("--model", default="demo", help="whose cache (demo: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the cache that is repeated")
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--start-deadline", type=float, default=60.0, help="s, of each process")
    add_result_options(parser, smoke="few bytes, socket and CacheLink only")
    options = parser.parse_args(argv)
    if options.smoke:
        options.sizes, options.rounds = str(_SMOKE_MIB), str(_SMOKE_ROUNDS)
        if options.rows == parser.get_default("rows"):
            options.rows = ",".join(("socket-again", *OURS))
    return options


def _plan(options: argparse.Namespace) -> Plan:
    sizes = numbers(options.sizes, "--sizes")
    rounds = numbers(options.rounds, "--rounds")
    return Plan(
        sizes=sizes,
        rounds=tuple(map(int, rounds * len(sizes) if len(rounds) == 1 else rounds)),
        rows=tuple(options.rows.split(",")),
        planes=tuple(options.planes.split(",")),
        seed=options.seed,
        model=options.model,
        base_tokens=options.tokens,
        block_tokens=options.block_tokens,
        start_deadline_s=options.start_deadline,
        link=_link(options.emulate, options.delay) if options.emulate else None,
    )


def _link(rate: str, delay: str) -> LinkSpec:
    """A link; a fast one with room to fill it, and a bucket that no payload fits into."""
    link = parse_link(rate, delay)
    if link.rate_bits <= LINK_BOUND_BITS and not link.delay_s:
        return link
    return msgspec.structs.replace(
        link, most_burst_bytes=_MOST_BURST_BYTES, socket_buffer_bytes=_SOCKET_BUFFER_BYTES
    )


def _report(
    options: argparse.Namespace, command: str, plan: Plan, measured: Measured, load: float
) -> int:
    tables = {s.mib: summed_up(measured.rows, measured.runs, s) for s in measured.sizes}
    largest = max(tables)
    verdicts = judge(measured, tables[largest], largest, plan.rate_bits)
    failed = [row.name for row in measured.rows if row.ours and row.name in measured.left_out]
    why, report = no_verdict(load, smoke=options.smoke), Report()
    report.say("\n".join(_lines(measured, tables, verdicts, load, why)))
    document = _document(command, plan, measured, tables, verdicts, load, why)
    if options.json:
        write_json(options.json, document)
    report.write(options.markdown, "Peers", str(document["date"]), command)
    if failed or _broken(measured):
        return 1
    if not options.strict:
        return 0
    met = [None if why else verdict.met for verdict in verdicts if verdict.binding]
    return strict_status("peers", met, why)


def _lines(
    measured: Measured,
    tables: dict[float, Results],
    verdicts: Sequence[Verdict],
    load: float,
    why: str,
) -> list[str]:
    """The report."""
    lines = [load_text(load)]
    if link := measured.link:
        lines.append(
            f"link {link['rate']}, {link['shaper']}; iperf3 {link['iperf_before_gbit']:.2f} and "
            f"{link['iperf_after_gbit']:.2f} Gb/s, echo {1e3 * float(str(link['round_trip_s'])):.2f} ms"
        )
    for size in measured.sizes:
        lines += ["", results_text(size, tables[size.mib])]
    lines += ["", *(f"left out: {name}: {said}" for name, said in measured.left_out.items())]
    lines += [verdict.text(why) for verdict in verdicts]
    wrong = _broken(measured)
    ours = sum(run.row in _keys_of_ours(measured.rows) for run in measured.runs)
    lines.append(f"wrong content from CacheLink: {wrong} of {ours} runs")
    return lines


def _document(
    command: str,
    plan: Plan,
    measured: Measured,
    tables: dict[float, Results],
    verdicts: Sequence[Verdict],
    load: float,
    why: str,
) -> dict[str, object]:
    return {
        "benchmark": "peers",
        "date": date_text(),
        "command": command,
        "config": msgspec.to_builtins(plan),
        "environment": environment() | {"peers": _versions(measured.rows)},
        "load_average": load,
        "quiet": load <= QUIET_LOAD,
        "no_verdict": why,
        "link": measured.link,
        "sizes": [asdict(size) for size in measured.sizes],
        "rows": [msgspec.to_builtins(row) for row in measured.rows],
        "results": {
            f"{mib:g}": {key: asdict(result) for key, result in results.items()}
            for mib, results in tables.items()
        },
        "left_out": measured.left_out,
        "verdicts": [
            asdict(verdict) | {"met": None if why else verdict.met} for verdict in verdicts
        ],
        "wrong_from_cachelink": _broken(measured),
        "runs": msgspec.to_builtins(measured.runs),
    }


def _versions(rows: Sequence[Row]) -> dict[str, str | None]:
    return {row.package: _version(row.package) for row in rows if row.package}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _broken(measured: Measured) -> int:
    """Runs of CacheLink after which the receiver held something else."""
    ours = _keys_of_ours(measured.rows)
    return sum(run.row in ours and not is_right(run) for run in measured.runs)


def _keys_of_ours(rows: Sequence[Row]) -> set[str]:
    return {row.key for row in rows if row.ours}


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
