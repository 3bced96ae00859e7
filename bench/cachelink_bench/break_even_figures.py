"""Draws the break-even figures: for print in two columns, and for eyes that do not tell all colours.

Colours are those of Okabe and Ito; every representation also has a marker of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from cachelink_bench.break_even_model import FAST_GBIT, BreakEven
from cachelink_bench.two_node.plan import TEXT
from cachelink_bench.two_node.results import Results
from cachelink_bench.two_node.tables import label

WIDTH_IN: Final = 7.2
"""Of a page's text."""

_STYLE: Final[dict[str, tuple[str, str]]] = {
    TEXT: ("#000000", "o"),
    "native": ("#0072B2", "s"),
    "native+zstd": ("#56B4E9", "D"),
    "int8": ("#E69F00", "^"),
    "int8+zstd": ("#F0E442", "<"),
    "int4": ("#009E73", "v"),
    "int4+zstd": ("#CC79A7", "P"),
}
_OTHER: Final = ("#D55E00", "X")
_GREY: Final = "#808080"

_RC: Final[Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "cachelink",
}


def draw_break_even(results: Results, found: BreakEven, base: Path) -> tuple[Path, Path]:
    """Draws round trips measured, and transfer against prefill computed.

    Args:
        results: of the benchmark.
        found: worked out of it.
        base: path without its ending.

    Returns:
        The PNG and the PDF.
    """
    with _figure(3.5) as figure:
        left, right = figure.subplots(1, 2)
        _draw_round_trips(left, results)
        _draw_transfers(right, results, found)
        return _save(figure, base)


def draw_amortised(results: Results, found: BreakEven, base: Path) -> tuple[Path, Path]:
    """Draws the cost of a question against how many are asked.

    Args:
        results: of the benchmark.
        found: worked out of it.
        base: path without its ending.

    Returns:
        The PNG and the PDF.
    """
    with _figure(3.2) as figure:
        axes = figure.subplots()
        _draw_amortised(axes, results, found)
        return _save(figure, base)


def _draw_round_trips(axes: Axes, results: Results) -> None:
    for name in results.config.representations:
        rows = [row for row in results.rows_of() if row.representation == name]
        if not rows:
            continue
        spreads = [row.metrics["round_trip_s"] for row in rows]
        colour, marker = _style(name)
        axes.errorbar(
            [row.tokens for row in rows],
            [s.median for s in spreads],
            yerr=[[s.median - s.p25 for s in spreads], [s.p75 - s.median for s in spreads]],
            color=colour,
            marker=marker,
            capsize=2,
            elinewidth=0.8,
            label=label(name, results),
        )
    own = results.prefills_of()
    axes.errorbar(
        [item.tokens for item in own],
        [item.seconds.median for item in own],
        yerr=[
            [item.seconds.median - item.seconds.p25 for item in own],
            [item.seconds.p75 - item.seconds.median for item in own],
        ],
        color=_GREY,
        linewidth=2.5,
        alpha=0.6,
        capsize=2,
        label="sender's own prefill",
        zorder=1,
    )
    axes.set(xscale="log", yscale="log", xlabel="prefix (tokens)", ylabel="round trip (s)")
    axes.set_title(f"Measured: request to token {results.config.decode}", loc="left")
    ticks = [(item.tokens, f"{item.tokens:.0f}\n{item.context}") for item in own]
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    _plain(axes.yaxis, fine=True)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.55)  # the legend lies above the curves
    axes.legend(loc="upper left", ncol=2, frameon=False, columnspacing=1.0, handlelength=1.8)


def _draw_transfers(axes: Axes, results: Results, found: BreakEven) -> None:
    most = 2.0 * max(row.tokens for row in results.rows)
    crossings = [
        at
        for line in found.lines.values()
        for rate in (found.gbit_per_s, FAST_GBIT)
        if (at := line.crossing(found.prefill, rate)) is not None and at <= most
    ]
    least = min([1.0, *(at / 2 for at in crossings)])
    places = [least * (most / least) ** (step / 200) for step in range(201)]
    curve = found.prefill
    axes.plot(
        places, [curve.seconds(n) for n in places], color="#000000", linewidth=2.0,
        label=f"remote prefill, {1e3 * curve.seconds(most / 2) / (most / 2):.2g} ms/token at {found.context}",
    )  # fmt: skip
    read = [row for row in results.rows if row.representation == TEXT]
    axes.plot(
        [row.tokens for row in read],
        [row.metrics["remote_prefill_s"].median for row in read],
        color="#000000", marker="o", linestyle="none",
    )  # fmt: skip
    for name in found.lines:
        _draw_line(axes, results, found, name, places)
    axes.set(xscale="log", yscale="log", xlabel="prefix (tokens)", ylabel="time (s)")
    axes.set_title("Computed: transfer against remote prefill", loc="left")
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.45)
    axes.legend(
        loc="upper left", frameon=False, handlelength=1.8,
        title=(
            f"solid {found.gbit_per_s:.2g} Gb/s as measured, dashed {FAST_GBIT:g} Gb/s,\n"
            "markers measured; moving wins from … / … tokens:"
        ), title_fontsize=7, alignment="left",
    )  # fmt: skip


