"""From moments to a mapper: choose layers, solve, record how well it went. No models, no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from cachelink_core.codec_spec import DType, TensorKind
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.measurement import Measurement
from cachelink_core.fit.moments import System
from cachelink_core.fit.ridge import (
    HELD_OUT_LAMBDAS,
    Ridge,
    head_errors,
    mean_r_squared,
    solve,
    solve_held_out,
)
from cachelink_core.fit.selection import Progress, head_rows, select_layers
from cachelink_core.transport.card import (
    KINDS,
    Card,
    FitRecord,
    KindFit,
    LambdaMode,
    LayerFit,
    Selection,
    check_sources,
    local_heads,
)
from cachelink_core.transport.state import MapperState, ridge_name

Heads = Literal["all", "local"]

DEFAULT_LAMBDA: Final = 0.01
DEFAULT_MODE: Final[LambdaMode] = "sum"
"""Those of the published baseline, whose equation adds λ to the Gram that is summed over tokens."""


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """What a solve is asked for.

    Attributes:
        k: source layers of each target layer.
        selection: how they are chosen; ``given`` takes ``layer_sets``.
        heads: a target head reads all source heads, or those paired with it.
        lambda_value: λ; without meaning in mode ``heldout``.
        lambda_mode: what it is added to.
        weights_dtype: of the artifact.
        layer_sets: for ``given``, one a target layer.
    """

    k: int = 8
    selection: Selection = "all-head"
    heads: Heads = "all"
    lambda_value: float = DEFAULT_LAMBDA
    lambda_mode: LambdaMode = DEFAULT_MODE
    weights_dtype: DType = "float32"
    layer_sets: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class Solved:
    """Target layers that are solved, by index, and their tensors."""

    layers: dict[int, LayerFit]
    tensors: dict[str, Tensor]
    warnings: list[str]


def build_mapper(
    measured: Measurement, options: SolveOptions, progress: Progress | None = None
) -> MapperState:
    """Solves every target layer from full moments.

    Args:
        measured: of the pair.
        options: what is wanted.
        progress: told after each layer.

    Raises:
        InvalidRequest: fewer observations than unknowns, or options that do not fit the pair.
        ManifestError: a given layer set that is not one.
    """
    sets = layer_sets(measured, options, progress)
    solved = solve_targets(measured, options, dict(enumerate(sets)), progress)
    return assemble(measured, options, solved)


def layer_sets(
    measured: Measurement, options: SolveOptions, progress: Progress | None = None
) -> Sequence[tuple[int, ...]]:
    """The layer set of every target layer: chosen, or as given."""
    sender, receiver = measured.sender, measured.receiver
    if options.selection != "given":
        return select_layers(
            measured.moments,
            sender.layers,
            receiver.layers,
            k=options.k,
            rule=options.selection,
            value=options.lambda_value,
            mode=options.lambda_mode,
            progress=progress,
        )
    if len(options.layer_sets) != len(receiver.layers):
        raise InvalidRequest(
            f"layer_sets has {len(options.layer_sets)} entries; "
            f"the receiver has {len(receiver.layers)} layers"
        )
    for index, sources in enumerate(options.layer_sets):
        check_sources(f"layer_sets[{index}]", sources, sender)
    return options.layer_sets


def solve_targets(
    measured: Measurement,
    options: SolveOptions,
    sets: Mapping[int, tuple[int, ...]],
    progress: Progress | None = None,
) -> Solved:
    """Solves some target layers.

    Args:
        measured: whose moments hold them.
        options: λ and heads.
        sets: layer set by target layer.
        progress: told after each layer.

    Raises:
        InvalidRequest: fewer observations than unknowns.
    """
    solved = Solved({}, {}, [])
    for done, (target, sources) in enumerate(sets.items(), start=1):
        _check_enough(measured, options, target, sources)
        fits = {
            kind: _solve_kind(measured, options, target, sources, kind, solved) for kind in KINDS
        }
        solved.layers[target] = LayerFit(sources=sources, key=fits["K"], value=fits["V"])
        if progress is not None:
            progress("solving", done, len(sets))
    return solved


def assemble(measured: Measurement, options: SolveOptions, solved: Solved) -> MapperState:
    """A learned map of all solved layers."""
    counts = measured.moments.counts
    largest = HELD_OUT_LAMBDAS[-1]
    card = Card(
        sender=measured.sender,
        receiver=measured.receiver,
        layers=tuple(solved.layers[i] for i in range(len(measured.receiver.layers))),
        heads="all" if options.heads == "all" else _pairing(measured),
        weights_dtype=options.weights_dtype,
        bos_id=measured.bos_id,
        fit=FitRecord(
            selection=options.selection,
            lambda_mode=options.lambda_mode,
            lambda_value=largest if options.lambda_mode == "heldout" else options.lambda_value,
            observations=counts["train"],
            held_out_observations=counts["held_out"],
            warnings=tuple(solved.warnings),
            calibration=measured.calibration,
        ),
    )
    state = MapperState(card, solved.tensors | measured.position0)
    state.check()
    return state


def _solve_kind(
    measured: Measurement,
    options: SolveOptions,
    target: int,
    sources: tuple[int, ...],
    kind: TensorKind,
    solved: Solved,
) -> KindFit:
    """Solves one kind of one layer, head by head if they read different channels."""
    moments = measured.moments
    train = moments.system("train", kind, sources, (target,))
    held_out = None
    if moments.counts["held_out"]:
        held_out = moments.system("held_out", kind, sources, (target,))
    dim = measured.receiver.layers[target].head_dim
    parts = _parts(measured, options, target, sources)
    ridges, errors = [], {"train": [], "held_out": []}  # type: ignore[var-annotated]
    for rows, columns in parts:
        judged = held_out.part(rows, columns) if held_out is not None else None
        ridge = _solve_part(train.part(rows, columns), judged, options, dim)
        ridges.append(ridge)
        errors["train"].append(head_errors(train.part(rows, columns), ridge, dim))
        if judged is not None:
            errors["held_out"].append(head_errors(judged, ridge, dim))
        if ridge.warning:
            solved.warnings.append(f"layer {target} {kind}: {ridge.warning}")
    weights = [ridge.weight for ridge in ridges]
    stacked = weights[0] if options.heads == "all" else torch.stack(weights)
    bias = torch.cat([ridge.bias for ridge in ridges])
    solved.tensors[ridge_name(target, kind, "weight")] = stacked.to("cpu", torch.float32)
    solved.tensors[ridge_name(target, kind, "bias")] = bias.to("cpu", torch.float32)
    return KindFit(
        ridge_lambda=max(ridge.value for ridge in ridges),
        r2_in_sample=_mean(errors["train"]),
        r2_held_out=_mean(errors["held_out"]),
    )


def _solve_part(
    train: System, held_out: System | None, options: SolveOptions, head_dim: int
) -> Ridge:
    if options.lambda_mode != "heldout":
        return solve(train, options.lambda_value, options.lambda_mode)
    if held_out is None:
        raise InvalidRequest("lambda mode heldout needs held-out text; the moments have none")
    return solve_held_out(train, held_out, head_dim)


def _parts(
    measured: Measurement, options: SolveOptions, target: int, sources: tuple[int, ...]
) -> list[tuple[Tensor | slice, slice]]:
    """Source channels and target columns of each separate solve."""
    if options.heads == "all":
        return [(slice(None), slice(None))]
    layers = [measured.sender.layers[source] for source in sources]
    dim = measured.receiver.layers[target].head_dim
    return [
        (head_rows(layers, read, measured.moments.device), slice(head * dim, (head + 1) * dim))
        for head, read in enumerate(_pairing(measured))
    ]


def _pairing(measured: Measurement) -> tuple[tuple[int, ...], ...]:
    sender, receiver = measured.sender.layers, measured.receiver.layers
    counts = {layer.kv_heads for layer in sender}, {layer.kv_heads for layer in receiver}
    if any(len(found) != 1 for found in counts):
        raise InvalidRequest(
            f"heads local: layers have {sorted(counts[0])} and {sorted(counts[1])} heads; "
            "each model needs one count"
        )
    return local_heads(counts[0].pop(), counts[1].pop())


def _check_enough(
    measured: Measurement, options: SolveOptions, target: int, sources: tuple[int, ...]
) -> None:
    """Least squares needs more observations than unknowns; λ alone would hide that they lack."""
    unknowns = measured.moments.sender.width(sources) + 1
    if options.heads == "local":
        share = len(_pairing(measured)[0]) / measured.sender.layers[sources[0]].kv_heads
        unknowns = round((unknowns - 1) * share) + 1
    found = measured.moments.counts["train"]
    if found < unknowns:
        raise InvalidRequest(
            f"calibration text is too short: {found} observations for the {unknowns} unknowns of "
            f"a channel of target layer {target}; take more sequences, a smaller stride or a "
            f"smaller k than {len(sources)}"
        )


def _mean(errors: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    if not errors:
        return None
    residual, total = (torch.cat(parts) for parts in zip(*errors, strict=True))
    return mean_r_squared(residual, total)
