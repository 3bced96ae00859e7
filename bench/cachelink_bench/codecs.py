"""``cachelink-bench codecs``: bytes, divergence and speed of every codec on a real model's cache.

For each shipped text the model reads a prefix in blocks; its cache is handed over by each codec and
by the usual first try (4 bits, one scale per token and head), and the model reads a continuation
behind what arrived. ``bench/README.md`` describes the method.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cachelink_bench.codec_quality import make_subject
from cachelink_bench.codec_rates import Speed, measure_speed, memcpy_rate
from cachelink_bench.codec_runs import ARMS, TIMED, TextResult, run_text
from cachelink_bench.codec_targets import Target, judge_targets
from cachelink_bench.codec_treatments import Handover
from cachelink_bench.environment import environment
from cachelink_bench.report import write_json
from cachelink_core import limits, texts
from cachelink_core.engine.loading import load_engine, set_threads
from cachelink_core.engine.transformers_engine import TransformersEngine

SMOKE_TOKENS = (256, 32)
"""Prefix and continuation of ``--smoke``."""


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for a missed target with ``--strict``; 2 for wrong arguments.
    """
    options = _parse(argv)
    document, missed = _run(options)
    if options.json:
        write_json(Path(options.json), document)
    if options.json_stdout:
        print(json.dumps(document))
    return 1 if missed and options.strict else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cachelink-bench codecs", description=__doc__)
    parser.add_argument("--model", default="demo", help="name, folder or GGUF file (demo: SmolLM2)")
    parser.add_argument(
        "--text", action="append", choices=texts.names(), help="repeatable; default: all six"
    )
    parser.add_argument("--prefix-tokens", type=int, default=1536)
    parser.add_argument("--continuation-tokens", type=int, default=256)
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--smoke", action="store_true", help="one text, 256+32 tokens, no targets")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", metavar="FILE", help="write the results as one JSON document")
    parser.add_argument("--json-stdout", action="store_true", help="print it as the last line")
    options = parser.parse_args(argv)
    options.text = options.text or list(texts.EVALUATION)
    if options.smoke:
        options.text = options.text[:1]
        options.prefix_tokens, options.continuation_tokens = SMOKE_TOKENS
    return options


def _run(options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    set_threads(options.threads)
    engine = load_engine(options.model)
    results: list[TextResult] = []
    speeds: dict[str, dict[str, Speed]] = {}
    memcpy = memcpy_rate()
    for name in options.text:
        result, speeds[name] = _run_text(engine, name, options)
        results.append(result)
        _print_text(result, speeds[name], memcpy)
    targets = [] if options.smoke else judge_targets(results)
    _print_targets(targets)
    document = {
        "benchmark": "codecs",
        "config": vars(options),
        "model": engine.identity.digest(),
        "environment": environment(),
        "memcpy_gb_per_s": memcpy,
        "texts": [
            asdict(r) | {"gb_per_s": {arm: asdict(s) for arm, s in speeds[r.text].items()}}
            for r in results
        ],
        "targets": [asdict(target) for target in targets],
    }
    return document, any(not target.met for target in targets)


def _run_text(
    engine: TransformersEngine, name: str, options: argparse.Namespace
) -> tuple[TextResult, dict[str, Speed]]:
    subject = make_subject(
        engine,
        name,
        options.prefix_tokens,
        options.continuation_tokens,
        options.block_tokens,
    )
    blocks = options.prefix_tokens // options.block_tokens
    timed = tuple(range(min(1, blocks - 1), min(blocks, 3)))
    speeds = {
        arm: measure_speed(engine, subject, treatment, timed)
        for arm in TIMED
        if isinstance(treatment := ARMS[arm], Handover)
    }
    return run_text(engine, subject), speeds


def _print_text(result: TextResult, speeds: Mapping[str, Speed], memcpy: float) -> None:
    print(
        f"\n{result.text}: {result.native_bytes / 2**20:.1f} MiB native, memcpy {memcpy:.1f} GB/s"
    )
    print(
        f"{'':30s} {'bits':>7s} {'bytes/el':>8s} {'ratio':>6s} {'KL nats':>8s} {'top-1':>6s} "
        f"{'first':>6s} {'encode':>7s} {'decode':>7s} {'pack':>6s} {'unpack':>6s} GB/s"
    )
    rows = {"noise floor (one-shot)": result.noise_floor, **result.arms}
    for name, quality in rows.items():
        rates = _rates(speeds[name], packed="+" in name) if name in speeds else ""
        print(
            f"{name:30s} {quality.bits_per_element:7.3f} {quality.bits_per_element / 8:8.3f} "
            f"{quality.bytes_sent / result.native_bytes:6.3f} {quality.kl_nats:8.4f} "
            f"{quality.top1:6.3f} {quality.top1_first:6.3f} {rates}",
            flush=True,
        )


def _rates(speed: Speed, *, packed: bool) -> str:
    packing = f"{speed.pack:6.2f} {speed.unpack:6.2f}" if packed else f"{'-':>6s} {'-':>6s}"
    return f"{speed.encode:7.2f} {speed.decode:7.2f} {packing}"


def _print_targets(targets: Sequence[Target]) -> None:
    missed = [target for target in targets if not target.met]
    if targets:
        print(f"\ntargets: {len(targets) - len(missed)} of {len(targets)} met")
    for target in missed:
        print(f"MISSED {target.name} on {target.text}: {target.value:.4f}, limit {target.limit:g}")
