"""Ridge regression from moments, and its R² without touching data again.

``W = (A + λI)⁻¹ B`` with ``A`` and ``B`` the centred Gram and cross moments, in float64. All heads
of a target layer and kind are columns of one solve, since they read the same X.

Axes: X source channels, Y target channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.moments import System
from cachelink_core.transport.card import LambdaMode

HELD_OUT_LAMBDAS: Final = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Fractions of the mean diagonal that the mode ``heldout`` tries."""

ESCALATION: Final = 10.0
MAX_ESCALATIONS: Final = 16
FIRST_FRACTION: Final = 1e-13
"""λ = 0 is escalated from here, as a fraction of the mean diagonal: about float64's own noise."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """One solve.

    Attributes:
        weight: ``[X, Y]`` float64.
        bias: ``[Y]`` float64.
        value: λ in the mode's own unit, as used.
        warning: what was not as asked for, empty if nothing.
    """

    weight: Tensor
    bias: Tensor
    value: float
    warning: str = ""


def solve(system: System, value: float, mode: LambdaMode) -> Ridge:
    """Fits an affine map.

    A Gram that λ does not make positive definite is solved with λ ten times larger, again and
    again, and the result says so.

    Args:
        system: of the split that is fitted on.
        value: λ.
        mode: what it is added to; ``heldout`` counts like ``relative`` here.

    Raises:
        InvalidRequest: λ is negative or not finite, or no λ helps: the data are not finite.
    """
    if not 0 <= value < float("inf"):
        raise InvalidRequest(f"lambda is {value}; it is finite and not negative")
    gram, cross = centred(system)
    unit = lambda_unit(gram, system.count, mode)
    used, tried = value, 0
    while (weight := _solve_once(gram, cross, used * unit)) is None:
        tried += 1
        if tried > MAX_ESCALATIONS:
            raise InvalidRequest("the Gram cannot be solved with any lambda; is the data finite?")
        floor = FIRST_FRACTION * lambda_unit(gram, system.count, "relative") / max(unit, 1e-300)
        used = max(used * ESCALATION, floor)
    warning = ""
    if tried:
        warning = f"the Gram is singular at lambda {value:g}; raised to {used:g} (mode {mode})"
    mean_x, mean_y = system.x / system.count, system.y / system.count
    bias = (mean_y + system.shift_y) - (mean_x + system.shift_x) @ weight
    return Ridge(weight, bias, used, warning)


def solve_held_out(train: System, held_out: System, head_dim: int) -> Ridge:
    """The λ of ``HELD_OUT_LAMBDAS`` with the best held-out R²; the smaller one of equals."""
    best, best_score = None, -float("inf")
    for value in HELD_OUT_LAMBDAS:
        ridge = solve(train, value, "relative")
        score = r_squared(held_out, ridge, head_dim)
        if best is None or (score is not None and score > best_score):
            best, best_score = ridge, -float("inf") if score is None else score
    assert best is not None
    return best


def r_squared(system: System, ridge: Ridge, head_dim: int) -> float | None:
    """R² of a map on a split, from its moments, as the mean over target heads.

    Args:
        system: of any split, with the channels of the map.
        ridge: the map.
        head_dim: D_t: the columns of a head.

    Returns:
        The mean over heads that vary at all; None if none does.
    """
    return mean_r_squared(*head_errors(system, ridge, head_dim))


def mean_r_squared(residual: Tensor, total: Tensor) -> float | None:
    """Mean of ``1 - residual / total`` over the heads with a ``total``; None if none has."""
    varies = total > 0
    if not bool(varies.any()):
        return None
    return float((1 - residual[varies] / total[varies]).mean())


def head_errors(system: System, ridge: Ridge, head_dim: int) -> tuple[Tensor, Tensor]:
    """Squared error and centred variance (both summed) of each target head, from moments.

    Returns:
        Two tensors of one entry a head; the variance of a head that does not vary is 0.
    """
    weight = ridge.weight
    # The bias in shifted coordinates.
    bias = ridge.bias - system.shift_y + system.shift_x @ weight
    residual = (
        system.yy
        - 2 * (weight * system.xy).sum(0)
        - 2 * bias * system.y
        + (weight * (system.xx @ weight)).sum(0)
        + 2 * bias * (system.x @ weight)
        + system.count * bias.square()
    )
    total = system.yy - system.y.square() / system.count
    squares, residual, total = (
        column.view(-1, head_dim).sum(1) for column in (system.yy, residual, total)
    )
    # Below this it is the rounding of the squares.
    return residual, torch.where(total > 1e-12 * squares, total, 0.0)


def centred(system: System) -> tuple[Tensor, Tensor]:
    """Gram and cross moments about the split's own means; the Gram symmetric to the bit."""
    mean = system.x / system.count
    gram = system.xx - torch.outer(system.x, mean)
    return (gram + gram.t()) / 2, system.xy - torch.outer(mean, system.y)


def lambda_unit(gram: Tensor, count: int, mode: LambdaMode) -> float:
    """What λ = 1 adds to the diagonal of the summed Gram."""
    if mode == "sum":
        return 1.0
    if mode == "mean":
        return float(count)
    return float(gram.diagonal().mean())


def _solve_once(gram: Tensor, cross: Tensor, added: float) -> Tensor | None:
    """One Cholesky solve, or None if the matrix is not positive definite to working precision."""
    diagonal = gram.diagonal() + added
    if not bool((diagonal > 0).all()):
        return None
    # Equilibrated: channels differ in scale by orders of magnitude, pivots then say something.
    scale = diagonal.rsqrt()
    matrix = gram * scale[:, None] * scale
    matrix.diagonal().fill_(1.0)
    factor, info = torch.linalg.cholesky_ex(matrix)
    smallest = gram.shape[0] * torch.finfo(gram.dtype).eps
    if int(info) or not float(factor.diagonal().min()) ** 2 > smallest:
        return None
    weight = torch.cholesky_solve(cross * scale[:, None], factor) * scale[:, None]
    return weight if bool(torch.isfinite(weight).all()) else None
