"""The result as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cachelink_bench.overlap.figures import TAIL_TARGET, TOTAL_TARGET, Row, Verdict
from cachelink_bench.report import table

_HEADER: Final = (
    "handoff", "prefill ÷ link", "Mb/s", "prefill s", "link s", "translate s", "serial s",
    "streamed s", "total", "after last block", "after its entry", "speed-up",
)  # fmt: skip

LEGEND: Final = f"""\
Medians (quartiles). *prefill*, *link*: each alone, in the same round. *streamed*: begin of the prefill
to the receipt; *serial*: the same, one stage after another. *total*: (streamed − one block's link time)
÷ the slowest stage alone, at most {TOTAL_TARGET:g}. *after last block*: Installed − last block
prefilled, in blocks of link time, at most {TAIL_TARGET:g}. *after its entry*: the same from the moment at
which the last block could enter the link, all blocks before it through, at most {TAIL_TARGET:g}. A link
that was made slower than the prefill still holds blocks back when the last one is prefilled: there only
the latter counts. Targets that count are marked *."""

_WORDS: Final = {
    "over_floor": "(total − a block) ÷ slowest stage",
    "tail_blocks": "blocks after the last one was prefilled",
    "entry_blocks": "blocks after the last one could enter the link",
}


def rows_text(rows: Sequence[Row]) -> str:
    """The table."""
    return table(_HEADER, [_cells(row) for row in rows])


def verdicts_text(verdicts: Sequence[Verdict], why: str) -> str:
    """A line each.

    Args:
        verdicts: of all rows.
        why: there is no verdict; empty if there is one.
    """
    return "\n".join(_line(verdict, why) for verdict in verdicts)


def _line(verdict: Verdict, why: str) -> str:
    word = f"no verdict: {why}" if why else "met" if verdict.met else "MISSED"
    rest = "" if verdict.applies else ", does not count: the link is slower than the prefill"
    return (
        f"{verdict.case} at {verdict.ratio:g}: {_WORDS[verdict.figure]}: {verdict.value:.3f}, "
        f"target at most {verdict.target:g}: {word}{rest}"
    )


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
        *(
            spreads[name].text(digits=digits) + (" *" if name in row.applying else "")
            for name, digits in (("over_floor", 3), ("tail_blocks", 2), ("entry_blocks", 2))
        ),
        spreads["speed_up"].text(),
    )
