"""What defines one base training."""

from __future__ import annotations

from dataclasses import dataclass

from cachelink_bench.recall_pair.models import Shape


@dataclass(frozen=True)
class BaseTraining:
    """One training run. Equal fields give equal weights on one machine and thread count.

    Attributes:
        shape: of the model.
        seed: of the initial weights and of the batches.
        steps: optimizer steps; the schedule depends on it.
        rows: documents in a batch.
        evaluate_every: steps between points of the curve.
        save_every: steps between saved states.
    """

    shape: Shape
    seed: int
    steps: int
    rows: int = 48
    evaluate_every: int = 100
    save_every: int = 100
