"""What the residual is trained on: the receiver's own tokens, and its own distribution.

CacheLink, section 5: ``CE + λ_KL · KL(native ‖ mapped)``, both over the continuation. No term looks
at the cache itself.

Axes: B rows, Q tokens read behind the prefix, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

LossName = Literal["ce+kl", "ce", "kl", "rkl", "ce+rkl"]
"""``kl`` is forward, native ‖ mapped: it covers what native finds likely. ``rkl`` is reverse."""
LOSS_NAMES: Final[tuple[str, ...]] = get_args(LossName)

Average = Literal["example", "token"]
"""Whether every example weighs the same (the paper's 1/T an example), or every token."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One batch's loss, all scalars.

    Attributes:
        total: what is minimised.
        cross_entropy: of the continuation, nats a token.
        divergence: forward KL (reverse for ``rkl``) to native, nats a token, at temperature 1.
    """

    total: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def functional_loss(
    mapped: Tensor,
    native: Tensor,
    targets: Tensor,
    counted: Tensor,
    *,
    name: LossName = "ce+kl",
    kl_weight: float = 1.0,
    temperature: float = 1.0,
    average: Average = "example",
) -> Loss:
    """The loss of predictions that are aligned already: logits at t predict ``targets`` at t.

    Args:
        mapped: logits with the mapped cache ``[B, Q, V]``.
        native: logits with the native cache ``[B, Q, V]``, without gradient.
        targets: token ids ``[B, Q]``.
        counted: bool ``[B, Q]``: which predictions count; at least one a row.
        name: which terms.
        kl_weight: λ_KL; without meaning for one term alone.
        temperature: of both distributions in the divergence, whose gradient is scaled back by its
            square.
        average: over examples or over tokens.
    """
    entropy = functional.cross_entropy(mapped.transpose(1, 2), targets, reduction="none")
    reverse = "rkl" in name
    divergence = _divergence(mapped, native, temperature, reverse=reverse)
    ce, kl = (mean_counted(values, counted, average) for values in (entropy, divergence))
    scaled = kl * temperature**2
    plain = kl
    if temperature != 1.0:
        with torch.no_grad():
            plain = mean_counted(
                _divergence(mapped, native, 1.0, reverse=reverse), counted, average
            )
    total = {"ce": ce, "kl": scaled, "rkl": scaled}.get(name)
    if total is None:
        total = ce + kl_weight * scaled
    return Loss(total, ce.detach(), plain.detach())


def forward_kl(native: Tensor, other: Tensor) -> Tensor:
    """KL(native ‖ other) of next-token distributions in nats, ``[..., V]`` logits → ``[...]``."""
    log_native = functional.log_softmax(native, dim=-1)
    log_other = functional.log_softmax(other, dim=-1)
    return (log_native.exp() * (log_native - log_other)).sum(-1)


def mean_counted(values: Tensor, counted: Tensor, average: Average) -> Tensor:
    """Mean of ``[B, Q]`` over counted places: of all, or of each row and then of rows."""
    weights = counted.to(values.dtype)
    if average == "token":
        return (values * weights).sum() / weights.sum()
    return ((values * weights).sum(1) / weights.sum(1)).mean()


def _divergence(mapped: Tensor, native: Tensor, temperature: float, *, reverse: bool) -> Tensor:
    first, second = native / temperature, mapped / temperature
    return forward_kl(second, first) if reverse else forward_kl(first, second)
