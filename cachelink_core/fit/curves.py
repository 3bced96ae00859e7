"""The curve of a training: CSV for programs, PNG for people."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from cachelink_core.atomic_write import new_file


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation during training.

    Attributes:
        step: optimiser steps done; 0 is Ridge.
        train_loss: mean of the steps since the last point, penalty included; None at step 0.
        train_ce: cross-entropy likewise, nats a token.
        train_kl: divergence likewise.
        penalty: ``‖Δ‖² / ‖Ridge‖²`` likewise.
        gradient: norm before clipping, likewise.
        held_out_ce: on held-out examples, nats a token.
        held_out_kl: next-token KL of the native receiver to the mapped one.
        held_out_agreement: share of tokens at which both find the same token likeliest.
        learning_rate: of the last step.
    """

    step: int
    train_loss: float | None
    train_ce: float | None
    train_kl: float | None
    penalty: float | None
    gradient: float | None
    held_out_ce: float
    held_out_kl: float
    held_out_agreement: float
    learning_rate: float


NAMES = tuple(field.name for field in fields(CurvePoint))


def write_curve(path: Path, points: Sequence[CurvePoint]) -> None:
    """Writes all points to a CSV file, which it replaces."""
    with new_file(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(NAMES)
        for point in points:
            values = (getattr(point, name) for name in NAMES)
            writer.writerow(["" if value is None else f"{value:.6g}" for value in values])


def read_curve(path: Path) -> list[CurvePoint]:
    """Reads what ``write_curve`` wrote; values come back rounded to six digits."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            CurvePoint(
                step=int(row["step"]),
                **{name: float(row[name]) if row[name] else None for name in NAMES[1:]},  # type: ignore[arg-type]
            )
            for row in csv.DictReader(file)
        ]


def draw_curve(path: Path, points: Sequence[CurvePoint], title: str) -> bool:
    """Draws losses, held-out and in training, over the steps.

    Args:
        path: PNG file, replaced.
        points: at least one.
        title: above the picture.

    Returns:
        False where matplotlib is not installed: the CSV has everything.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [point.step for point in points]
    for axes, kind, name in (
        (left, "kl", "KL of native to mapped"),
        (right, "ce", "cross-entropy"),
    ):
        axes.plot(steps, [getattr(p, f"held_out_{kind}") for p in points], label="held out")
        trained = [(p.step, getattr(p, f"train_{kind}")) for p in points if p.step]
        axes.plot(*zip(*trained, strict=True), linestyle=":", label="training") if trained else None
        axes.set_xlabel("training step")
        axes.set_ylabel(f"{name} (nats a token)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    with new_file(path) as aside:
        figure.savefig(aside, dpi=150, format="png")
    return True
