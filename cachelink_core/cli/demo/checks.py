"""What the demonstration claims, held against what it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachelink_core.cli.demo.plan import CODECS, EXACT_ARMS, OTHER, RE_READ, STREAMED, ZEROED
from cachelink_core.cli.demo.rows import Row


@dataclass(frozen=True, slots=True)
class Check:
    """One claim.

    Attributes:
        claim: in words.
        ok: whether it holds.
        seen: what was seen instead, or that it holds.
    """

    claim: str
    ok: bool
    seen: str = ""


def check_rows(rows: Sequence[Row], *, tokens: int, expected: str) -> list[Check]:
    """Checks every claim about the rows.

    Args:
        rows: one of each arm.
        tokens: that each answer must have.
        expected: words of a right answer; empty if nobody knows.
    """
    by_arm = {row.arm: row for row in rows}
    reference = by_arm[RE_READ]
    found = [_length(row, tokens) for row in rows]
    found += [_path(by_arm[arm], path) for arm, path in _paths().items()]
    found += [_moved(by_arm[arm]) for arm in (*CODECS, STREAMED, ZEROED, OTHER)]
    found += [_equal(by_arm[arm], reference) for arm in EXACT_ARMS]
    found += [_different(by_arm[arm], reference) for arm in (ZEROED, OTHER)]
    if expected:
        found += [_right(by_arm[arm], expected) for arm in (RE_READ, *EXACT_ARMS)]
        found += [_ignorant(by_arm[arm], expected) for arm in (ZEROED, OTHER)]
    return found


def check_exits(statuses: Mapping[str, int]) -> list[Check]:
    """Checks that every daemon drained."""
    return [
        Check(f"the {name} drains and exits 0 on SIGTERM", status == 0, f"exit status {status}")
        for name, status in statuses.items()
    ]


def _paths() -> dict[str, str]:
    exact = dict.fromkeys(EXACT_ARMS, "exact")
    lossy = dict.fromkeys((arm for arm in CODECS if arm not in EXACT_ARMS), "lossy")
    return {**exact, **lossy, RE_READ: "recompute"}


def _length(row: Row, tokens: int) -> Check:
    count = len(row.said.token_ids)
    return Check(f"{row.arm}: {tokens} tokens are generated", count == tokens, f"{count} tokens")


def _path(row: Row, path: str) -> Check:
    return Check(f"{row.arm}: the path is {path}", row.path == path, row.path)


def _moved(row: Row) -> Check:
    return Check(
        f"{row.arm}: the cache moved", row.wire_bytes > 0, f"{row.wire_bytes} bytes on the wire"
    )


def _equal(row: Row, reference: Row) -> Check:
    return Check(
        f"{row.arm}: its tokens are those of the re-read",
        row.equals(reference),
        f"the first {row.same_tokens(reference)} are; it says {row.said.text!r}, "
        f"the re-read {reference.said.text!r}",
    )


def _different(row: Row, reference: Row) -> Check:
    return Check(
        f"{row.arm}: its tokens are not those of the re-read",
        not row.equals(reference),
        f"both say {row.said.text!r}",
    )


def _right(row: Row, expected: str) -> Check:
    return Check(
        f"{row.arm}: the answer contains {expected!r}", expected in row.said.answer, row.said.answer
    )


def _ignorant(row: Row, expected: str) -> Check:
    return Check(
        f"{row.arm}: the answer does not contain {expected!r}",
        expected not in row.said.answer,
        row.said.answer,
    )
