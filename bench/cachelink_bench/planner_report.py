"""What ``cachelink-bench planner`` found: the result file, the rule for a choice, the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import msgspec

from cachelink_bench.planner_runs import AUTO, Case
from cachelink_bench.report import no_verdict, table
from cachelink_bench.statistics import Spread

FORMAT: Final = "cachelink planner 1"

WITHIN_SHARE: Final = 0.1
"""A chosen way may be slower than the best one by this share of the best one's median."""

LEGEND: Final = (
    "Seconds from the request to the first token, client's clock, median (p25–p75) of all rounds. A "
    "query is the same work whichever way its prefix came: after a handoff every way is given the "
    "median of all of them. ÷ best: the median of the way that `codec: auto` chose, of several the "
    "slowest, over the best way's. A cell holds if that median is within 10 % of the best way's, or "
    "inside the best way's p25–p75."
)


class Verdict(msgspec.Struct, frozen=True):
    """The choices for one prefix length on one link.

    Attributes:
        rate: of the link.
        tokens: of the prefix.
        chosen: by ``codec: auto``, one a round.
        best: the way of the least median.
        over_best: median of the chosen way, of several the slowest, over the best way's.
        holds: see ``holds``; None on a machine that was not quiet.
    """

    rate: str
    tokens: int
    chosen: tuple[str, ...]
    best: str
    over_best: float
    holds: bool | None


class LinkRuns(msgspec.Struct, frozen=True):
    """Everything that was run on one link.

    Attributes:
        rate: of the link, such as ``100mbit``.
        repeats: rounds of each length.
        cases: one a prefix length.
    """

    rate: str
    repeats: int
    cases: tuple[Case, ...]


class Document(msgspec.Struct, frozen=True):
    """The result file.

    Attributes:
        format: of the file.
        date: of its end, UTC.
        command: that makes the same runs.
        model: as named; of a path the last part.
        environment: versions and machine.
        load_average: at the start.
        links: every run.
        verdicts: one a link and length; none in a file that was written before there were any.
    """

    format: str
    date: str
    command: str
    model: str
    environment: dict[str, object]
    load_average: float
    links: tuple[LinkRuns, ...]
    verdicts: tuple[Verdict, ...] = ()


def times(case: Case) -> dict[str, list[float]]:
    """Seconds to the first token by way, those of ``auto`` left out.

    A query's forward is the same work whichever way the prefix came, and by far the noisiest part:
    every handoff is given the median of all of them.
    """
    moved = [run for run in case.runs if run.ready_s]
    query_s = statistics.median(run.first_token_s - run.ready_s for run in moved)
    found: dict[str, list[float]] = {}
    for run in case.runs:
        if run.way != AUTO:
            took_s = run.ready_s + query_s if run.ready_s else run.first_token_s
            found.setdefault(run.way, []).append(took_s)
    return found


def holds(timed: Mapping[str, Sequence[float]], chosen: str) -> bool:
    """Whether a choice is as good as the best way.

    Its median is within 10 % of the best way's, or inside the best way's p25 to p75.

    Args:
        timed: seconds by way.
        chosen: one of the ways.
    """
    best = Spread.of(timed[_best(timed)])
    median_s = Spread.of(timed[chosen]).median
    return median_s <= max((1.0 + WITHIN_SHARE) * best.median, best.p75)


def judge(rate: str, case: Case, *, quiet: bool) -> Verdict:
    """Holds the choices of ``codec: auto`` against the best way; the slowest of them counts.

    Args:
        rate: of the link.
        case: with runs of every way.
        quiet: whether the machine had nothing else to do at the start.
    """
    timed = times(case)
    chosen = tuple(run.plan.chosen for run in case.runs if run.plan is not None)
    best, slowest = _best(timed), max(chosen, key=lambda way: Spread.of(timed[way]).median)
    return Verdict(
        rate=rate,
        tokens=case.tokens,
        chosen=chosen,
        best=best,
        over_best=Spread.of(timed[slowest]).median / Spread.of(timed[best]).median,
        holds=holds(timed, slowest) if quiet else None,
    )


def judged(document: Document) -> Document:
    """The document with a verdict on every link and length; they are empty if it was not quiet."""
    quiet = not no_verdict(document.load_average, smoke=False)
    verdicts = tuple(
        judge(link.rate, case, quiet=quiet) for link in document.links for case in link.cases
    )
    return msgspec.structs.replace(document, verdicts=verdicts)


def report_text(document: Document) -> str:
    """The table, what it means, and the verdict over all, as Markdown."""
    return "\n\n".join((_rows_text(document), LEGEND, verdict_text(document)))


def verdict_text(document: Document) -> str:
    """One line over all links and lengths."""
    verdicts = document.verdicts
    if why := no_verdict(document.load_average, smoke=False):
        return f"no verdict: {why}"
    held = sum(verdict.holds is True for verdict in verdicts)
    return f"{held} of {len(verdicts)} cells hold"


def _best(timed: Mapping[str, Sequence[float]]) -> str:
    return min(timed, key=lambda way: Spread.of(timed[way]).median)


def _rows_text(document: Document) -> str:
    cases = [case for link in document.links for case in link.cases]
    timed = [times(case) for case in cases]
    ways = list(dict.fromkeys(way for each in timed for way in each))
    rows = [
        (
            verdict.rate,
            f"{verdict.tokens}",
            *(Spread.of(each[way]).text(digits=3) for way in ways),
            _chosen_text(verdict.chosen),
            verdict.best,
            f"{verdict.over_best:.2f}",
            _holds_text(verdict.holds),
        )
        for verdict, each in zip(document.verdicts, timed, strict=True)
    ]
    return table(("link", "tokens", *ways, "auto chose", "best", "÷ best", "verdict"), rows)


def _chosen_text(chosen: Sequence[str]) -> str:
    """The choices in the order of the rounds; equal ones after each other once."""
    return ", ".join(f"{way} ×{len(list(same))}" for way, same in groupby(chosen))


def _holds_text(held: bool | None) -> str:
    return "none: NOT QUIET" if held is None else "holds" if held else "MISSED"
