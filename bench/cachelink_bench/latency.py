"""``cachelink-bench latency``: from a ready sender's cache to the receiver's first token.

The setting of CacheLink, section 6.4: the sender has read the prefix and its cache lies on the
receiver's device. Native reads the prefix again (in the blocks of the project's schedule, and in one
forward); transport translates the cache, by Ridge and by Ridge + residual with random weights of the
right shapes. Every arm ends with the same query and its first token. ``bench/README.md`` describes
the method. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
import torch

from cachelink_bench.environment import environment
from cachelink_bench.latency_arms import Arm, Bench, Run, native_arm, transport_arm
from cachelink_bench.latency_limits import Limits, gemm_flop_per_s, limits_of
from cachelink_bench.latency_models import (
    Built,
    SourceCache,
    layer_sets,
    random_engine,
    random_mapper,
)
from cachelink_bench.latency_options import Setting, parse, setting_of
from cachelink_bench.latency_report import Result, limits_text, phases_text, totals_text
from cachelink_bench.report import load_average, load_text, write_json
from cachelink_bench.turns import turned
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import ConfigError
from cachelink_core.kv.prefix_cache import TORCH_DTYPES
from cachelink_core.transport.precision import precision_for


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for phases that do not sum to their total with ``--strict``; 2 for wrong arguments.
    """
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    document, lines = _run(options, setting_of(options))
    if options.json:
        write_json(options.json, document)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 1 if options.strict and not document["phases_sum"] else 0


def _run(options: argparse.Namespace, setting: Setting) -> tuple[dict[str, object], list[str]]:
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    load = load_average()
    title = f"{setting.name}, {setting.dtype} on {_device_name(setting.device)}"
    say(f"# From a ready sender's cache to the first token: {title}\n")
    if options.smoke:
        say("SMOKE RUN of tiny shapes: it shows that everything runs, and supports no claim.\n")
    say(f"{load_text(load)}\n")
    rates = _rates(setting)
    floors = [
        limits_of(setting.sender.shape, setting.receiver.shape, setting.k, n, rates)
        for n in setting.prefixes
    ]
    say(limits_text(floors, rates) + "\n")
    if setting.left_out:
        say(f"left out, beyond the window of one of the models: {setting.left_out} tokens\n")
    began = time.monotonic()
    cold = {} if options.no_cold else _sender_prefill_s(options, setting)
    results, skipped, token_bytes = _results(options, setting, cold, began)
    if skipped:
        say(f"skipped, beyond the budget of {options.budget_s:g} s: {skipped} tokens\n")
    say(totals_text(results, token_bytes) + "\n")
    say(phases_text(results))
    return _document(options, setting, load, rates, floors, results, token_bytes), lines


def _rates(setting: Setting) -> dict[str, float]:
    """FLOP/s of the model's dtype, and of what the mapper multiplies in."""
    model = TORCH_DTYPES[setting.dtype]
    storage = precision_for(model, setting.device).storage
    prefill = gemm_flop_per_s(model, setting.device)
    by_map = prefill if storage == model else gemm_flop_per_s(storage, setting.device)
    return {"prefill": prefill, "map": by_map}


def _engine(options: argparse.Namespace, setting: Setting, built: Built) -> TransformersEngine:
    if options.random_weights:
        return random_engine(built, setting.dtype, setting.device, options.attention)
    from cachelink_core.engine.loading import load_engine

    if options.layers:
        raise ConfigError("layers scales a model down, which needs random_weights")
    return load_engine(
        built.shape.name,
        dtype=setting.dtype,
        device=str(setting.device),
        attention=options.attention,
    )


def _bench(options: argparse.Namespace, setting: Setting, engine: TransformersEngine) -> Bench:
    longest = setting.prefixes[-1]
    cache = engine.open_cache(longest, options.query_tokens, whole=True)
    chosen = random.Random(0)
    ids = [chosen.randrange(engine.vocabulary_size) for _ in range(longest + options.query_tokens)]
    return Bench(engine, cache, ids[:longest], ids[longest:])


