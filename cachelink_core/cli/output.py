"""What people and programs read: tables and text, or one JSON document on standard output.

Standard output carries results only. Progress, facts about a streamed answer and errors go to
standard error, so that a pipe gets nothing else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cachelink_core.cli.exit_codes import ExitCode, exit_code
from cachelink_core.errors import CacheLinkError, IdentityMismatch

P = ParamSpec("P")

_PIPE_COLUMNS: Final = 180
"""Width of a table that goes into a file or a pipe: none of its cells is folded."""


def console(*, stderr: bool = False) -> Console:
    """A console that colours nothing on its own and folds nothing in a pipe."""
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPE_COLUMNS
    return made


def print_json(value: object) -> None:
    """Prints one value as one indented JSON document."""
    encoded = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(encoded.decode() + "\n")
    sys.stdout.flush()


def facts(rows: Mapping[str, object]) -> Table:
    """A table of names and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def columns(*names: str) -> Table:
    """A table with a header, its cells to be added."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def megabytes(size_bytes: float) -> str:
    """Decimal megabytes, as links are rated."""
    return f"{size_bytes / 1e6:.2f} MB"


def seconds(duration_s: float) -> str:
    """Seconds with what a person can use of them."""
    return f"{duration_s:.3f} s"


def error_document(error: CacheLinkError) -> dict[str, Any]:
    """An error as a program reads it."""
    diffs = error.diffs if isinstance(error, IdentityMismatch) else ()
    return {
        "error": {
            "reason": error.reason,
            "message": str(error),
            "retryable": error.retryable,
            "diffs": [{"field": d.field, "ours": d.ours, "theirs": d.theirs} for d in diffs],
        }
    }


def show_error(error: CacheLinkError, *, as_json: bool) -> None:
    """One line on standard error, and the document on standard output where JSON is asked for."""
    if as_json:
        print_json(error_document(error))
    line = " ".join(str(error).split())
    sys.stderr.write(f"cachelink: {error.reason}: {line}\n")


def reporting(function: Callable[P, None]) -> Callable[P, None]:
    """Makes a command exit with the code of its error instead of raising it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except CacheLinkError as error:
            show_error(error, as_json=bool(kwargs.get("json_output")))
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    return run
