"""When moving a cache beats reading the text again: the arithmetic behind the figures.

A transfer takes ``fixed_s + bytes · 8 / rate``, reading again ``a · n + b · n²``. Both come from a
two-node result; the rate is the measured one, or one that is asked for.

Axes: n tokens of the prefix, N questions about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachelink_bench.statistics import Spread
from cachelink_bench.two_node.plan import TEXT
from cachelink_bench.two_node.results import Results, Row
from cachelink_core.errors import ConfigError

FAST_GBIT: float = 10.0
"""The hypothetical link."""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds to read n tokens: ``linear_s · n + square_s · n²``.

    Attributes:
        linear_s: a token.
        square_s: attention's share, never negative.
    """

    linear_s: float
    square_s: float

    @classmethod
    def fit(cls, tokens: Sequence[float], seconds: Sequence[float]) -> PrefillCurve:
        """Least squares of the relative error, through the origin.

        One point, or points that a straight line fits better than any upward curve, give a line.
        """
        n, t = np.asarray(tokens, float), np.asarray(seconds, float)
        straight = np.linalg.lstsq((n / t)[:, None], np.ones_like(n), rcond=None)[0]
        if len(n) > 1:
            linear_s, square_s = np.linalg.lstsq(
                np.stack((n / t, n * n / t), 1), np.ones_like(n), rcond=None
            )[0]
            if linear_s >= 0 and square_s >= 0:
                return cls(float(linear_s), float(square_s))
        return cls(float(straight[0]), 0.0)

    def seconds(self, tokens: float) -> float:
        """To read so many tokens."""
        return self.linear_s * tokens + self.square_s * tokens * tokens


@dataclass(frozen=True, slots=True)
class TransferLine:
    """Seconds to move the cache of n tokens.

    Attributes:
        representation: of the cache.
        fixed_s: whatever does not depend on the rate: reservation, tail, installation.
        token_bytes: payload of one token.
    """

    representation: str
    fixed_s: float
    token_bytes: float

    def seconds(self, tokens: float, gbit_per_s: float) -> float:
        """At a rate; encoding is taken to hide behind the link."""
        return self.fixed_s + 8 * self.token_bytes * tokens / gbit_per_s / 1e9

    def crossing(self, prefill: PrefillCurve, gbit_per_s: float) -> float | None:
        """Tokens from which on moving is faster than reading; None if it never is."""
        slope_s = prefill.linear_s - 8 * self.token_bytes / gbit_per_s / 1e9
        square_s = prefill.square_s
        if square_s > 0:
            root = math.sqrt(slope_s * slope_s + 4 * square_s * self.fixed_s)
            return (root - slope_s) / (2 * square_s)
        return self.fixed_s / slope_s if slope_s > 0 else None


@dataclass(frozen=True, slots=True)
class Amortised:
    """What N questions about one document cost, after the paper's equation.

    Moving: ``build_s + move_s + N · question_s``. Reading each time: ``N · (prefill_s +
    question_s)``.

    Attributes:
        representation: of the cache.
        build_s: the sender's prefill.
        move_s: the whole handoff: reservation, sending, loading, installing.
        prefill_s: the receiver's own.
        question_s: the fresh question's prefill, and decoding.
    """

    representation: str
    build_s: float
    move_s: float
    prefill_s: float
    question_s: float

    def moved_s(self, questions: float) -> float:
        """A question, if the cache is built and moved once."""
        return (self.build_s + self.move_s) / questions + self.question_s

    @property
    def read_s(self) -> float:
        """A question, if the text is read each time."""
        return self.prefill_s + self.question_s

    def kept_s(self, questions: float) -> float:
        """A question, if the receiver reads once and keeps its own cache."""
        return self.prefill_s / questions + self.question_s

    @property
    def break_even(self) -> float:
        """Questions at which both cost the same."""
        return (self.build_s + self.move_s) / self.prefill_s

    @property
    def pays_from(self) -> int:
        """The first number of questions at which moving is cheaper."""
        return max(1, math.floor(self.break_even) + 1)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Everything that the figures show.

    Attributes:
        prefill: the receiver's, fitted.
        lines: by representation.
        gbit_per_s: the measured rate.
        context: the largest class, which ``amortised`` is about.
        amortised: by representation.
    """

    prefill: PrefillCurve
    lines: dict[str, TransferLine]
    gbit_per_s: float
    context: str
    amortised: dict[str, Amortised]


def break_even(results: Results) -> BreakEven:
    """Works a result out.

    Raises:
        ConfigError: it has no re-read text, no cache that moved, or no prefill of the sender.
    """
    rows = results.rows_of()
    read = [row for row in rows if row.representation == TEXT]
    moved = [row for row in rows if row.representation != TEXT]
    prefills = results.prefills_of()
    if not (read and moved and prefills):
        raise ConfigError(
            "the result needs rows of text, rows of a cache and the sender's prefills; it has "
            f"{len(read)}, {len(moved)} and {len(prefills)}"
        )
    names = [n for n in results.config.representations if any(r.representation == n for r in moved)]
    largest = read[-1].context
    return BreakEven(
        prefill=PrefillCurve.fit(
            [row.tokens for row in read], [row.metrics["remote_prefill_s"].median for row in read]
        ),
        lines={name: _line(name, [r for r in moved if r.representation == name]) for name in names},
        gbit_per_s=_rate(moved),
        context=largest,
        amortised=_amortised(results, largest),
    )


def _line(name: str, rows: Sequence[Row]) -> TransferLine:
    """The fixed part is the median over classes: what is not sending hardly grows with tokens."""
    fixed = [row.metrics["handoff_s"].median - row.metrics["send_s"].median for row in rows]
    largest = max(rows, key=lambda row: row.tokens)
    size = largest.metrics["payload_bytes"].median / largest.tokens
    return TransferLine(name, max(0.0, Spread.of(fixed).median), size)


def _rate(moved: Sequence[Row]) -> float:
    """Of the largest native row; without any, of the fastest: a slow encoder does not fill a link."""
    native = [row for row in moved if row.representation == "native"]
    if native:
        return max(native, key=lambda row: row.tokens).metrics["gbit_per_s"].median
    return max(row.metrics["gbit_per_s"].median for row in moved)


def _amortised(results: Results, context: str) -> dict[str, Amortised]:
    rows = {row.representation: row for row in results.rows_of() if row.context == context}
    build = next((item for item in results.prefills_of() if item.context == context), None)
    if build is None:
        raise ConfigError(f"the result has no prefill of the sender for context {context!r}")
    # One question and one answer are the same work whatever the cache came from.
    questions = [
        row.metrics["query_prefill_s"].median + row.metrics["decode_s"].median
        for row in rows.values()
    ]
    return {
        name: Amortised(
            representation=name,
            build_s=build.seconds.median,
            move_s=row.metrics["handoff_s"].median,
            prefill_s=rows[TEXT].metrics["remote_prefill_s"].median,
            question_s=Spread.of(questions).median,
        )
        for name, row in rows.items()
        if name != TEXT
    }