def _sender_prefill_s(options: argparse.Namespace, setting: Setting) -> dict[int, list[float]]:
    """Seconds of the sender's own prefill in one forward, by prefix; the sender is freed again."""
    engine = _engine(options, setting, setting.sender)
    arm = native_arm(_bench(options, setting, engine), None)
    found = {}
    for tokens in setting.prefixes:
        arm(tokens)
        runs = [arm(tokens).timing for _ in range(options.rounds)]
        found[tokens] = [timing.phases_s["prefill"] for timing in runs]
    del engine, arm
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _results(
    options: argparse.Namespace, setting: Setting, cold: dict[int, list[float]], began: float
) -> tuple[list[Result], list[int], int]:
    """Results, prefixes for which there was no time, and bytes of a source token."""
    engine = _engine(options, setting, setting.receiver)
    bench = _bench(options, setting, engine)
    source = SourceCache(
        setting.sender.shape, setting.prefixes[-1], TORCH_DTYPES[setting.dtype], setting.device
    )
    arms = _arms(options, setting, bench, source)
    results: list[Result] = []
    skipped: list[int] = []
    last_s = 0.0
    for tokens in setting.prefixes:
        spent = time.monotonic() - began
        # Twice the tokens take at most four times as long.
        if options.budget_s is not None and results and spent + 3 * last_s > options.budget_s:
            skipped.append(tokens)
            continue
        results.append(_measure(arms, tokens, options.rounds, cold.get(tokens, [])))
        last_s = time.monotonic() - began - spent
    return results, skipped, source.token_bytes


def _arms(
    options: argparse.Namespace, setting: Setting, bench: Bench, source: SourceCache
) -> dict[str, Arm]:
    identity = bench.engine.identity
    sets = layer_sets(setting.sender.shape.geometry, identity.layers, setting.k, options.layer_sets)
    map_tokens = options.map_tokens or (4_096 if setting.device.type == "cuda" else 256)
    arms = {
        "native_blocks": native_arm(bench, options.block_tokens),
        "native_one_shot": native_arm(bench, None),
    }
    for name, residual in (("ridge", False), ("ridge_residual", True)):
        mapper = random_mapper(
            setting.sender.shape, identity, sets, setting.device, residual=residual
        )
        arms[name] = transport_arm(bench, source, mapper, map_tokens)
    return arms


def _measure(arms: dict[str, Arm], tokens: int, rounds: int, cold_s: Sequence[float]) -> Result:
    """Lets the arms take turns, in an order that rotates, so that a busy machine slows all."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in turned(arms, number):
            run = arms[name](tokens)
            if number:
                runs[name].append(run)
    return Result.of(tokens, runs, cold_s)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _document(
    options: argparse.Namespace,
    setting: Setting,
    load: float,
    rates: dict[str, float],
    floors: list[Limits],
    results: list[Result],
    token_bytes: int,
) -> dict[str, object]:
    # Where the results go says nothing about them, and is a path of this machine.
    config = {key: value for key, value in vars(options).items() if key not in ("json", "markdown")}
    cuda = setting.device.type == "cuda"
    return {
        "benchmark": "latency",
        "smoke": options.smoke,
        "config": config,
        "pair": setting.name,
        "sender": msgspec.to_builtins(setting.sender.shape),
        "receiver": msgspec.to_builtins(setting.receiver.shape),
        "k": setting.k,
        "dtype": setting.dtype,
        "device": _device_name(setting.device),
        "environment": environment(),
        "load_average": load,
        "flop_per_s": rates,
        "limits": [asdict(floor) for floor in floors],
        "source_token_bytes": token_bytes,
        "peak_device_bytes": torch.cuda.max_memory_allocated(setting.device) if cuda else None,
        "results": [result.document(token_bytes) for result in results],
        "phases_sum": all(result.phases_sum for result in results),
    }
