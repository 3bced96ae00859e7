"""What a round says: how much of the ideal pipeline's time was reached.

Stages of a handoff, block by block: prefill, link, and for another model's cache the receiver's
translation. An ideal pipeline takes as long as its slowest stage and one block more.

All times are seconds on the sender's clock, counted from the reply to Reserve; the receiver's only
share is the receipt, whose arrival ends the handoff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from cachelink_bench.overlap.task import Run
from cachelink_bench.statistics import Spread
from cachelink_core.errors import InternalError
from cachelink_core.rpc.types import Receipt

TAIL_TARGET: Final = 2.0
"""Blocks of link time to Installed, from the last block's prefill and from its entry, at most."""

TOTAL_TARGET: Final = 1.05
"""Total less one block, over the slowest stage alone, at most."""

TARGETS: Final = {
    "over_floor": TOTAL_TARGET,
    "tail_blocks": TAIL_TARGET,
    "entry_blocks": TAIL_TARGET,
}
"""By name of a figure."""


class Figures(msgspec.Struct, frozen=True):
    """One handoff beside its stages alone.

    Attributes:
        prefill_s: alone: first to last block.
        link_s: alone: reply to Reserve to receipt, for a cache that was there.
        translate_s: verifying, decoding and translating at the receiver, in the same handoff; 0 for
            the same model.
        block_s: one block's share of ``link_s``.
        total_s: begin of the prefill to the receipt.
        serial_s: the same, one stage after another.
        after_prefill_s: last block prefilled to the receipt.
        after_entry_s: the same from the moment at which the last block could enter the link: that
            at which all blocks before it were through.
    """

    prefill_s: float
    link_s: float
    translate_s: float
    block_s: float
    total_s: float
    serial_s: float
    after_prefill_s: float
    after_entry_s: float

    @property
    def ratio(self) -> float:
        """Prefill over link: above 1 the link is the faster one."""
        return self.prefill_s / self.link_s

    @property
    def floor_s(self) -> float:
        """The slowest stage alone."""
        return max(self.prefill_s, self.link_s, self.translate_s)

    @property
    def over_floor(self) -> float:
        """Total less one block, over the slowest stage: at best 1."""
        return (self.total_s - self.block_s) / self.floor_s

    @property
    def tail_blocks(self) -> float:
        """From the last block's prefill to Installed, in blocks of link time."""
        return self.after_prefill_s / self.block_s

    @property
    def entry_blocks(self) -> float:
        """The same without what a slower link still held back: at best 1."""
        return self.after_entry_s / self.block_s

    @property
    def speed_up(self) -> float:
        """Over one stage after another."""
        return self.serial_s / self.total_s


class Row(msgspec.Struct, frozen=True):
    """One case at one ratio; the figures are those of single rounds, summed up.

    Attributes:
        case: its name.
        ratio: aimed at.
        rate_bits: of the shaper.
        wire_bytes: of the payload.
        plane: data plane that carried it.
        spreads: by name of a field or property of ``Figures``.
    """

    case: str
    ratio: float
    rate_bits: int
    wire_bytes: int
    plane: str
    spreads: dict[str, Spread]

    @property
    def applying(self) -> tuple[str, ...]:
        """Figures whose targets count.

        A link that was made slower than the prefill holds blocks back that were prefilled long ago,
        which no pipeline can help. It goes by the ratio aimed at: at 1 the measured one is noise.
        """
        return ("over_floor", "entry_blocks") if self.ratio < 1 else tuple(TARGETS)


class Verdict(msgspec.Struct, frozen=True):
    """One figure beside its target.

    Attributes:
        case: of the row.
        ratio: of the row.
        figure: its name in ``Row.spreads``.
        value: median.
        target: at most.
        applies: whether the target counts at this ratio.
        met: whether it is; None without a verdict.
    """

    case: str
    ratio: float
    figure: str
    value: float
    target: float
    applies: bool
    met: bool | None


SUMMED: Final = (
    "prefill_s", "link_s", "translate_s", "block_s", "total_s", "serial_s", "ratio", "floor_s",
    "over_floor", "tail_blocks", "entry_blocks", "speed_up",
)  # fmt: skip