def _draw_line(
    axes: Axes, results: Results, found: BreakEven, name: str, places: list[float]
) -> None:
    line, curve = found.lines[name], found.prefill
    colour, marker = _style(name)
    texts: list[str] = []
    for rate, dashes in ((found.gbit_per_s, "-"), (FAST_GBIT, (0, (4, 2)))):
        axes.plot(
            places, [line.seconds(n, rate) for n in places], color=colour, linestyle=dashes,
            linewidth=1.0,
        )  # fmt: skip
        at = line.crossing(curve, rate)
        inside = at is not None and at <= places[-1]
        texts.append(f"{math.ceil(at):,}" if at is not None and inside else "never")
        if at is not None and inside:
            axes.plot(
                at, curve.seconds(at), marker="o", markersize=5.5 if dashes == "-" else 2.5,
                markerfacecolor="white" if dashes == "-" else colour, markeredgecolor=colour, markeredgewidth=1.2, zorder=5,
            )  # fmt: skip
    rows = [row for row in results.rows_of() if row.representation == name]
    axes.plot(
        [row.tokens for row in rows],
        [row.metrics["handoff_s"].median for row in rows],
        color=colour, marker=marker, linestyle="none", markersize=3.5,
    )  # fmt: skip
    axes.plot(
        [], [], color=colour, marker=marker, label=f"{label(name, results)}: {' / '.join(texts)}"
    )


def _draw_amortised(axes: Axes, results: Results, found: BreakEven) -> None:
    any_one = next(iter(found.amortised.values()))
    most = max(32.0, 2 * max(item.break_even for item in found.amortised.values()))
    places = [most ** (step / 200) for step in range(201)]
    axes.axhline(
        any_one.read_s, color="#000000", linewidth=2.0, label="text, read for each question"
    )
    axes.plot(
        places, [any_one.kept_s(n) for n in places], color=_GREY, linestyle=":",
        label="text, read once and kept by the receiver",
    )  # fmt: skip
    axes.plot(
        places, [any_one.move_s / n + any_one.question_s for n in places], color=_GREY,
        linestyle=(0, (4, 2)), label=f"{label(any_one.representation, results)}, built for other use",
    )  # fmt: skip
    for number, (name, item) in enumerate(found.amortised.items()):
        colour, marker = _style(name)
        axes.plot(
            places, [item.moved_s(n) for n in places], color=colour, marker=marker, markevery=(6 * number, 40),
            label=f"{label(name, results)}: N = {item.break_even:.2f}, pays from {item.pays_from}",
        )  # fmt: skip
        if 1 <= item.break_even <= most:
            axes.plot(
                item.break_even, item.read_s, marker="o", markersize=6, markerfacecolor="white",
                markeredgecolor=colour, markeredgewidth=1.2, zorder=5,
            )  # fmt: skip
    axes.set(xscale="log", xlim=(0.95, 1.02 * most), ylim=(0, None))
    axes.set(xlabel="questions about one document, N", ylabel="time per question (s)")
    axes.set_title(
        f"{found.context}: build and move once, then ask N times (break-even circled)", loc="left"
    )
    doubled = [2**power for power in range(1 + int(math.log2(most)))]
    axes.set_xticks(doubled, [str(n) for n in doubled])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _style(name: str) -> tuple[str, str]:
    return _STYLE.get(name, _OTHER)


def _plain(axis: Any, *, fine: bool = False) -> None:
    """Numbers as people write them on a logarithmic axis; ``fine`` also labels 2 and 5."""
    write: Callable[[float, float | None], str] = lambda value, _at: f"{value:,g}"  # noqa: E731
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if fine else (1.0,), numticks=30))
    axis.set_major_formatter(FuncFormatter(write))
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def _figure(height_in: float) -> Iterator[Figure]:
    with mpl.rc_context(_RC):
        yield Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def _save(figure: Figure, base: Path) -> tuple[Path, Path]:
    """Without dates, so that the same result gives the same files."""
    base.parent.mkdir(parents=True, exist_ok=True)
    png, pdf = (base.with_name(f"{base.name}.{kind}") for kind in ("png", "pdf"))
    figure.savefig(png, dpi=200, metadata={"Software": None})
    figure.savefig(pdf, metadata={"CreationDate": None})
    return png, pdf
