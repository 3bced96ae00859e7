"""Every choice of a training that the paper leaves open, with a default."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final, Literal, get_args

from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.losses import LOSS_NAMES, Average, LossName

Counted = Literal["continuation", "query+continuation"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a residual is trained.

    The paper states steps, batch and the form of the loss (CacheLink, section 5 and appendix A).
    Everything else here is ours: a default that works, never a claim about the paper.

    Attributes:
        steps: of the optimiser.
        batch: examples a step.
        rows: examples that go through the receiver together; gradients of a batch add up, so it
            bounds memory and decides nothing else.
        loss: which terms.
        kl_weight: λ_KL.
        temperature: of both distributions in the divergence.
        count: which predictions the loss counts.
        average: over examples or over tokens.
        penalty: weight of the mean of ``‖Δ‖² / ‖Ridge‖²`` over layers and kinds: keeps the cache
            near Ridge.
        stem: units of each stem.
        fused: units behind them.
        standardised: whether inputs are standardised by fixed means and scales.
        standardise_examples: from how many examples those are measured.
        learning_rate: of AdamW, after the warm-up.
        schedule: of the learning rate after the warm-up; ``cosine`` and ``linear`` end at zero.
        warm_up: share of the steps in which the rate rises linearly.
        weight_decay: of AdamW, on weights, not on biases.
        beta1: of AdamW.
        beta2: of AdamW.
        clip: largest norm of a step's gradient; 0 for no limit.
        seed: of the initial weights and the order of examples.
        evaluate_every: steps between evaluations on held-out examples.
        save_every: steps between checkpoints.
    """

    steps: int = 600
    batch: int = 2
    rows: int = 1
    loss: LossName = "ce+kl"
    kl_weight: float = 1.0
    temperature: float = 1.0
    count: Counted = "continuation"
    average: Average = "example"
    penalty: float = 0.0
    stem: int = 256
    fused: int = 512
    standardised: bool = False
    standardise_examples: int = 64
    learning_rate: float = 1e-4
    schedule: Schedule = "cosine"
    warm_up: float = 0.05
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 50
    save_every: int = 100

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            InvalidRequest: names the setting, its value and what it may be.
        """
        for name in _POSITIVE:
            _check(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            _check(name, value, 0 <= value < math.inf, "finite and not negative")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _check(name, value, value in choices, f"one of {', '.join(choices)}")
        _check("warm_up", self.warm_up, self.warm_up < 1, "a share below 1")

    def rate(self, step: int) -> float:
        """Learning rate of a step; the first is step 0."""
        warm = round(self.steps * self.warm_up)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        factor = {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 - done,
            "constant": 1.0,
        }[self.schedule]
        return self.learning_rate * factor

    def plain(self) -> dict[str, str | int | float | bool | None]:
        """All settings, for a card or a checkpoint."""
        return asdict(self)


_POSITIVE: Final = (
    "steps", "batch", "rows", "temperature", "stem", "fused", "standardise_examples",
    "learning_rate", "evaluate_every", "save_every",
)  # fmt: skip
_NOT_NEGATIVE: Final = (
    "kl_weight", "penalty", "warm_up", "weight_decay", "beta1", "beta2", "clip",
)  # fmt: skip
_CHOICES: Final = {
    "loss": LOSS_NAMES,
    "count": get_args(Counted),
    "average": get_args(Average),
    "schedule": get_args(Schedule),
}


def _check(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise InvalidRequest(f"{name} is {value!r}; it must be {wanted}")
