"""``cachelink-bench transport``: what mapping a token costs, beside the bare GEMMs inside it.

Random weights of a pair's full width; with ``--layers`` fewer receiver layers, which every figure a
token is then for. Mapping and bare GEMMs alternate in one run, so that a busy machine slows both;
the ratio is of their medians. ``write`` lays a block of all sender layers out for the mapper, once
however many receiver layers there are; ``rope`` turns the keys and casts both kinds into the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cachelink_bench.environment import environment
from cachelink_bench.peak_memory import peak_extra_bytes
from cachelink_bench.report import write_json
from cachelink_bench.transport_shapes import (
    BareGemms,
    Subject,
    make_subject,
    pair_card,
    pair_names,
)
from cachelink_core import limits
from cachelink_core.kv.prefix_cache import TORCH_DTYPES
from cachelink_core.kv.rotation import rotate
from cachelink_core.transport.card import KINDS
from cachelink_core.transport.source_block import SourceBlock

RATIO_TARGET = 1.2
"""Mapping may take this many times its bare GEMMs on a CPU."""


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 for a missed target with ``--strict``; 2 for wrong arguments.
    """
    options = _parse(argv)
    torch.set_num_threads(options.threads)
    rows = [
        _measure(name, residual, options) for name in options.pair for residual in (False, True)
    ]
    document = {
        "benchmark": "transport",
        "config": vars(options),
        "environment": environment(),
        "results": rows,
        "target": {"ratio": RATIO_TARGET, "met": all(_met(row) for row in rows)},
    }
    if options.json:
        write_json(Path(options.json), document)
    return 1 if options.strict and not all(_met(row) for row in rows) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cachelink-bench transport", description=__doc__)
    parser.add_argument(
        "--pair", action="append", help=f"repeatable: {', '.join(pair_names())}, or a card's path"
    )
    parser.add_argument("--layers", type=int, default=4, help="receiver layers; 0 for all")
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--dtype", choices=tuple(TORCH_DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--smoke", action="store_true", help="one pair, one layer, two rounds")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", metavar="FILE", help="write the results as one JSON document")
    options = parser.parse_args(argv)
    options.pair = options.pair or list(pair_names())
    if options.smoke:
        options.pair, options.layers, options.rounds = options.pair[:1], 1, 2
    return options


def _measure(name: str, residual: bool, options: argparse.Namespace) -> dict[str, object]:
    card, device = pair_card(name), torch.device(options.device)
    layers = options.layers or card.receiver.layers
    subject = make_subject(card, layers, TORCH_DTYPES[options.dtype], device, residual=residual)
    run = _Run(subject, options.block_tokens, TORCH_DTYPES[options.dtype])
    bare = BareGemms(subject, options.block_tokens)
    block = run.block()
    peak = peak_extra_bytes(lambda: run.map(block), device)
    bare.run()
    seconds: dict[str, list[float]] = {"write": [], "map": [], "gemm": [], "rope": []}
    calls: dict[str, Callable[[], object]] = {
        "write": run.block,
        "map": lambda: run.map(block),
        "gemm": bare.run,
        "rope": run.rope,
    }
    for _ in range(options.rounds):
        for part, call in calls.items():
            seconds[part].append(_timed(call, device))
    medians = {part: statistics.median(values) for part, values in seconds.items()}
    row = {
        "pair": name,
        "form": "CacheLink" if residual else "Ridge",
        "layers": subject.layers,
        "us_per_token": {p: 1e6 * s / options.block_tokens for p, s in medians.items()},
        "ratio": medians["map"] / medians["gemm"],
        "gflop_per_s": bare.flops / medians["map"] / 1e9,
        "gemm_gflop_per_s": bare.flops / medians["gemm"] / 1e9,
        "flop_per_token": bare.flops / options.block_tokens,
        "block_bytes": block.nbytes,
        "peak_extra_bytes": peak,
        "rounds_s": seconds,
    }
    _print(row)
    return row


class _Run:
    """One subject with the tensors around it."""

    def __init__(self, subject: Subject, tokens: int, dtype: torch.dtype) -> None:
        self._subject, self._tokens = subject, tokens
        device, sender, receiver = subject.mapper.device, subject.card.sender, subject.card.receiver
        shape = sender.kv_heads, tokens, sender.head_dim
        self._source = torch.randn(shape, device=device)
        out = receiver.kv_heads, tokens, receiver.head_dim
        self._content = torch.randn(out, device=device)
        self._angles = torch.rand(2, tokens, receiver.head_dim // 2, device=device)
        self._cache = torch.zeros(2, *out, dtype=dtype, device=device)

    def block(self) -> SourceBlock:
        """A block of the sender, laid out."""
        block = self._subject.mapper.open_block(0, self._tokens)
        for layer in range(self._subject.card.sender.layers):
            for kind in KINDS:
                block.write(layer, kind, 0, self._source)
        return block

    @torch.no_grad()
    def map(self, block: SourceBlock) -> Tensor:
        """Every layer, each forgotten before the next."""
        for layer in range(self._subject.layers):
            keys, _ = self._subject.mapper.map_layer(layer, block)
        return keys

    def rope(self) -> None:
        """What follows for every layer: RoPE on the keys, and the write of both kinds."""
        cos, sin = self._angles
        dim = self._content.shape[2]
        for _ in range(self._subject.layers):
            self._cache[0].copy_(rotate(self._content, cos, sin, "half", dim))
            self._cache[1].copy_(self._content)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    began = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _met(row: dict[str, object]) -> bool:
    ratio, peak, block = row["ratio"], row["peak_extra_bytes"], row["block_bytes"]
    assert isinstance(ratio, float)
    assert isinstance(block, int)
    return ratio <= RATIO_TARGET and (not isinstance(peak, int) or peak <= block)


def _print(row: dict[str, object]) -> None:
    parts, peak = row["us_per_token"], row["peak_extra_bytes"]
    assert isinstance(parts, dict)
    times = "  ".join(f"{part} {value:8.2f}" for part, value in parts.items())
    extra = "-" if not isinstance(peak, int) else f"{peak / 2**20:.1f}"
    block = row["block_bytes"]
    assert isinstance(block, int)
    print(
        f"{row['pair']!s:20s} {row['form']!s:9s} {row['layers']} layers  us/token: {times}  "
        f"map/gemm {row['ratio']:.3f}  {row['gflop_per_s']:.0f} GFLOP/s  "
        f"peak {extra} MiB beside a block of {block / 2**20:.1f}",
        flush=True,
    )
