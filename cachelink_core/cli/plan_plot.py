"""The picture of a plan: time to the first token against the length of the prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cachelink_core.errors import ConfigError, InvalidRequest
from cachelink_core.planner import TEXT, Job, Way, predict

if TYPE_CHECKING:
    from cachelink_core.cli.plan_sources import Source

_COLOURS: Final = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#b2df8a",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#999",
)
"""Told apart by readers who do not see all colours; the dashes of packed codecs help."""

_POINTS: Final = 48
_SHORTEST: Final = 64


class Row(Protocol):
    """Where a way begins to gain."""

    @property
    def way(self) -> str:
        """Its name."""

    @property
    def crossover_tokens(self) -> int | None:
        """The shortest prefix that gains."""


def draw(source: Source, job: Job, rows: Sequence[Row], file: Path) -> None:
    """Draws every way for lengths around the job's, crossings marked.

    Raises:
        ConfigError: matplotlib is not installed.
        InvalidRequest: the file cannot be written, or its ending names no kind of picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install 'cachelink[bench]'") from error
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = _lengths(job.tokens)
    crossings = {row.way: row.crossover_tokens for row in rows}
    for way, colour in zip((TEXT, *source.ways), ("black", *_COLOURS), strict=False):
        times = [_first_token_s(way, source, job, length) for length in lengths]
        shown = [(n, t) for n, t in zip(lengths, times, strict=True) if t is not None]
        if not shown:
            continue
        dash = "--" if way.codec.endswith("+zstd") else "-"
        axes.plot(*zip(*shown, strict=True), dash, color=colour, label=way.name, linewidth=1.5)
        at = crossings.get(way.name)
        value = None if at is None else _first_token_s(way, source, job, at)
        if at is not None and value is not None and lengths[0] <= at <= lengths[-1]:
            axes.plot([at], [value], "o", color=colour, markersize=6)
    axes.set(xscale="log", yscale="log", xlabel="prefix (tokens)", ylabel="first token (s)")
    rate = source.measures.link.bytes_per_s * 8 / 1e9
    axes.set_title(f"link {rate:.3g} Gbit/s; a dot is where a transfer begins to gain")
    axes.axvline(job.tokens, color="0.8", linewidth=1.0, zorder=0)
    axes.grid(visible=True, which="major", color="0.9")
    axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"plot {str(file)!r} cannot be written: {error}") from error


def _lengths(tokens: int) -> list[int]:
    """From short ones to four times ``tokens``, evenly on a logarithmic axis."""
    longest = max(4 * tokens, 16 * _SHORTEST)
    ratio = (longest / _SHORTEST) ** (1 / (_POINTS - 1))
    return sorted({round(_SHORTEST * ratio**step) for step in range(_POINTS)})


def _first_token_s(way: Way, source: Source, job: Job, tokens: int) -> float | None:
    held = tokens if job.held_tokens else 0
    sized = msgspec.structs.replace(job, tokens=tokens, held_tokens=held)
    return predict(way, sized, source.measures).first_token_s
