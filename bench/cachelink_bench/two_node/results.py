"""From runs to rows, and the result file that holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.statistics import Spread
from cachelink_bench.two_node.plan import TEXT, Mode, Plan
from cachelink_bench.two_node.runs import FORMAT, PREFILL, Run, Session
from cachelink_bench.two_node.subjects import LeftOut, Subject
from cachelink_core.errors import ConfigError


def rate_gbit_per_s(run: Run) -> float | None:
    """Payload bits over the send time; None where nothing was sent."""
    send_s = run.handoff.get("send")
    return 8 * run.payload_bytes / send_s / 1e9 if send_s else None


def _prefill_s(run: Run) -> float | None:
    """Of a run that only reads: a handoff of a held cache reads nothing."""
    return run.handoff.get("prefill") if run.representation == PREFILL else None


def _answer_wait_s(run: Run) -> float | None:
    return sum(run.answer.get(part, 0.0) for part in ("wait", "queue")) if run.answer else None


METRICS: Final[dict[str, Callable[[Run], float | None]]] = {
    "payload_bytes": lambda run: float(run.payload_bytes) if run.payload_bytes else None,
    "prefill_s": _prefill_s,
    "start_s": lambda run: run.handoff.get("start"),
    "prefill_wait_s": lambda run: run.handoff.get("prefill_wait"),
    "reserve_s": lambda run: run.handoff.get("reserve"),
    "encode_s": lambda run: run.handoff.get("encode"),
    "send_s": lambda run: run.handoff.get("send"),
    "tail_s": lambda run: run.handoff.get("tail"),
    "handoff_s": lambda run: run.handoff.get("total"),
    "check_s": lambda run: run.handoff.get("check"),
    "load_s": lambda run: run.handoff.get("load"),
    "load_busy_s": lambda run: run.handoff.get("load_busy"),
    "install_s": lambda run: run.handoff.get("install"),
    "answer_wait_s": _answer_wait_s,
    "remote_prefill_s": lambda run: run.answer.get("prefix", 0.0) if run.answer else None,
    "answer_prepare_s": lambda run: run.answer.get("prepare"),
    "query_prefill_s": lambda run: run.answer.get("query_prefill"),
    "decode_s": lambda run: run.answer.get("decode"),
    "answer_finish_s": lambda run: run.answer.get("finish"),
    "answer_s": lambda run: run.answer.get("total"),
    "first_token_s": lambda run: run.first_token_s if run.answer else None,
    "round_trip_s": lambda run: run.round_trip_s or None,
    "gbit_per_s": rate_gbit_per_s,
}
"""What a row sums up."""


class Row(msgspec.Struct, frozen=True):
    """One context class in one representation and mode.

    Attributes:
        context: the class.
        representation: ``text`` or a codec.
        mode: of the nodes; empty for a text.
        tokens: of the prefixes, the median.
        runs: how many.
        metrics: by name of ``METRICS``; one that the representation does not have is missing.
        equal: answers whose tokens are all those of the same document's re-read.
        compared: answers that there is a re-read for.
    """

    context: str
    representation: str
    mode: str
    tokens: float
    runs: int
    metrics: dict[str, Spread]
    equal: int
    compared: int


class Prefill(msgspec.Struct, frozen=True):
    """A sender's own reading of a class's documents.

    Attributes:
        context: the class.
        mode: of the sender.
        tokens: of the prefixes, the median.
        seconds: of each document that has a time.
        tokens_per_s: likewise.
        earlier: the last date of those that an earlier run measured; empty if all are of this run.
    """

    context: str
    mode: str
    tokens: float
    seconds: Spread
    tokens_per_s: Spread
    earlier: str = ""


class WideKv(msgspec.Struct, frozen=True):
    """What ran on the bytes-only model with a wide cache: caches are moved, nothing is asked.

    Attributes:
        contexts: classes; their times are of no use beside those of other classes.
        nodes: as of the other daemons.
    """

    contexts: tuple[str, ...]
    nodes: dict[str, object]


class Link(msgspec.Struct, frozen=True):
    """An emulated link.

    Attributes:
        rate: as asked for, such as ``1gbit``.
        delay_s: one way, added.
        loss_percent: of packets.
        shaper: what shapes it.
        iperf_before_gbit: iperf3 from sender to receiver before the runs of the last session.
        iperf_after_gbit: the same after them.
        round_trip_s: of an echo, before the runs; the least of some.
    """

    rate: str
    delay_s: float
    loss_percent: float
    shaper: str
    iperf_before_gbit: float
    iperf_after_gbit: float
    round_trip_s: float


class Document(msgspec.Struct, frozen=True):
    """What is recorded of a document: not its text, which is made anew from its number."""

    context: str
    document: int
    tokens: int
    question_tokens: int
    text_bytes: int
    text_digest: str
    ids_digest: str


class Results(msgspec.Struct, frozen=True):
    """The result file.

    Attributes:
        format: of the file.
        date: of its end, UTC.
        command: that made it, of the last session.
        config: the plan.
        resolved: the same with all that it was run with: link, threads, the models' identities.
        environment: versions and machine of whoever measured.
        nodes: of both daemons: versions, and the model's identity digest.
        load_average: of the measuring machine at the start; the worst of all sessions.
        documents: of every class.
        left_out: classes that did not run.
        link: if it was emulated.
        prefills: the senders' own.
        rows: one of each class, representation and mode.
        runs: every run.
        note: of whoever ran it, of all sessions: what limits the numbers.
        wide_kv: classes beyond the model's window, if any ran.
        sessions: that measured; runs of a log that an older version began may have none.
    """

    format: str
    date: str
    command: str
    config: Plan
    environment: dict[str, object]
    nodes: dict[str, object]
    load_average: float
    documents: tuple[Document, ...]
    left_out: tuple[LeftOut, ...]
    link: Link | None
    prefills: tuple[Prefill, ...]
    rows: tuple[Row, ...]
    runs: tuple[Run, ...]
    note: str = ""
    resolved: dict[str, object] = {}
    wide_kv: WideKv | None = None
    sessions: tuple[Session, ...] = ()

    @property
    def wide_contexts(self) -> tuple[str, ...]:
        """Classes that ran on the wide-KV model."""
        return self.wide_kv.contexts if self.wide_kv else ()

    def comparable(self) -> Results:
        """The same without what ran on the wide-KV model: one model's times, for figures."""
        out = self.wide_contexts
        return msgspec.structs.replace(
            self,
            rows=tuple(row for row in self.rows if row.context not in out),
            prefills=tuple(item for item in self.prefills if item.context not in out),
        )

    def rows_of(self, mode: Mode | None = None) -> tuple[Row, ...]:
        """Rows of a mode, by default of the plan's first, and those of a text."""
        wanted = mode or self.config.modes[0]
        return tuple(row for row in self.rows if row.mode in ("", wanted))

    def prefills_of(self, mode: Mode | None = None) -> tuple[Prefill, ...]:
        """Prefills of a mode's sender, by default of the plan's first."""
        wanted = mode or self.config.modes[0]
        return tuple(item for item in self.prefills if item.mode == wanted)


