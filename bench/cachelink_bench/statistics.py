"""Few runs, summed up without pretending: median, quartiles, and every run beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample.

    Attributes:
        median: of the runs.
        p25: lower quartile.
        p75: upper quartile.
        runs: every value, in the order in which it was measured.
    """

    median: float
    p25: float
    p75: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sums up at least one value; the quartiles are interpolated between runs."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], tuple(values))
        p25, median, p75 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, p25, p75, tuple(values))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """``median (p25–p75)``, each times ``scale``."""
        middle, low, high = (f"{scale * v:.{digits}f}" for v in (self.median, self.p25, self.p75))
        return f"{middle} ({low}–{high})"


def ratios(values: Sequence[float], references: Sequence[float]) -> Spread:
    """The spread of ``value / reference`` of the same round: what a busy machine leaves comparable."""
    return Spread.of([a / b for a, b in zip(values, references, strict=True)])
