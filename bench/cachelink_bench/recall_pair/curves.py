"""Training curves of the base models as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachelink_bench.recall_pair.recall import FACT_COUNTS

FIELDS = (
    "step",
    "facts",
    "loss",
    "copy_recall",
    *(f"recall_{facts}" for facts in FACT_COUNTS),
)


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation during training.

    Attributes:
        step: training steps done.
        facts: per document in the curriculum at that step.
        loss: mean loss of the fact batches since the last point, nats per answer.
        copy_recall: mean share of right predictions in the second copies of repeated sequences
            since the last point: it rises when induction heads form.
        recalls: held-out recall by facts per document.
    """

    step: int
    facts: int
    loss: float
    copy_recall: float
    recalls: Mapping[int, float]


def write_curves(path: Path, points: list[CurvePoint]) -> None:
    """Writes all points to a CSV file, which it replaces."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for point in points:
            recalls = [f"{point.recalls[facts]:.4f}" for facts in FACT_COUNTS]
            means = [f"{point.loss:.4f}", f"{point.copy_recall:.4f}"]
            writer.writerow([point.step, point.facts, *means, *recalls])


def read_curves(path: Path) -> list[CurvePoint]:
    """Reads what ``write_curves`` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            CurvePoint(
                step=int(row["step"]),
                facts=int(row["facts"]),
                loss=float(row["loss"]),
                copy_recall=float(row["copy_recall"]),
                recalls={facts: float(row[f"recall_{facts}"]) for facts in FACT_COUNTS},
            )
            for row in csv.DictReader(file)
        ]