def make_rows(plan: Plan, runs: Sequence[Run]) -> tuple[Row, ...]:
    """Sums every class, representation and mode up, in the plan's order."""
    read = {(run.context, run.document): run.ids for run in runs if run.representation == TEXT}
    found: list[Row] = []
    for context, name, mode in product(plan.contexts, plan.representations, ("", *plan.modes)):
        key = context, name, mode
        own = [run for run in runs if (run.context, run.representation, run.mode) == key]
        if own:
            found.append(_row(own, read))
    return tuple(found)


def make_prefills(plan: Plan, runs: Sequence[Run]) -> tuple[Prefill, ...]:
    """Sums the senders' own prefills up."""
    found: list[Prefill] = []
    for context, mode in product(plan.contexts, plan.modes):
        key = context, PREFILL, mode
        own = [
            run
            for run in runs
            if (run.context, run.representation, run.mode) == key and run.handoff
        ]
        if own:
            earlier = max(run.earlier for run in own)
            times = [run.handoff["prefill"] for run in own]
            rates = [run.tokens / time for run, time in zip(own, times, strict=True)]
            tokens = _median(run.tokens for run in own)
            spreads = Spread.of(times), Spread.of(rates)
            found.append(Prefill(context, mode, tokens, *spreads, earlier))
    return tuple(found)


def describe(subject: Subject) -> Document:
    """What the result file says of a document."""
    return Document(
        context=subject.context,
        document=subject.document,
        tokens=subject.tokens,
        question_tokens=subject.question_tokens,
        text_bytes=len(subject.text.encode()),
        text_digest=subject.text_digest,
        ids_digest=subject.ids_digest,
    )


def read_results(path: Path) -> Results:
    """Reads a result file.

    Raises:
        ConfigError: there is none, it is no result of this benchmark, or of another version.
    """
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Stamp).format
        if found == FORMAT:
            return msgspec.json.decode(data, type=Results)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of the two-node benchmark: {error}") from error
    raise ConfigError(f"{path}: format is {found!r}; this version reads {FORMAT!r}")


class _Stamp(msgspec.Struct):
    format: str


def _row(own: Sequence[Run], read: dict[tuple[str, int], tuple[int, ...]]) -> Row:
    metrics: dict[str, Spread] = {}
    for metric, value_of in METRICS.items():
        values = [value for run in own if (value := value_of(run)) is not None]
        if len(values) == len(own):
            metrics[metric] = Spread.of(values)
    compared = [run for run in own if (run.context, run.document) in read]
    equal = sum(run.ids == read[run.context, run.document] for run in compared)
    tokens = _median(run.tokens for run in own)
    first = own[0]
    return Row(
        context=first.context,
        representation=first.representation,
        mode=first.mode,
        tokens=tokens,
        runs=len(own),
        metrics=metrics,
        equal=equal,
        compared=len(compared),
    )


def _median(values: Iterable[int]) -> float:
    return Spread.of([float(value) for value in values]).median
