"""``cachelink plan``: what each way would take for a prefix, and where the decision flips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cachelink_core import limits, units
from cachelink_core.cli.connection import (
    DEFAULT_RECEIVER,
    DEFAULT_SENDER,
    CaOption,
    CertificateOption,
    Connection,
    JsonOption,
    KeyOption,
    SenderOption,
    TlsOption,
    TokenOption,
)
from cachelink_core.cli.output import columns, console, megabytes, print_json, reporting, seconds
from cachelink_core.cli.plan_sources import Source, from_file, from_nodes, from_pair
from cachelink_core.cli.sources import only_one
from cachelink_core.cli.wanted import ErrorOption, LeastTrust, TrustOption
from cachelink_core.errors import InvalidRequest
from cachelink_core.planner import TEXT, Job, Plan, Wanted, Way, choose
from cachelink_core.planner.crossover import break_even_rate, crossover_tokens
from cachelink_core.planner.questions import break_even_questions


class Row(msgspec.Struct, frozen=True):
    """One transfer, beside reading again.

    Attributes:
        way: its name.
        crossover_tokens: the shortest prefix that gains; None if none does.
        break_even_bytes_per_s: the slowest link that gains; None if none does.
        break_even_questions: how many gain; None if no number does.
    """

    way: str
    crossover_tokens: int | None
    break_even_bytes_per_s: float | None
    break_even_questions: int | None


class Report(msgspec.Struct, frozen=True):
    """Everything that the command says.

    Attributes:
        tokens: of the prefix.
        held_tokens: of these, at the sender already.
        questions: that will be asked.
        link_bytes_per_s: measured or given.
        plan: every prediction, and the choice.
        rows: where each transfer begins to gain.
    """

    tokens: int
    held_tokens: int
    questions: int
    link_bytes_per_s: float
    plan: Plan
    rows: tuple[Row, ...]


@reporting
def plan(
    tokens: Annotated[
        int, typer.Option(min=1, max=limits.MAX_PREFIX_TOKENS, help="Of the prefix.")
    ],
    pair: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A published pair of models instead of nodes."),
    ] = None,
    measurements: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What ping --json printed, instead of asking nodes now."),
    ] = None,
    sender: SenderOption = DEFAULT_SENDER,
    receiver: Annotated[
        str, typer.Option("--receiver", metavar="HOST:PORT", help="The receiver.")
    ] = DEFAULT_RECEIVER,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the receiver in the sender's list.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Such as 1Gbit/s, instead of the measured one."),
    ] = None,
    held: Annotated[
        bool, typer.Option("--held/--not-held", help="Whether the sender holds the prefix already.")
    ] = False,
    questions: Annotated[int, typer.Option(min=1, help="That will be asked about it.")] = 1,
    answer_tokens: Annotated[int, typer.Option(min=0, help="Generated for each.")] = 32,
    least_trust: TrustOption = LeastTrust.MAPPED,
    max_error: ErrorOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw times against prefix lengths.")
    ] = None,
    deadline: Annotated[str, typer.Option(metavar="TIME", help="For each node.")] = "5s",
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
    json_output: JsonOption = False,
) -> None:
    """Predict every way from measured values, pick one, and say where the choice would flip."""
    link_bytes_per_s = None if link is None else units.parse_rate(link)
    if link_bytes_per_s == 0:
        raise InvalidRequest(f"link is {link!r}; it must be above 0")
    if pair is not None and measurements is not None:
        only_one("source", pair=pair, measurements=measurements)
    if pair is not None:
        source = from_pair(pair, link_bytes_per_s)
    elif measurements is not None:
        source = from_file(measurements, name, link_bytes_per_s)
    else:
        connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
        deadline_s = units.parse_duration(deadline)
        source = from_nodes(connection, sender, receiver, name, link_bytes_per_s, deadline_s)
    job = source.job(tokens, held=held, questions=questions, answer_tokens=answer_tokens)
    wanted = Wanted(least_trust.value, max_error)
    report = Report(
        tokens=tokens,
        held_tokens=job.held_tokens,
        questions=questions,
        link_bytes_per_s=source.measures.link.bytes_per_s,
        plan=choose((*source.ways, TEXT), job, source.measures, wanted),
        rows=tuple(_row(way, source, job) for way in source.ways),
    )
    if plot is not None:
        from cachelink_core.cli.plan_plot import draw

        draw(source, job, report.rows, plot)
    if json_output:
        print_json(report)
    else:
        _show(report)


def _row(way: Way, source: Source, job: Job) -> Row:
    measures = source.measures
    return Row(
        way=way.name,
        crossover_tokens=crossover_tokens(way, job, measures),
        break_even_bytes_per_s=break_even_rate(way, job, measures),
        break_even_questions=break_even_questions(way, job, measures),
    )


def _show(report: Report) -> None:
    rows = {row.way: row for row in report.rows}
    rate = units.format_rate(round(report.link_bytes_per_s))
    console().print(
        f"{report.tokens} tokens, {report.held_tokens} held by the sender, "
        f"{report.questions} question(s), link {rate}"
    )
    table = columns(
        "way", "sent", "ready", "first token", "all answered",
        "gains from tokens", "from link", "from questions", "excluded",
    )  # fmt: skip
    for found in report.plan.predictions:
        row = rows.get(found.way)
        table.add_row(
            found.way,
            megabytes(found.wire_bytes),
            *(_time(value) for value in (found.ready_s, found.first_token_s, found.total_s)),
            "-" if row is None else _or_never(row.crossover_tokens),
            "-" if row is None else _rate(row.break_even_bytes_per_s),
            "-" if row is None else _or_never(row.break_even_questions),
            found.excluded,
        )
    console().print(table)
    console().print(f"\n{report.plan.why}")
    for what in report.plan.assumed:
        console().print(f"assumed: {what}")


def _time(value: float | None) -> str:
    return "?" if value is None else seconds(value)


def _or_never(value: int | None) -> str:
    return "never" if value is None else str(value)


def _rate(bytes_per_s: float | None) -> str:
    return "never" if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"
