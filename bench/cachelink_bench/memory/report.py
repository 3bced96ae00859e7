"""Samples as rows, a table and a verdict."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cachelink_bench.memory.cases import (
    LEAST_BYTES,
    RECEIVER_SHARE,
    SENDER_BLOCKS,
    Case,
    Size,
)
from cachelink_bench.memory.measure import Sample
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread


class Row(msgspec.Struct, frozen=True):
    """One case.

    Attributes:
        case: what was measured.
        receiver_bytes: above model and installed cache, at the peak.
        receiver_limit: of those.
        sender_bytes: above model and own cache, at the peak.
        sender_limit: of those.
        met: whether every run kept to both; None for a cache that is too small to say.
    """

    case: Case
    receiver_bytes: Spread
    receiver_limit: int
    sender_bytes: Spread
    sender_limit: int
    met: bool | None


def make_rows(cases: Sequence[Case], size: Size, samples: Sequence[Sample]) -> tuple[Row, ...]:
    """Sums up every case that has a sample."""
    rows = []
    for case in cases:
        own = [sample for sample in samples if sample.case == case.name]
        if not own:
            continue
        receiver = [float(sample.receiver.above_bytes) for sample in own]
        sender = [float(sample.sender.above_bytes) for sample in own]
        limits = _receiver_limit(case, size), SENDER_BLOCKS * size.block_bytes
        met = max(receiver) <= limits[0] and max(sender) <= limits[1]
        rows.append(
            Row(
                case,
                Spread.of(receiver),
                limits[0],
                Spread.of(sender),
                limits[1],
                met if size.cache_bytes >= LEAST_BYTES else None,
            )
        )
    return tuple(rows)


def rows_text(rows: Sequence[Row], size: Size) -> str:
    """The table: medians, the largest of all runs, and the targets beside them."""
    receiver_header = ("receiver MB", "largest", "of the cache", "target")
    sender_header = ("sender MB", "largest", "blocks", "target")
    header = ("codec, plane", *receiver_header, *sender_header, "verdict")
    body = []
    for row in rows:
        receiver, sender = max(row.receiver_bytes.runs), max(row.sender_bytes.runs)
        share = row.receiver_limit / size.cache_bytes
        body.append(
            (
                row.case.name,
                f"{row.receiver_bytes.median / 1e6:.0f}",
                f"{receiver / 1e6:.0f}",
                f"{receiver / size.cache_bytes:.3f}",
                f"{share:.3g}" + (" (a source block)" if row.case.mapped else ""),
                f"{row.sender_bytes.median / 1e6:.0f}",
                f"{sender / 1e6:.0f}",
                f"{sender / size.block_bytes:.2f}",
                f"{SENDER_BLOCKS}",
                _verdict(row.met),
            )
        )
    return table(header, body)


def verdict_text(rows: Sequence[Row]) -> str:
    """One line."""
    judged = [row for row in rows if row.met is not None]
    if not judged:
        return f"no verdict: it takes a cache of {LEAST_BYTES / 1e6:.0f} MB"
    missed = [row.case.name for row in judged if not row.met]
    target = f"receiver {RECEIVER_SHARE:g} of the cache, sender {SENDER_BLOCKS} blocks"
    return f"target ({target}): " + (f"MISSED by {'; '.join(missed)}" if missed else "met")


def _receiver_limit(case: Case, size: Size) -> int:
    return size.scratch_bytes if case.mapped else int(RECEIVER_SHARE * size.cache_bytes)


def _verdict(met: bool | None) -> str:
    return "–" if met is None else "met" if met else "MISSED"


__all__ = ["Row", "make_rows", "rows_text", "verdict_text"]
