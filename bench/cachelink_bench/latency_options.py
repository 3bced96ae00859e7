"""The options of ``cachelink-bench latency``, and the setting that they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from cachelink_bench.latency_models import SMOKE_PAIR, Built, from_config, from_shape, scaled
from cachelink_bench.transport_shapes import pair_card, pair_names
from cachelink_core import limits
from cachelink_core.codec_spec import DType
from cachelink_core.errors import ConfigError
from cachelink_core.kv.prefix_cache import TORCH_DTYPES

WHAT: Final = "From a ready sender's cache to the receiver's first token, beside reading it again."
PREFIXES: Final = "2k,4k,8k,16k,32k"
SMOKE_PREFIXES: Final = "64,128,256"
MIN_ROUNDS: Final = 5
"""Fewer runs have no median worth the name."""

ATTENTION: Final = ("sdpa", "eager", "flash_attention_2")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run, after every ``auto`` and every preset.

    Attributes:
        name: of the pair.
        sender: its model.
        receiver: its model.
        k: source layers of each target layer.
        prefixes: tokens, ascending, each within both windows.
        left_out: prefixes beyond it.
        dtype: of both models.
        device: of everything.
    """

    name: str
    sender: Built
    receiver: Built
    k: int
    prefixes: tuple[int, ...]
    left_out: tuple[int, ...]
    dtype: DType
    device: torch.device


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; exits with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="cachelink-bench latency", description=WHAT)
    parser.add_argument(
        "--pair", default="qwen3-14b-32b", help=f"{', '.join(pair_names())}, or a card's path"
    )
    parser.add_argument("--sender-config", metavar="MODEL", help="folder or hub name, not --pair")
    parser.add_argument("--receiver-config", metavar="MODEL", help="likewise; give both")
    parser.add_argument("--k", type=int, default=8, help="source layers, with --…-config")
    parser.add_argument(
        "--random-weights", action="store_true", help="do not load the models' checkpoints"
    )
    parser.add_argument("--prefixes", help=f"tokens, k for 1,024 (default: {PREFIXES})")
    parser.add_argument("--query-tokens", type=int, default=64)
    parser.add_argument("--device", default="auto", help="auto: CUDA if there is any")
    parser.add_argument("--dtype", default="auto", choices=("auto", *TORCH_DTYPES))
    parser.add_argument("--attention", default="sdpa", choices=ATTENTION)
    parser.add_argument("--layer-sets", default="scattered", choices=("scattered", "nearest"))
    parser.add_argument("--block-tokens", type=int, default=limits.DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--map-tokens", type=int, help="of a translated block (4096; CPU: 256)")
    parser.add_argument("--layers", type=int, help="scale the depth down, and the vocabulary")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="after one to warm up")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--no-cold", action="store_true", help="leave the sender's prefill out")
    parser.add_argument("--budget-s", type=float, help="skip prefixes that would take longer")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and short prefixes")
    parser.add_argument("--strict", action="store_true", help="exit 1 if phases miss their total")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")
    options = parser.parse_args(argv)
    if bool(options.sender_config) != bool(options.receiver_config):
        parser.error("--sender-config and --receiver-config go together")
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds is {options.rounds}, at least {MIN_ROUNDS} make a median")
    if options.smoke:
        options.random_weights, options.query_tokens = True, min(options.query_tokens, 8)
        options.block_tokens = min(options.block_tokens, 64)
    options.prefixes = options.prefixes or (SMOKE_PREFIXES if options.smoke else PREFIXES)
    return options


def setting_of(options: argparse.Namespace) -> Setting:
    """Resolves presets and every ``auto``.

    Raises:
        ConfigError: an unknown pair, configuration or device, or no prefix fits the windows.
    """
    name, sender, receiver, k = _pair(options)
    if options.layers:
        receiver = scaled(receiver, options.layers)
        # Below k layers the map would be narrower, and its share another one.
        sender = scaled(sender, max(options.layers, k))
    wanted = sorted(parse_tokens(text) for text in options.prefixes.split(","))
    models = sender.shape, receiver.shape
    window = min(shape.max_positions for shape in models) - options.query_tokens
    prefixes = tuple(n for n in wanted if n <= window)
    if not prefixes:
        raise ConfigError(f"prefixes are {wanted}; with the query the window has room for {window}")
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    dtype: DType = options.dtype
    if options.dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    left_out = tuple(n for n in wanted if n > window)
    return Setting(name, sender, receiver, k, prefixes, left_out, dtype, device)


def _pair(options: argparse.Namespace) -> tuple[str, Built, Built, int]:
    if options.sender_config:
        sender, receiver = map(from_config, (options.sender_config, options.receiver_config))
        return f"{sender.shape.name} to {receiver.shape.name}", sender, receiver, options.k
    card = SMOKE_PAIR if options.smoke else pair_card(options.pair)
    return card.pair, from_shape(card.sender), from_shape(card.receiver), card.k


def parse_tokens(text: str) -> int:
    """``2k`` is 2,048.

    Raises:
        ConfigError: not a positive number of tokens.
    """
    digits = text.strip().lower()
    factor = 1_024 if digits.endswith("k") else 1
    digits = digits.removesuffix("k")
    if not digits.isdecimal() or int(digits) < 1:
        raise ConfigError(f"prefix is {text!r}; wanted is a number of tokens such as 512 or 2k")
    return factor * int(digits)
