"""``cachelink-bench pipeline``: the one-slot pipeline beside serial calls, over two real daemons.

A sender prepares short documents and a receiver answers a question about each: once one call after
the other, once with the next document always under way. ``bench/README.md`` describes the method.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cachelink_bench.environment import environment
from cachelink_bench.pipeline_runs import ARMS, Measured, make_tasks, measure
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
    table,
    write_json,
)
from cachelink_bench.statistics import Spread, ratios
from cachelink_core import logs
from cachelink_core.cli.demo.daemons import RECEIVER_NAME, ended_by_sigterm, two_nodes
from cachelink_core.rpc.client import ReceiverClient, SenderClient

TARGET = 0.9
"""Of the ratio that the stages' own times allow."""

SMOKE = {"documents": 3, "sentences": 4, "decode": 6, "rounds": 2}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for an error, or with ``--strict`` unless the target was met; 2 for wrong arguments.
    """
    options = _parse(argv)
    logs.install("error", "console")
    report = Report()
    check_places(options.json, options.markdown)
    with ended_by_sigterm():
        document = _run(options, command_line("pipeline", argv), report)
    if options.json:
        write_json(options.json, document)
    report.write(options.markdown, "One-slot pipeline", document["date"], document["command"])
    if not options.strict:
        return 0
    return strict_status("pipeline", [document["target_met"]], document["no_verdict"])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cachelink-bench pipeline", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", default="demo", help="of both nodes (demo: SmolLM2)")
    parser.add_argument("--documents", type=int, default=8, help="items of one run")
    parser.add_argument("--sentences", type=int, default=40, help="of a document, about 20 tokens")
    parser.add_argument("--decode", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each arm")
    parser.add_argument("--codec", default="native", help="of the handoffs")
    add_result_options(parser, smoke="three short documents, two rounds")
    options = parser.parse_args(argv)
    if options.smoke:
        vars(options).update(SMOKE)
    return options


def _run(options: argparse.Namespace, command: str, report: Report) -> dict[str, Any]:
    """Measures and prints; returns the document."""
    load = load_average()
    report.say(load_text(load))
    sender_within, receiver_within = _pinned()
    report.say(
        "sender and receiver on one core each\n"
        if sender_within
        else "sender and receiver are not pinned: fewer than two cores, or no taskset\n"
    )
    daemon = ["--model.name", options.model, "--model.device", "cpu", "--model.threads", "1"]
    with (
        two_nodes(daemon, sender_within=sender_within, receiver_within=receiver_within) as nodes,
        SenderClient(nodes.sender_address) as sender,
        ReceiverClient(nodes.receiver_address) as receiver,
    ):
        tasks = make_tasks(options.documents, options.sentences, options.decode)
        measured = measure(sender, receiver, RECEIVER_NAME, tasks, options.rounds, options.codec)
    document = _document(options, command, load, measured, pinned=bool(sender_within))
    report.say(_table(measured) + "\n")
    report.say(_verdict(document, measured))
    return document


def _pinned() -> tuple[list[str], list[str]]:
    """Words that pin each daemon to a core of its own; none where that cannot be."""
    cores = sorted(os.sched_getaffinity(0))
    taskset = shutil.which("taskset")
    if taskset is None or len(cores) < 2:
        return [], []
    first, second = ([taskset, "--cpu-list", str(core)] for core in cores[:2])
    return first, second


def _table(measured: Measured) -> str:
    header = ("arm", "run, s", "items/s", "prepare, s/item", "answer, s/item", "caches alive")
    rows = []
    for arm in ARMS:
        runs = measured.runs[arm]
        items = len(runs[0].prepare_s)
        took = Spread.of([run.wall_s for run in runs])
        rows.append(
            (
                arm,
                took.text(),
                f"{items / took.median:.2f}",
                Spread.of([sum(run.prepare_s) / items for run in runs]).text(digits=3),
                Spread.of([sum(run.answer_s) / items for run in runs]).text(digits=3),
                str(max(run.most_alive for run in runs)),
            )
        )
    return table(header, rows)


def _document(
    options: argparse.Namespace, command: str, load: float, measured: Measured, *, pinned: bool
) -> dict[str, Any]:
    serial, pipelined = (measured.runs[arm] for arm in ARMS)
    ratio = ratios([run.wall_s for run in serial], [run.wall_s for run in pipelined])
    expected = Spread.of([run.wall_s / run.one_slot_s for run in serial])
    reached = ratios(ratio.runs, expected.runs)
    why = no_verdict(load, smoke=options.smoke)
    return {
        "benchmark": "pipeline",
        "date": date_text(),
        "command": command,
        "config": settings(options),
        "environment": environment(),
        "load_average": load,
        "pinned": pinned,
        "prefix_tokens": measured.prefix_tokens,
        "runs": {arm: [asdict(run) for run in runs] for arm, runs in measured.runs.items()},
        "serial_to_pipelined": asdict(ratio),
        "expected_endless": asdict(Spread.of([run.endless_ratio for run in serial])),
        "expected": asdict(expected),
        "reached": asdict(reached),
        "outputs_equal": True,  # measure() ends with an error otherwise
        "most_alive": max(run.most_alive for run in pipelined),
        "target": TARGET,
        # No verdict from a busy machine, whose other programs take turns with both daemons.
        "no_verdict": why,
        "target_met": None if why else reached.median >= TARGET,
    }


def _verdict(document: dict[str, Any], measured: Measured) -> str:
    def spread(name: str) -> str:
        value = document[name]
        return Spread(value["median"], value["p25"], value["p75"], value["runs"]).text()

    items = len(measured.runs[ARMS[0]][0].prepare_s)
    why = document["no_verdict"]
    met = f"no verdict: {why}" if why else "met" if document["target_met"] else "MISSED"
    return "\n".join(
        (
            f"serial / pipelined: {spread('serial_to_pipelined')} over {items} items; "
            "answers equal token for token",
            f"expected: {spread('expected')} from the serial stages, the first preparation and the "
            f"last answer alone; {spread('expected_endless')} = serial / max(stage) without end",
            f"reached of expected: {spread('reached')}; target {TARGET:g}: {met}",
        )
    )
