"""The result as text, and as one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachelink_bench.overlap.figures import TAIL_TARGET, TOTAL_TARGET, Row
from cachelink_bench.report import QUIET_LOAD, table

_HEADER: Final = (
    "handoff", "prefill ÷ link", "Mb/s", "prefill s", "link s", "translate s", "serial s",
    "streamed s", "total", "after last block", "after its entry", "speed-up",
)  # fmt: skip

LEGEND: Final = f"""\
Medians (quartiles). *prefill*, *link*: each alone, in the same round. *streamed*: begin of the prefill
to the receipt; *serial*: the same, one stage after another. *total*: (streamed − one block's link time)
÷ the slowest stage alone, at most {TOTAL_TARGET:g}. *after last block*: Installed − last block
prefilled, in blocks of link time, at most {TAIL_TARGET:g}; where the link is slower than the prefill it
still holds blocks back then, and the target is for *after its entry*, which counts from the moment at
which the last block could enter the link. The target that counts is marked *."""


def rows_text(rows: Sequence[Row]) -> str:
    """The table."""
    return table(_HEADER, [_cells(row) for row in rows])


def verdict_text(rows: Sequence[Row], load: float) -> str:
    """One line: whether the targets are met, or why nothing is said."""
    if load > QUIET_LOAD:
        return f"NOT QUIET (load average {load:.2f} at the start): no verdict"
    missed = [f"{row.case} at {row.ratio:g}" for row in rows if not row.met]
    targets = f"total ≤ {TOTAL_TARGET:g} and tail ≤ {TAIL_TARGET:g} blocks"
    return f"targets: {targets}: " + (f"MISSED by {', '.join(missed)}" if missed else "met")


def _cells(row: Row) -> tuple[str, ...]:
    spreads = row.spreads
    translate = spreads["translate_s"].median
    return (
        f"{row.case}, {row.plane}" if row.plane else row.case,
        f"{spreads['ratio'].median:.2f}",
        f"{row.rate_bits / 1e6:.1f}",
        *(f"{spreads[name].median:.3f}" for name in ("prefill_s", "link_s")),
        f"{translate:.3f}" if translate else "–",
        *(f"{spreads[name].median:.3f}" for name in ("serial_s", "total_s")),
        spreads["over_floor"].text(digits=3),
        *(
            spreads[name].text() + (" *" if name == row.target else "")
            for name in ("tail_blocks", "entry_blocks")
        ),
        spreads["speed_up"].text(),
    )
