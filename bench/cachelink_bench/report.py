"""What every benchmark's output has in common: how busy the machine was, tables, one JSON line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cachelink_core.errors import ConfigError

QUIET_LOAD: Final = 0.5
"""Load average above which a run is marked: its ratios count, its times do not."""


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def load_text(load: float) -> str:
    """One line on how far the times can be trusted."""
    if load > QUIET_LOAD:
        return f"NOT QUIET: load average {load:.2f} at the start; trust the ratios, not the times"
    return f"quiet: load average {load:.2f} at the start"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads as well in a terminal."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join((first, *rest)) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join((line(header), line(rule), *(line(row) for row in rows)))


def write_json(path: Path, document: dict[str, object]) -> None:
    """Writes a result file."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def check_place(folder: Path, said: str) -> None:
    """Finds out now whether a folder could be made, without making it.

    Args:
        folder: to be written to.
        said: the option that names it or a file in it, with its value.

    Raises:
        ConfigError: it cannot be written.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written" if there.is_dir() else "is no folder"
        raise ConfigError(f"{said}: {str(there)!r} {what}")
