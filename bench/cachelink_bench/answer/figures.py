"""Runs summed up, and what is claimed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachelink_bench.answer.alone import Run
from cachelink_bench.answer.together import Together
from cachelink_bench.statistics import Spread, ratios

FIRST_TARGET: Final = 1.05
"""First token over the bare forward of the same query."""
REST_TARGET: Final = 1.15
"""Query prefill without attention: the longest prefix over the shortest."""
DECODE_TARGET: Final = 1.0
"""Tokens a second over those of ``generate``."""
SHARE_TARGET: Final = 1.05
"""Time of all answers, shared over in order."""

OURS: Final = "CacheLink"
BARE: Final = "bare forward"
TIMED: Final = "bare forward, attention timed"
GENERATE: Final = "generate, DynamicCache"


@dataclass(frozen=True, slots=True)
class AloneRow:
    """One arm at one prefix length.

    Attributes:
        tokens: of the prefix.
        arm: its name.
        first_s: to the first token.
        tokens_per_s: after the first; None for an arm that makes one token.
        attention_s: within ``first_s``; None where it was not timed.
        agrees: leading tokens that are those of ``OURS``.
    """

    tokens: int
    arm: str
    first_s: Spread
    tokens_per_s: Spread | None
    attention_s: Spread | None
    agrees: int


@dataclass(frozen=True, slots=True)
class TogetherRow:
    """One way at one prefix length and number of questions.

    Attributes:
        tokens: of the prefix.
        questions: at once.
        way: its name.
        total_s: until the last answer has ended.
        first_s: to the first token, mean of the questions.
        last_first_s: to the first token of the question that waits longest.
        done_s: to the last token, mean of the questions.
        exact: every answer's tokens and last logits are those asked alone, in every round.
        agrees: the fewest leading tokens that are those asked alone.
    """

    tokens: int
    questions: int
    way: str
    total_s: Spread
    first_s: Spread
    last_first_s: Spread
    done_s: Spread
    exact: bool
    agrees: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure beside its target.

    Attributes:
        what: is claimed.
        value: measured: the median of the rounds' ratios.
        target: for it.
        met: whether it is.
    """

    what: str
    value: float
    target: str
    met: bool


def alone_rows(tokens: int, runs: dict[str, list[Run]]) -> list[AloneRow]:
    """Sums up each arm's rounds."""
    ours = runs[OURS][0].ids
    rows = []
    for arm, each in runs.items():
        rates = [(len(run.ids) - 1) / run.decode_s for run in each if run.decode_s]
        spent = [run.attention_s for run in each if run.attention_s]
        rows.append(
            AloneRow(
                tokens,
                arm,
                Spread.of([run.first_s for run in each]),
                Spread.of(rates) if rates else None,
                Spread.of(spent) if spent else None,
                min(_agreeing(run.ids, ours) for run in each),
            )
        )
    return rows


def together_rows(
    tokens: int, questions: int, runs: dict[str, list[Together]], alone: Sequence[Together]
) -> list[TogetherRow]:
    """Sums up each way's rounds; ``alone`` has one answer of each question, asked with no other."""
    rows = []
    for way, each in runs.items():
        pairs = [
            (run.ids[i], run.logits[i], alone[i].ids[0], alone[i].logits[0])
            for run in each
            for i in range(questions)
        ]
        rows.append(
            TogetherRow(
                tokens,
                questions,
                way,
                Spread.of([run.total_s for run in each]),
                Spread.of([sum(run.first_s) / questions for run in each]),
                Spread.of([max(run.first_s) for run in each]),
                Spread.of([sum(run.done_s) / questions for run in each]),
                all(ids == wanted and left.equal(right) for ids, left, wanted, right in pairs),
                min(_agreeing(ids, wanted) for ids, _, wanted, _ in pairs),
            )
        )
    return rows


def alone_claims(rows: Sequence[AloneRow]) -> list[Claim]:
    """First token and decoding at each length, and how both change with it."""
    by = {(row.tokens, row.arm): row for row in rows}
    lengths = sorted({row.tokens for row in rows})
    claims, decode, rest = [], [], []
    for tokens in lengths:
        mine, floor = by[tokens, OURS], by[tokens, BARE]
        first = ratios(mine.first_s.runs, floor.first_s.runs).median
        claims.append(_most(f"first token / bare forward, {tokens} tokens", first, FIRST_TARGET))
        rival, own = by[tokens, GENERATE].tokens_per_s, mine.tokens_per_s
        assert own is not None
        assert rival is not None
        decode.append(ratios(own.runs, rival.runs).median)
        claims.append(_least(f"tokens/s / generate, {tokens} tokens", decode[-1], DECODE_TARGET))
        timed = by[tokens, TIMED]
        assert timed.attention_s is not None
        rest.append(timed.first_s.median - timed.attention_s.median)
    claims.append(
        _most("first token without attention, longest / shortest prefix",
              rest[-1] / rest[0], REST_TARGET)
    )  # fmt: skip
    claims.append(
        _least("margin over generate, longest / shortest prefix", decode[-1] / decode[0], 1.0)
    )
    return claims


def together_claims(rows: Sequence[TogetherRow]) -> list[Claim]:
    """What sharing costs and brings beside answering in order."""
    by = {(row.tokens, row.questions, row.way): row for row in rows}
    claims = []
    for tokens, questions in dict.fromkeys((row.tokens, row.questions) for row in rows):
        ordered, shared = (by[tokens, questions, way] for way in ("in order", "shared"))
        where = f"{questions} questions, {tokens} tokens"
        claims.append(
            _most(f"shared / in order, all answers, {where}",
                  ratios(shared.total_s.runs, ordered.total_s.runs).median, SHARE_TARGET)
        )  # fmt: skip
        claims.append(
            _most(f"shared / in order, first token, {where}",
                  ratios(shared.first_s.runs, ordered.first_s.runs).median, 1.0)
        )  # fmt: skip
    return claims


def _most(what: str, value: float, target: float) -> Claim:
    return Claim(what, value, f"<= {target:g}", value <= target)


def _least(what: str, value: float, target: float) -> Claim:
    return Claim(what, value, f">= {target:g}", value >= target)


def _agreeing(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    for count, (one, other) in enumerate(zip(ids, wanted, strict=False)):
        if one != other:
            return count
    return min(len(ids), len(wanted))
