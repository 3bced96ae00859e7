"""The table of ``bench/gpu_check.sh``: one line for every figure of every part."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from cachelink_bench.report import table

Row = tuple[str, str, str, str]
"""Part, what, figure, goal."""

GOAL_PAIR: Final = "Qwen3-14B to Qwen3-32B"
GOAL_TOKENS: Final = 32_768
GOAL_S: Final = 0.25
GOAL_SPEEDUP: Final = 25.0
"""Ridge + residual for 32K tokens on one H200, and against re-prefill."""


def main(argv: Sequence[str]) -> int:
    """Prints the table of a folder that ``gpu_check.sh`` filled.

    Returns:
        0 if every part ran; 1 if one failed; 2 for wrong arguments; 3 if one was skipped.
    """
    if len(argv) != 1 or not (Path(argv[0]) / "parts.tsv").is_file():
        print("usage: python -m cachelink_bench.gpu_table FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    lines = (folder / "parts.tsv").read_text(encoding="utf-8").splitlines()
    parts = [line.split("\t") for line in lines]
    rows: list[Row] = []
    for name, ended, seconds in parts:
        rows.append((name, f"{seconds} s", ended, ""))
        rows += list(_figures(folder, name))
    print(table(("part", "what", "figure", "goal"), rows))
    if any(ended.startswith("FAILED") for _, ended, _ in parts):
        return 1
    return 3 if any(ended.startswith("skipped") for _, ended, _ in parts) else 0


def _figures(folder: Path, name: str) -> Iterator[Row]:
    if name == "tests":
        yield from _tests(folder / "tests.log")
    path = folder / f"{name}.json"
    if not path.is_file():
        return
    document = json.loads(path.read_text(encoding="utf-8"))
    of = {"latency": _latency, "transport": _transport, "codecs": _codecs, "loopback": _loopback}
    for row in of[document["benchmark"]](document):
        yield ("", *row[1:])


def _tests(log: Path) -> Iterator[Row]:
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", log.read_text(encoding="utf-8"))
    if counts:
        yield "", "tests/gpu", ", ".join(dict.fromkeys(counts)), ""


def _latency(document: dict[str, Any]) -> Iterator[Row]:
    yield "", "device, dtype", f"{document['device']}, {document['dtype']}", ""
    rate = document["flop_per_s"]["prefill"] / 1e12
    yield "", "GEMM, the ceiling", f"{rate:.3g} TFLOP/s", ""
    for result in document["results"]:
        totals = {n: 1e3 * arm["total_s"]["median"] for n, arm in result["arms"].items()}
        faster = min(("native_blocks", "native_one_shot"), key=lambda name: totals[name])
        yield "", f"{result['tokens']:,} tokens, native", f"{totals[faster]:.1f} ms", ""
        for name, called in (("ridge", "Ridge"), ("ridge_residual", "Ridge + residual")):
            speedup = result["speedup"][f"{name} over {faster}"]["median"]
            figure = f"{totals[name]:.1f} ms, {speedup:.1f} times faster"
            yield (
                "",
                f"{result['tokens']:,} tokens, {called}",
                figure,
                _goal(document, result, name),
            )
    yield "", "phases sum to totals", "yes" if document["phases_sum"] else "NO", "within 2 %"


def _goal(document: dict[str, Any], result: dict[str, Any], arm: str) -> str:
    """The goal is stated for one pair, one length and one arm, at full size."""
    full = document["receiver"]["layers"] == 64 and document["pair"] == GOAL_PAIR
    if full and result["tokens"] == GOAL_TOKENS and arm == "ridge_residual":
        return f"≤ {1e3 * GOAL_S:.0f} ms, ≥ {GOAL_SPEEDUP:g} times"
    return ""


def _transport(document: dict[str, Any]) -> Iterator[Row]:
    for row in document["results"]:
        rate = row["gflop_per_s"] / 1e3
        figure = f"{rate:.3g} TFLOP/s, {row['ratio']:.2f} of bare GEMMs' time"
        goal = f"≤ {document['target']['ratio']:g} on a CPU"
        yield "", f"{row['pair']}, {row['form']}, {row['layers']} layers", figure, goal


def _codecs(document: dict[str, Any]) -> Iterator[Row]:
    for text in document["texts"]:
        for arm, speed in text["gb_per_s"].items():
            figure = f"{speed['encode']:.2f} encode, {speed['decode']:.2f} decode GB/s"
            yield "", f"{text['text']}, {arm}", figure, ""


def _loopback(document: dict[str, Any]) -> Iterator[Row]:
    for row in document["arms"].values():
        figure = f"{row['gb_per_s']['median']:.2f} GB/s, {row['to_bare']['median']:.2f} × bare gRPC"
        yield "", row["name"], figure, ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
