"""``cachelink timeline``: a handoff's receipt as a trace for viewers, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cachelink_core.atomic_write import new_file
from cachelink_core.cli.output import console, reporting
from cachelink_core.cli.sources import read_text
from cachelink_core.cli.timeline_trace import make_trace
from cachelink_core.errors import InvalidRequest
from cachelink_core.rpc.types import Receipt


@reporting
def timeline(
    receipt: Annotated[
        str, typer.Argument(metavar="FILE|-", help="What handoff --json printed; - is stdin.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Trace events, for ui.perfetto.dev."),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE.png", help="A picture.")] = None,
) -> None:
    """Show when each block of a handoff passed each stage, and how the stages overlap."""
    if trace is None and png is None:
        raise InvalidRequest("give --trace FILE.json, --png FILE.png or both")
    found = read_receipt(read_text(receipt))
    if trace is not None:
        write_trace(found, trace)
    if png is not None:
        from cachelink_core.cli.timeline_plot import draw_timeline

        draw_timeline(found, png)
    blocks = len(found.timeline.prefilled_at_s)
    written = ", ".join(str(path) for path in (trace, png) if path is not None)
    console().print(f"{blocks} blocks in {written}")


def read_receipt(text: str) -> Receipt:
    """A receipt from its JSON document.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return msgspec.json.decode(text, type=Receipt)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"receipt: not what handoff --json prints: {error}") from error


def write_trace(receipt: Receipt, file: Path) -> None:
    """Writes the trace of a handoff.

    Raises:
        InvalidRequest: it has no whole timeline, or the file cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(make_trace(receipt)), indent=1) + b"\n"
    try:
        with new_file(file) as aside:
            aside.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"--trace {str(file)!r} cannot be written: {error}") from error
