"""What every benchmark's output has in common: places, how busy the machine was, tables, verdicts."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from cachelink_core.atomic_write import new_file
from cachelink_core.errors import ConfigError

QUIET_LOAD: Final = 0.5
"""Load average above which a run is marked: its ratios count, its times do not."""

PLACE_OPTIONS: Final = ("--cache-dir", "--json", "--markdown", "--timeline")
"""They say where files lie: nothing about the result, and often paths of this machine."""


class Report:
    """Lines that are printed as they come, and kept for ``--markdown``.

    Attributes:
        lines: so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "") -> None:
        """Prints and keeps a text."""
        print(text, flush=True)
        self.lines.append(text)

    def write(self, path: Path | None, title: str, date: str, command: str) -> None:
        """Writes the lines behind a heading with date and command; nothing without a path."""
        if path is not None:
            head = f"# {title}\n\n{date}, `{command}`\n"
            path.write_text("\n".join([head, *self.lines]) + "\n", encoding="utf-8")


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def load_text(load: float) -> str:
    """One line on how far the times can be trusted."""
    if load > QUIET_LOAD:
        return f"NOT QUIET: load average {load:.2f} at the start; trust the ratios, not the times"
    return f"quiet: load average {load:.2f} at the start"


def no_verdict(load: float, *, smoke: bool) -> str:
    """Why a run says nothing about targets; empty if it does.

    Args:
        load: average at the start.
        smoke: whether it was one of few and small rounds.
    """
    if smoke:
        return "a smoke run"
    return f"NOT QUIET, load average {load:.2f}" if load > QUIET_LOAD else ""


def strict_status(benchmark: str, met: Iterable[bool | None], why: str = "") -> int:
    """Exit status with ``--strict``: 0 only if there are targets and all of them were met.

    Otherwise standard error has the reason.

    Args:
        benchmark: its name.
        met: of each target; None where nothing was judged.
        why: nothing was judged.
    """
    found = list(met)
    missed = found.count(False)
    if missed:
        reason = f"{missed} of {len(found)} targets missed"
    elif not found or None in found:
        reason = f"no verdict: {why or 'not everything was judged'}"
    else:
        return 0
    print(f"cachelink-bench {benchmark}: --strict: {reason}", file=sys.stderr)
    return 1


def date_text() -> str:
    """This minute, UTC, as result files have it."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def command_line(benchmark: str, argv: Sequence[str]) -> str:
    """What makes the same runs: the options that were given, less those of places.

    Of an absolute path, such as a model's folder, only the last name is left.

    Args:
        benchmark: its name.
        argv: its arguments. Its parser must not take abbreviated options.
    """
    words, given = ["cachelink-bench", benchmark], iter(argv)
    for word in given:
        option, equals, _ = word.partition("=")
        if option not in PLACE_OPTIONS:
            words.append(_shortened(word))
        elif not equals:
            next(given, None)
    return shlex.join(words)


def add_result_options(parser: argparse.ArgumentParser, *, smoke: str) -> None:
    """Adds what every benchmark with targets has: ``--smoke``, ``--strict``, ``--json``, ``--markdown``.

    Args:
        parser: of the benchmark.
        smoke: what a smoke run is.
    """
    parser.add_argument("--smoke", action="store_true", help=smoke)
    parser.add_argument("--strict", action="store_true", help="exit 1 unless every target is met")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report")


def settings(options: argparse.Namespace) -> dict[str, object]:
    """Resolved options as plain data for a result file, less those of places."""
    places = {option.removeprefix("--").replace("-", "_") for option in PLACE_OPTIONS}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in places
    }


def check_places(*places: Path | None) -> None:
    """Makes sure that results can be written, before anything is measured.

    Args:
        places: files to be; None for an option that was not given.

    Raises:
        ConfigError: one cannot be written.
    """
    for place in filter(None, places):
        try:
            try:
                place.open("xb").close()
            except FileExistsError:
                place.open("ab").close()
            else:
                place.unlink()
        except OSError as error:
            raise ConfigError(f"{place} cannot be written: {error.strerror}") from error


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads as well in a terminal."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join((first, *rest)) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join((line(header), line(rule), *(line(row) for row in rows)))


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Writes a result file."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_result(path: Path, result: msgspec.Struct) -> None:
    """Writes a result file of fixed fields, whole or not at all."""
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    with new_file(path) as aside:
        aside.write_bytes(encoded + b"\n")


def without_folder(value: str) -> str:
    """A value as it is; of an absolute path the last name alone."""
    return Path(value).name if value.startswith("/") else value


def _shortened(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{without_folder(value)}"
