"""Figures of how near a translated cache is to the native one, each with a closed form.

None of them decides whether a mapper is good: on a trained pair the useless map had the better
cosines. They say where it differs.

Axes: H heads, T tokens, D channels, L layers, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from cachelink_core.fit.losses import forward_kl


@dataclass(slots=True)
class ErrorSums:
    """Sums over tokens of one layer and kind, from which all error figures follow.

    Attributes:
        count: numbers compared.
        error: ``‖native - mapped‖²``.
        native: ``‖native‖²``.
        mapped: ``‖mapped‖²``.
        dot: of both.
        tokens: compared.
        means: sum of native over tokens, ``[H, D]``.
    """

    count: int = 0
    error: float = 0.0
    native: float = 0.0
    mapped: float = 0.0
    dot: float = 0.0
    tokens: int = 0
    means: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, native: Tensor, mapped: Tensor) -> None:
        """Adds tensors ``[H, T, D]`` of any float dtype."""
        native, mapped = native.double(), mapped.double()
        self.count += native.numel()
        self.tokens += native.shape[1]
        self.error += float((native - mapped).square().sum())
        self.native += float(native.square().sum())
        self.mapped += float(mapped.square().sum())
        self.dot += float((native * mapped).sum())
        self.means = self.means + native.sum(1).cpu()

    @property
    def mse(self) -> float:
        """Mean squared error of a number."""
        return self.error / self.count

    @property
    def relative_squared_l2(self) -> float:
        """``‖native - mapped‖² / ‖native‖²``, also called NMSE: divided by raw energy."""
        return self.error / self.native

    @property
    def r_squared(self) -> float:
        """1 - error / centred variance: of each channel about its own mean."""
        centred = self.native - float(self.means.square().sum()) / self.tokens
        return 1 - self.error / centred

    @property
    def cosine(self) -> float:
        """Of both tensors as one long vector each; 0 if one is zero."""
        lengths = math.sqrt(self.native * self.mapped)
        return self.dot / lengths if lengths else 0.0


@dataclass(slots=True)
class ResidualSums:
    """Sums over tokens of what the residual did to one layer and kind.

    Attributes:
        ridge: ``‖Ridge‖²``.
        delta: ``‖Δ‖²``.
        missing: ``‖native - Ridge‖²``.
        left: ``‖native - Ridge - Δ‖²``.
        dot: of Δ and native - Ridge.
    """

    ridge: float = 0.0
    delta: float = 0.0
    missing: float = 0.0
    left: float = 0.0
    dot: float = 0.0

    def add(self, native: Tensor, ridge: Tensor, mapped: Tensor) -> None:
        """Adds tensors of one shape, ``mapped`` being Ridge + Δ."""
        native, ridge, mapped = native.double(), ridge.double(), mapped.double()
        delta, missing = mapped - ridge, native - ridge
        self.ridge += float(ridge.square().sum())
        self.delta += float(delta.square().sum())
        self.missing += float(missing.square().sum())
        self.left += float((missing - delta).square().sum())
        self.dot += float((delta * missing).sum())

    @property
    def rms_ratio(self) -> float:
        """RMS(Δ) / RMS(Ridge)."""
        return math.sqrt(self.delta / self.ridge)

    @property
    def cosine(self) -> float:
        """Of Δ and native - Ridge; 0 if one is zero."""
        lengths = math.sqrt(self.delta * self.missing)
        return self.dot / lengths if lengths else 0.0

    @property
    def removed(self) -> float:
        """Share of Ridge's squared error that Δ removes; negative where it adds."""
        return 1 - self.left / self.missing

    @property
    def error_ratio(self) -> float:
        """‖native - Ridge - Δ‖ / ‖native - Ridge‖."""
        return math.sqrt(self.left / self.missing)


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """JS divergence of probabilities in nats, ``[..., V]`` → ``[...]``, between 0 and ln 2."""
    middle = (first + second) / 2
    # xlogy is 0 at 0.
    parts = [torch.xlogy(p, p) - torch.xlogy(p, middle) for p in (first, second)]
    return (parts[0] + parts[1]).sum(-1) / 2


def entropy(probabilities: Tensor) -> Tensor:
    """In nats, ``[..., V]`` → ``[...]``."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def top_mass(probabilities: Tensor, count: int = 10) -> Tensor:
    """Sum of the ``count`` largest, ``[..., V]`` → ``[...]``."""
    return probabilities.topk(min(count, probabilities.shape[-1]), dim=-1).values.sum(-1)


def next_token_figures(native: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Of logits ``[T, V]``: forward KL, JS and whether the likeliest token agrees, ``[T]`` each."""
    return {
        "kl": forward_kl(native, other),
        "js": jensen_shannon(native.softmax(-1), other.softmax(-1)),
        "agreement": (native.argmax(-1) == other.argmax(-1)).to(native.dtype),
    }


def prefix_attention_figures(native: Tensor, other: Tensor, prefix: int) -> dict[str, Tensor]:
    """Where a query token looks, with both caches.

    Args:
        native: attention probabilities ``[..., T]`` over prefix and query.
        other: likewise.
        prefix: tokens of the prefix.

    Returns:
        Means over everything in front: JS, entropy and top-10 mass of the attention within the
        prefix, renormalised there, and the mass that the whole prefix has, which renormalising
        hides.
    """
    masses = [p[..., :prefix].sum(-1) for p in (native, other)]
    inside = [
        p[..., :prefix] / mass.clamp_min(1e-30).unsqueeze(-1)
        for p, mass in zip((native, other), masses, strict=True)
    ]
    return {
        "attention_js": jensen_shannon(*inside).mean(),
        "attention_entropy_native": entropy(inside[0]).mean(),
        "attention_entropy": entropy(inside[1]).mean(),
        "attention_top10_native": top_mass(inside[0]).mean(),
        "attention_top10": top_mass(inside[1]).mean(),
        "prefix_mass_native": masses[0].mean(),
        "prefix_mass": masses[1].mean(),
    }


def mean_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Mean over tokens of the cosine of two vectors, ``[T, D]`` each."""
    return functional.cosine_similarity(first.float(), second.float(), dim=-1).mean()
