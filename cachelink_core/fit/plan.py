"""What a fit will cost, before it starts: bytes and floating-point operations, without weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachelink_core.fit.panels import Channels, Panel
from cachelink_core.fit.shapes import ModelShape
from cachelink_core.identity import LayerGeometry
from cachelink_core.transport.card import ResidualShape

Geometries = Sequence[LayerGeometry]

FLOAT32: Final = 4
FLOAT64: Final = 8
USABLE_SHARE: Final = 0.8
"""Of the host's memory: the models' own buffers and Python take the rest."""


@dataclass(frozen=True, slots=True)
class MomentsCost:
    """One way to keep the moments.

    Attributes:
        gram_bytes: of all Grams of one kind and split, float64.
        cross_bytes: of their cross moments.
        nbytes: everything, both kinds and both splits.
        flops: of both kinds.
    """

    gram_bytes: int
    cross_bytes: int
    nbytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class FitPlan:
    """A fit in numbers.

    Attributes:
        observations: to fit on.
        full: one panel of all layers: any layer set can be solved afterwards.
        per_layer: one panel a target layer.
        largest_solve_bytes: scratch of one solve.
        solve_flops: of all solves.
        prefill_flops: of both models over all sequences.
        ridge_bytes: of the mapper's weights in float32.
        ridge_parameters: weights and biases.
        residual_parameters: of all layers, were a residual trained.
        source_token_bytes: of the sender's cache, in bf16.
        target_token_bytes: of the receiver's.
        apply_flops_per_token: of Ridge.
        model_bytes: both models' weights in bf16.
    """

    observations: int
    full: MomentsCost
    per_layer: MomentsCost
    largest_solve_bytes: int
    solve_flops: float
    prefill_flops: float
    ridge_bytes: int
    ridge_parameters: int
    residual_parameters: int
    source_token_bytes: int
    target_token_bytes: int
    apply_flops_per_token: float
    model_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of a fit with full moments, beside the models themselves."""
        return self.full.nbytes + self.largest_solve_bytes + self.ridge_bytes


def plan_fit(
    sender: ModelShape,
    receiver: ModelShape,
    *,
    k: int,
    sequences: int = 500,
    length: int = 1_024,
    stride: int = 4,
    held_out: float = 0.1,
) -> FitPlan:
    """Predicts a fit; arguments as ``cachelink fit`` has them."""
    each = len(range(stride, length, stride))
    extra = max(1, round(sequences * held_out)) if held_out else 0
    inputs, outputs = k * sender.channels, receiver.channels
    everything = tuple(range(sender.layers)), tuple(range(receiver.layers))
    own = tuple(Panel(tuple(range(k)), (target,)) for target in range(receiver.layers))
    observed = (sequences + extra) * each
    ridge = 2 * receiver.layers * (inputs * outputs + outputs)
    factor = inputs**3 / 3 + 2.0 * inputs**2 * outputs
    return FitPlan(
        observations=sequences * each,
        full=moments_cost(sender.geometry, receiver.geometry, (Panel(*everything),), observed),
        per_layer=moments_cost(sender.geometry, receiver.geometry, own, observed),
        largest_solve_bytes=FLOAT64 * (4 * inputs * inputs + 3 * inputs * outputs),
        solve_flops=2.0 * receiver.layers * factor,
        prefill_flops=(sequences + extra)
        * (sender.prefill_flops(length) + receiver.prefill_flops(length)),
        ridge_bytes=FLOAT32 * ridge,
        ridge_parameters=ridge,
        residual_parameters=receiver.layers * residual_parameters(inputs, outputs),
        source_token_bytes=4 * sender.layers * sender.channels,
        target_token_bytes=4 * receiver.layers * receiver.channels,
        apply_flops_per_token=2.0 * 2 * receiver.layers * inputs * outputs,
        model_bytes=2 * (sender.parameters + receiver.parameters),
    )


def moments_cost(
    sender: Geometries, receiver: Geometries, panels: Sequence[Panel], observations: int
) -> MomentsCost:
    """Bytes and operations of moments.

    Args:
        sender: geometries.
        receiver: geometries.
        panels: which moments.
        observations: of both splits.
    """
    source, target = Channels.of(sender), Channels.of(receiver)
    gram = cross = vectors = 0
    for panel in panels:
        x, y = source.width(panel.sources), target.width(panel.targets)
        gram, cross, vectors = gram + x * x, cross + x * y, vectors + x + 2 * y
    return MomentsCost(
        gram_bytes=FLOAT64 * gram,
        cross_bytes=FLOAT64 * cross,
        nbytes=4 * FLOAT64 * (gram + cross + vectors),
        flops=2 * 2.0 * observations * (gram + cross),
    )


def residual_parameters(inputs: int, outputs: int, shape: ResidualShape | None = None) -> int:
    """Of one target layer's residual: five linears, all with biases."""
    shape = shape or ResidualShape()
    stems = 2 * (inputs * shape.stem + shape.stem)
    fuse = 2 * shape.stem * shape.fused + shape.fused
    return stems + fuse + 2 * (shape.fused * outputs + outputs)


def usable_memory_bytes() -> int:
    """What a fit on this host may take."""
    pages, page = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * page * USABLE_SHARE)
