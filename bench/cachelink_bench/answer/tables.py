"""The report in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from cachelink_bench.answer.figures import AloneRow, Claim, TogetherRow
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread


def alone_text(rows: Sequence[AloneRow], new_tokens: int) -> str:
    """One question at a time."""
    header = ("prefix and arm", "first token ms", "of it attention", "tokens/s", "same tokens")
    return table(
        header,
        [
            (
                f"{row.tokens}  {row.arm}",
                row.first_s.text(1e3, 1),
                _or_dash(row.attention_s, 1e3),
                _or_dash(row.tokens_per_s, 1.0),
                f"{row.agrees}/{new_tokens if row.tokens_per_s else 1}",
            )
            for row in rows
        ],
    )


def together_text(rows: Sequence[TogetherRow]) -> str:
    """Several at once."""
    header = (
        "prefix, questions, way",
        "all answers s",
        "first token s (mean)",
        "(last)",
        "answer s (mean)",
        "as asked alone",
    )
    return table(
        header,
        [
            (
                f"{row.tokens}  {row.questions}  {row.way}",
                row.total_s.text(),
                row.first_s.text(),
                row.last_first_s.text(),
                row.done_s.text(),
                "every bit" if row.exact else f"NO: {row.agrees} tokens",
            )
            for row in rows
        ],
    )


def claims_text(claims: Sequence[Claim], why: str) -> str:
    """Each ratio beside its target, and its verdict.

    Args:
        claims: to show.
        why: there is no verdict; empty if there is one.
    """
    return table(
        ("ratio", "measured", "target", "verdict"),
        [
            (
                claim.what,
                f"{claim.value:.3f}",
                claim.target,
                f"none: {why}" if why else "met" if claim.met else "MISSED",
            )
            for claim in claims
        ],
    )


def _or_dash(spread: Spread | None, scale: float) -> str:
    return "-" if spread is None else spread.text(scale, 1)
