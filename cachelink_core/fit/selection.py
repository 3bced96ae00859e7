"""Which source layers a target layer reads: by how well each predicts it, on held-out text.

All scores are the mean of the R² of keys and of values, each the mean over target heads; ties go to
the lower layer. A layer set is kept in ascending order, which is the order inside X.

Axes: L layers, H KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.moments import Moments, Split, System
from cachelink_core.fit.ridge import Ridge, head_errors, mean_r_squared, r_squared, solve
from cachelink_core.identity import LayerGeometry
from cachelink_core.transport.card import KINDS, LambdaMode, Selection, local_heads

PROBE_FRACTION: Final = 1e-9
"""λ of the same-head probe, as a fraction of the mean diagonal: least squares that cannot fail."""

GREEDY_CANDIDATES: Final = 12
"""Best single layers among which the greedy rule chooses, or k + 4 of them if that is more."""

Geometries = Sequence[LayerGeometry]
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the work done and the whole."""


def select_layers(
    moments: Moments,
    sender: Geometries,
    receiver: Geometries,
    *,
    k: int,
    rule: Selection,
    value: float,
    mode: LambdaMode,
    progress: Progress | None = None,
) -> list[tuple[int, ...]]:
    """One layer set for each target layer.

    Args:
        moments: of the pair.
        sender: geometries of its layers.
        receiver: geometries of its layers.
        k: size of each set.
        rule: ``same-head``, ``all-head`` or ``greedy``.
        value: λ of the two latter.
        mode: of λ; ``heldout`` probes with λ = 1e-4 of the mean diagonal.
        progress: told after each source layer, or target layer for the greedy rule.

    Raises:
        InvalidRequest: k is not between 1 and the number of candidates, or an unknown rule.
    """
    candidates = moments.candidates(0)
    if not 1 <= k <= len(candidates):
        raise InvalidRequest(f"k is {k}; the sender has {len(candidates)} layers to choose from")
    if mode == "heldout":
        value, mode = 1e-4, "relative"
    if rule == "same-head":
        scores = same_head_scores(moments, sender, receiver, progress)
    elif rule in ("all-head", "greedy"):
        scores = all_head_scores(moments, receiver, value, mode, progress)
    else:
        raise InvalidRequest(f"selection is {rule!r}; known: same-head, all-head, greedy")
    ranked = [[candidates[i] for i in order] for order in _ranking(scores)]
    if rule != "greedy":
        return [tuple(sorted(layers[:k])) for layers in ranked]
    sets = []
    for target, layers in enumerate(ranked):
        shortlist = layers[: max(GREEDY_CANDIDATES, k + 4)]
        dim = receiver[target].head_dim
        sets.append(_greedy(moments, shortlist, target, dim, k=k, value=value, mode=mode))
        if progress is not None:
            progress("greedy selection", target + 1, len(ranked))
    return sets


def same_head_scores(
    moments: Moments, sender: Geometries, receiver: Geometries, progress: Progress | None = None
) -> Tensor:
    """Score ``[L_t, candidates]`` with each target head predicted by the head paired with it."""
    candidates, split = moments.candidates(0), _judge(moments)
    scores = torch.zeros(len(receiver), len(candidates), dtype=torch.float64)
    for column, source in enumerate(candidates):
        for target in range(len(receiver)):
            pair = sender[source], receiver[target]
            found = [_same_head(moments, split, kind, source, target, pair) for kind in KINDS]
            scores[target, column] = sum(found) / len(found)
        if progress is not None:
            progress("same-head probes", column + 1, len(candidates))
    return scores


def all_head_scores(
    moments: Moments,
    receiver: Geometries,
    value: float,
    mode: LambdaMode,
    progress: Progress | None = None,
) -> Tensor:
    """Score ``[L_t, candidates]`` with all heads of one source layer; one factorisation a layer."""
    candidates, split = moments.candidates(0), _judge(moments)
    targets = tuple(range(len(receiver)))
    scores = torch.zeros(len(targets), len(candidates), dtype=torch.float64)
    for column, source in enumerate(candidates):
        for kind in KINDS:
            ridge = solve(moments.system("train", kind, (source,), targets), value, mode)
            judged = moments.system(split, kind, (source,), targets)
            for target, columns in enumerate(moments.receiver.columns(targets)):
                part = _columns(judged, ridge, columns)
                errors = head_errors(*part, receiver[target].head_dim)
                scores[target, column] += (mean_r_squared(*errors) or 0.0) / len(KINDS)
        if progress is not None:
            progress("all-head probes", column + 1, len(candidates))
    return scores


def joint_score(
    moments: Moments,
    sources: Sequence[int],
    target: int,
    head_dim: int,
    value: float,
    mode: LambdaMode,
) -> float:
    """Score of a whole layer set for one target layer."""
    split, total = _judge(moments), 0.0
    for kind in KINDS:
        ridge = solve(moments.system("train", kind, sources, (target,)), value, mode)
        judged = moments.system(split, kind, sources, (target,))
        total += r_squared(judged, ridge, head_dim) or 0.0
    return total / len(KINDS)


def head_rows(
    sources: Sequence[LayerGeometry], heads: Sequence[int], device: torch.device
) -> Tensor:
    """Channels of some heads of every layer of a set: indices in (layer, head, dim) order."""
    rows, offset = [], 0
    for layer in sources:
        for head in heads:
            first = offset + head * layer.head_dim
            rows.append(torch.arange(first, first + layer.head_dim, device=device))
        offset += layer.kv_heads * layer.head_dim
    return torch.cat(rows)


def _same_head(
    moments: Moments,
    split: Split,
    kind: TensorKind,
    source: int,
    target: int,
    pair: tuple[LayerGeometry, LayerGeometry],
) -> float:
    train = moments.system("train", kind, (source,), (target,))
    judged = moments.system(split, kind, (source,), (target,))
    dim, found = pair[1].head_dim, []
    for head, read in enumerate(local_heads(pair[0].kv_heads, pair[1].kv_heads)):
        rows = head_rows((pair[0],), read, moments.device)
        columns = slice(head * dim, (head + 1) * dim)
        ridge = solve(train.part(rows, columns), PROBE_FRACTION, "relative")
        score = r_squared(judged.part(rows, columns), ridge, dim)
        if score is not None:
            found.append(score)
    return sum(found) / len(found) if found else 0.0


def _greedy(
    moments: Moments,
    shortlist: Sequence[int],
    target: int,
    head_dim: int,
    *,
    k: int,
    value: float,
    mode: LambdaMode,
) -> tuple[int, ...]:
    """Adds, one after the other, the layer that helps the set most."""
    chosen: list[int] = []
    for _ in range(k):
        scored = [
            (joint_score(moments, sorted([*chosen, j]), target, head_dim, value, mode), -j)
            for j in shortlist
            if j not in chosen
        ]
        chosen.append(-max(scored)[1])
    return tuple(sorted(chosen))


def _columns(system: System, ridge: Ridge, columns: slice) -> tuple[System, Ridge]:
    part = Ridge(ridge.weight[:, columns], ridge.bias[columns], ridge.value)
    return system.part(slice(None), columns), part


def _judge(moments: Moments) -> Split:
    """Held-out observations if there are any."""
    return "held_out" if moments.counts["held_out"] else "train"


def _ranking(scores: Tensor) -> list[list[int]]:
    """Columns of each row, best first, the lower one of equals first."""
    return [sorted(range(len(row)), key=lambda i: (-row[i], i)) for row in scores.tolist()]