def make_rows(runs: Iterable[Run], mapped: Sequence[str]) -> tuple[Row, ...]:
    """Sums every case and ratio up, in the order in which they came first.

    Args:
        runs: of all rounds.
        mapped: names of the cases whose caches are translated.
    """
    cells: dict[tuple[str, float], dict[int, dict[str, Run]]] = {}
    for run in runs:
        cells.setdefault((run.case, run.ratio), {}).setdefault(run.round, {})[run.way] = run
    rows = []
    for (case, ratio), rounds in sorted(cells.items(), key=lambda cell: _place(cell[0], cells)):
        found = [figures(ways, mapped=case in mapped) for ways in rounds.values()]
        spreads = {name: Spread.of([getattr(f, name) for f in found]) for name in SUMMED}
        moved = next(iter(rounds.values()))["link"]
        rows.append(
            Row(
                case=case,
                ratio=ratio,
                rate_bits=moved.rate_bits,
                wire_bytes=moved.receipt.wire_bytes,
                plane=moved.receipt.data_plane,
                spreads=spreads,
            )
        )
    return tuple(rows)


def make_verdicts(rows: Iterable[Row], why: str) -> tuple[Verdict, ...]:
    """Every figure that has a target, of every row.

    Args:
        rows: summed up.
        why: there is no verdict; empty if there is one.
    """
    return tuple(
        Verdict(
            case=row.case,
            ratio=row.ratio,
            figure=name,
            value=row.spreads[name].median,
            target=target,
            applies=name in row.applying,
            met=None if why else row.spreads[name].median <= target,
        )
        for row in rows
        for name, target in TARGETS.items()
    )


def figures(ways: dict[str, Run], *, mapped: bool) -> Figures:
    """Of one round.

    Args:
        ways: its runs, all four.
        mapped: whether the receiver translates.
    """
    alone, link, streamed = (ways[way].receipt for way in ("prefill", "link", "overlap"))
    link_s, ready_s = link.phases["push"], streamed.timeline.prefilled_at_s
    block_s = link_s / len(ready_s)
    received_s = streamed.phases["push"]
    return Figures(
        prefill_s=alone.phases["prefill"],
        link_s=link_s,
        translate_s=link.phases["load_busy"] + link.phases["transform"] if mapped else 0.0,
        block_s=block_s,
        total_s=total_s(streamed),
        serial_s=total_s(ways["serial"].receipt),
        after_prefill_s=received_s - ready_s[-1],
        after_entry_s=received_s - max(ready_s[-1], _through_s(ready_s[:-1], block_s)),
    )


def total_s(receipt: Receipt) -> float:
    """From the begin of the prefill, which may be before Reserve, to the receipt.

    Raises:
        InternalError: it has no timeline.
    """
    ready_s = receipt.timeline.prefilled_at_s
    if not ready_s:
        raise InternalError(f"receipt of {receipt.handoff_id!r}: no timeline")
    return receipt.phases["push"] - ready_s[-1] + receipt.phases["prefill"]


def typical(runs: Iterable[Run], ratio: float = 1.0) -> Receipt:
    """The receipt of the overlapping handoff that stands for the others.

    It is the median by total (the lower one of two) of the first case's.

    Args:
        runs: of all rounds.
        ratio: the nearest one there is counts.
    """
    streamed = [run for run in runs if run.way == "overlap"]
    first = [run for run in streamed if run.case == streamed[0].case]
    nearest = min((run.ratio for run in first), key=lambda each: abs(math.log(each / ratio)))
    receipts = [run.receipt for run in first if run.ratio == nearest]
    return sorted(receipts, key=total_s)[(len(receipts) - 1) // 2]


def _through_s(ready_s: Sequence[float], block_s: float) -> float:
    """When a link that is never idle without need has carried blocks that were ready then."""
    through_s = 0.0
    for ready in ready_s:
        through_s = max(through_s, ready) + block_s
    return through_s


def _place(cell: tuple[str, float], cells: Iterable[tuple[str, float]]) -> tuple[int, float]:
    """Cases in the order in which they came first; their ratios from slow links to fast ones."""
    order = list(dict.fromkeys(case for case, _ in cells))
    return order.index(cell[0]), cell[1]
