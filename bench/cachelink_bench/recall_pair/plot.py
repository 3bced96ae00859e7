"""Training curves of the base models as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure

from cachelink_bench.recall_pair.curves import CurvePoint, read_curves
from cachelink_bench.recall_pair.recall import FACT_COUNTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = ("#0072b2", "#e69f00", "#009e73")
"""Of 8, 16 and 32 facts; told apart by readers who do not see all colours."""
COPY_COLOUR: Final = "#777777"


def plot_curves(curves: Mapping[str, Sequence[Path]], out: Path) -> None:
    """Draws recall (above) and loss (below) over the steps, one column for each model.

    Args:
        curves: name of the model to its CSV files; the first is drawn in full, the others thin.
        out: PNG file, replaced.
    """
    figure = Figure(figsize=(5.2 * len(curves), 6.0), layout="constrained")
    axes = figure.subplots(2, len(curves), sharex="col", sharey="row", squeeze=False)
    for column, (model, paths) in enumerate(curves.items()):
        for rank, path in enumerate(paths):
            points = read_curves(path)
            _draw_recall(axes[0][column], points, main=rank == 0)
            _draw_loss(axes[1][column], points, main=rank == 0)
        others = f", and {len(paths) - 1} more seeds (thin)" if len(paths) > 1 else ""
        axes[0][column].set_title(f"{model}{others}")
        axes[1][column].set_xlabel("training step")
    axes[0][0].set_ylabel("share of right answers")
    axes[1][0].set_ylabel("loss (nats): answers + 0.05 × text")
    axes[0][0].legend(loc="center right", fontsize="small", title="held-out, facts a document")
    figure.savefig(out, dpi=150)


def _draw_recall(axes: Axes, points: list[CurvePoint], *, main: bool) -> None:
    steps = [point.step for point in points]
    for facts, colour in zip(FACT_COUNTS, COLOURS, strict=True):
        recalls = [point.recalls[facts] for point in points]
        axes.plot(
            steps, recalls, color=colour, label=_label(main, f"{facts} facts"), **_style(main)
        )
    if main:
        copies = [point.copy_recall for point in points]
        label = "copies, in training"
        axes.plot(steps, copies, color=COPY_COLOUR, linestyle=":", label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)


def _draw_loss(axes: Axes, points: list[CurvePoint], *, main: bool) -> None:
    steps, losses = [point.step for point in points], [point.loss for point in points]
    axes.plot(steps, losses, color="black", **_style(main))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _label(main: bool, text: str) -> str | None:
    return text if main else None


def _style(main: bool) -> dict[str, Any]:
    return {"linewidth": 1.8, "alpha": 1.0} if main else {"linewidth": 0.8, "alpha": 0.6}
