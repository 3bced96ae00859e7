"""What the device could do at best: operations of each way, over the GEMM rate measured on it.

Axes: I = k·H_s·D_s input channels, O = H_t·D_t output channels.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from cachelink_bench.stopwatch import settle
from cachelink_core.fit.shapes import ModelShape
from cachelink_core.transport.card import ResidualShape

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Floors of one prefix length: arithmetic alone, the query left out.

    Attributes:
        tokens: of the prefix.
        prefill_flop: of the receiver.
        ridge_flop: of the map.
        residual_flop: of the map with its residual.
        native_s: floor of re-prefill.
        ridge_s: floor of Ridge.
        residual_s: floor of Ridge + residual.
    """

    tokens: int
    prefill_flop: float
    ridge_flop: float
    residual_flop: float
    native_s: float
    ridge_s: float
    residual_s: float


def map_flops_per_token(
    sender: ModelShape, receiver: ModelShape, k: int, residual: ResidualShape | None
) -> float:
    """Of every receiver layer's GEMMs; two for each multiply-add."""
    inputs, outputs = min(k, sender.layers) * sender.channels, receiver.channels
    products = 2 * inputs * outputs
    if residual is not None:
        products += 2 * inputs * residual.stem
        products += 2 * residual.stem * residual.fused + residual.fused * 2 * outputs
    return 2.0 * products * receiver.layers


def limits_of(
    sender: ModelShape,
    receiver: ModelShape,
    k: int,
    tokens: int,
    rates: dict[str, float],
) -> Limits:
    """Floors for a prefix.

    Args:
        sender: of the pair.
        receiver: of the pair.
        k: source layers of each target layer.
        tokens: of the prefix.
        rates: FLOP/s by ``prefill`` and ``map``.
    """
    prefill = receiver.prefill_flops(tokens)
    ridge = tokens * map_flops_per_token(sender, receiver, k, None)
    full = tokens * map_flops_per_token(sender, receiver, k, ResidualShape())
    by_map = rates["map"]
    return Limits(
        tokens, prefill, ridge, full, prefill / rates["prefill"], ridge / by_map, full / by_map
    )


def gemm_flop_per_s(dtype: torch.dtype, device: torch.device, size: int | None = None) -> float:
    """Best FLOP/s of a square product that is large for the device."""
    edge = size or (8_192 if device.type == "cuda" else 512)
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    torch.mm(left, right)
    best = float("inf")
    for _ in range(ROUNDS):
        settle(device)
        began = time.perf_counter()
        torch.mm(left, right)
        settle(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * edge**3 / best
