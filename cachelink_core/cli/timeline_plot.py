"""The picture of one handoff: a row for each stage, a bar for each block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachelink_core.cli.timeline_spans import STAGES, Side, Span, Spans, Stage, make_spans
from cachelink_core.errors import ConfigError, InvalidRequest
from cachelink_core.rpc.types import Receipt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT: Final = 0.72
_LEAST_LABEL: Final = 0.018
"""Share of the width below which a bar has no number in it."""

_LEAST_BAR: Final = 0.003
"""Share of the width below which a bar is drawn wider than it is, so that it can be seen."""

_LABELS: Final[dict[Stage, str]] = {"verify": "receive,\nverify"}
"""Rows whose stage waits for the bytes as well."""

_COLOURS: Final = "cividis"
"""From dark to light for every reader, with colours or without."""


def draw_timeline(receipt: Receipt, file: Path) -> None:
    """Draws both sides above each other, each on its own clock.

    Raises:
        ConfigError: matplotlib is not installed.
        InvalidRequest: the receipt has no whole timeline, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install 'cachelink[bench]'") from error
    spans = make_spans(receipt)
    rows = [len(stages) for stages in STAGES.values()]
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, height_ratios=rows)
    for axes, side in zip(panels, STAGES, strict=True):
        _draw_side(axes, side, spans)
    title = (
        f"{receipt.tokens} tokens in {spans.blocks} blocks, {receipt.codec}, "
        f"{receipt.wire_bytes / 1e6:.1f} MB: last block prefilled to receipt "
        f"{_tail_text(spans)}"
    )
    panels[0].set_title(title, loc="left", fontsize=10)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--png {str(file)!r} cannot be written: {error}") from error


def _draw_side(axes: Axes, side: Side, spans: Spans) -> None:
    from matplotlib import colormaps

    shades = colormaps[_COLOURS]
    width_s = spans.last_s - spans.first_s
    stages = STAGES[side]
    for row, stage in enumerate(stages):
        for span in spans.stages[stage]:
            # The lightest shade of all is hard to see on white.
            shade = shades(0.92 * span.block / max(1, spans.blocks - 1))
            _draw_bar(axes, row, span, shade, width_s)
    if side == "sender":
        _draw_receipt(axes, stages.index("send"), spans)
    axes.axvline(0.0, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks(range(len(stages)), [_LABELS.get(stage, stage) for stage in stages])
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlim(spans.first_s - 0.01 * width_s, spans.last_s + 0.01 * width_s)
    axes.set_xlabel(f"seconds since the reply to Reserve, {side}'s clock")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)


def _draw_bar(axes: Axes, row: int, span: Span, shade: tuple[float, ...], width_s: float) -> None:
    seconds = span.end_s - span.begin_s
    drawn = max(seconds, _LEAST_BAR * width_s)
    left = span.end_s - drawn
    # A white edge keeps neighbours apart, and would hide a bar that is hardly wider.
    edge = "white" if seconds > _LEAST_LABEL * width_s else "none"
    axes.barh(row, drawn, _HEIGHT, left, color=shade, edgecolor=edge, linewidth=0.4)
    if seconds > _LEAST_LABEL * width_s:
        luminance = 0.30 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2]
        axes.text(
            span.begin_s + seconds / 2, row, str(span.block),
            ha="center", va="center", fontsize=7, color="white" if luminance < 0.5 else "black",
        )  # fmt: skip


def _draw_receipt(axes: Axes, row: int, spans: Spans) -> None:
    """From the last frame to the receipt: what the sender still waits for."""
    wait = spans.receipt
    axes.barh(
        row, wait.end_s - wait.begin_s, _HEIGHT, wait.begin_s,
        facecolor="white", edgecolor="0.25", hatch="////", linewidth=0.8,
    )  # fmt: skip
    axes.annotate(
        "receipt", (wait.end_s, row + _HEIGHT / 2), xytext=(0, -3), textcoords="offset points",
        ha="right", va="top", fontsize=7,
    )  # fmt: skip


def _tail_text(spans: Spans) -> str:
    seconds = spans.receipt.end_s - spans.stages["prefill"][-1].end_s
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
