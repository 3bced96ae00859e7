"""From runs to rows, and the result file that holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.statistics import Spread
from cachelink_bench.two_node.plan import TEXT, Plan
from cachelink_bench.two_node.runs import FORMAT, PREFILL, Run
from cachelink_bench.two_node.subjects import LeftOut, Subject
from cachelink_core.atomic_write import new_file
from cachelink_core.errors import ConfigError


def rate_gbit_per_s(run: Run) -> float | None:
    """Payload bits over the send time; None where nothing was sent."""
    send_s = run.handoff.get("send")
    return 8 * run.payload_bytes / send_s / 1e9 if send_s else None


def start_s(run: Run) -> float | None:
    """What a handoff takes beside reservation, send and tail: the header, and the first chunk."""
    handoff = run.handoff
    if "send" not in handoff:
        return None
    return handoff["total"] - sum(handoff[part] for part in ("reserve", "send", "tail"))


METRICS: Final[dict[str, Callable[[Run], float | None]]] = {
    "payload_bytes": lambda run: float(run.payload_bytes),
    "reserve_s": lambda run: run.handoff.get("reserve"),
    "encode_s": lambda run: run.handoff.get("encode"),
    "send_s": lambda run: run.handoff.get("send"),
    "load_s": lambda run: run.handoff.get("load"),
    "load_busy_s": lambda run: run.handoff.get("load_busy"),
    "install_s": lambda run: run.handoff.get("install"),
    "tail_s": lambda run: run.handoff.get("tail"),
    "start_s": start_s,
    "handoff_s": lambda run: run.handoff.get("total"),
    "remote_prefill_s": lambda run: run.answer.get("prefix", 0.0),
    "query_prefill_s": lambda run: run.answer.get("query_prefill"),
    "decode_s": lambda run: run.answer.get("decode"),
    "first_token_s": lambda run: run.first_token_s,
    "round_trip_s": lambda run: run.round_trip_s,
    "gbit_per_s": rate_gbit_per_s,
}
"""What a row sums up. With ``--serial`` two computed times follow, see ``_add_serial``."""


class Row(msgspec.Struct, frozen=True):
    """One context class in one representation.

    Attributes:
        context: the class.
        representation: ``text`` or a codec.
        tokens: of the prefixes, the median.
        runs: how many.
        metrics: by name of ``METRICS``; one that the representation does not have is missing.
        equal: answers whose tokens are all those of the same document's re-read.
        compared: answers that there is a re-read for.
    """

    context: str
    representation: str
    tokens: float
    runs: int
    metrics: dict[str, Spread]
    equal: int
    compared: int


class Prefill(msgspec.Struct, frozen=True):
    """The sender's own reading of a class's documents.

    Attributes:
        context: the class.
        tokens: of the prefixes, the median.
        seconds: of each document.
        tokens_per_s: likewise.
    """

    context: str
    tokens: float
    seconds: Spread
    tokens_per_s: Spread


class Link(msgspec.Struct, frozen=True):
    """An emulated link.

    Attributes:
        rate: as asked for, such as ``1gbit``.
        delay_s: one way, added.
        loss_percent: of packets.
        shaper: what shapes it.
        iperf_before_gbit: iperf3 from sender to receiver before the runs.
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
        command: that made it.
        config: the plan.
        environment: versions and machine of whoever measured.
        nodes: of both daemons: versions, and the model's identity digest.
        load_average: of the measuring machine at the start.
        documents: of every class.
        left_out: classes that did not run.
        link: if it was emulated.
        prefills: the sender's own.
        rows: one of each class and representation.
        runs: every run.
        note: of whoever ran it: what limits the numbers.
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


def make_rows(plan: Plan, runs: Sequence[Run]) -> tuple[Row, ...]:
    """Sums every class and representation up, in the plan's order."""
    read = {(run.context, run.document): run.ids for run in runs if run.representation == TEXT}
    found: list[Row] = []
    for context in plan.contexts:
        rate = _native_rate(plan, context, runs)
        for name in plan.representations:
            own = [r for r in runs if (r.context, r.representation) == (context, name)]
            if own:
                found.append(_row(context, name, own, read, rate))
    return tuple(found)


def make_prefills(plan: Plan, runs: Sequence[Run]) -> tuple[Prefill, ...]:
    """Sums the sender's own prefills up."""
    found: list[Prefill] = []
    for context in plan.contexts:
        own = [r for r in runs if (r.context, r.representation) == (context, PREFILL)]
        if own:
            times = [run.handoff["prefill"] for run in own]
            rates = [run.tokens / time for run, time in zip(own, times, strict=True)]
            tokens = _median(run.tokens for run in own)
            found.append(Prefill(context, tokens, Spread.of(times), Spread.of(rates)))
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


def write_results(path: Path, results: Results) -> None:
    """Writes the result file, whole or not at all."""
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    with new_file(path) as aside:
        aside.write_bytes(encoded + b"\n")


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


def _row(
    context: str,
    name: str,
    own: Sequence[Run],
    read: dict[tuple[str, int], tuple[int, ...]],
    serial_gbit_per_s: float | None,
) -> Row:
    metrics: dict[str, Spread] = {}
    for metric, value_of in METRICS.items():
        values = [value for run in own if (value := value_of(run)) is not None]
        if len(values) == len(own):
            metrics[metric] = Spread.of(values)
    if serial_gbit_per_s and name != TEXT:
        _add_serial(metrics, own, serial_gbit_per_s)
    compared = [run for run in own if (run.context, run.document) in read]
    equal = sum(run.ids == read[run.context, run.document] for run in compared)
    tokens = _median(run.tokens for run in own)
    return Row(context, name, tokens, len(own), metrics, equal, len(compared))


def _add_serial(metrics: dict[str, Spread], own: Sequence[Run], gbit_per_s: float) -> None:
    """Adds the stages one after another, computed: the daemons always overlap them.

    ``serial_send_s`` is the payload at the rate of the native rows, because a send beside a slow
    encoder waits for it. ``serial_s`` sums reserve, encode, that, load busy, install and answer.
    """
    sends = [8 * run.payload_bytes / gbit_per_s / 1e9 for run in own]
    stages = ("reserve", "encode", "load_busy", "install")
    totals = [
        send_s + sum(run.handoff[stage] for stage in stages) + run.answer["total"]
        for run, send_s in zip(own, sends, strict=True)
    ]
    metrics["serial_send_s"], metrics["serial_s"] = Spread.of(sends), Spread.of(totals)


def _native_rate(plan: Plan, context: str, runs: Sequence[Run]) -> float | None:
    """Gb/s of the native rows of a class; None without any, or where it is not asked for."""
    if not plan.serial:
        return None
    own = [r for r in runs if (r.context, r.representation) == (context, "native")]
    return Spread.of([rate_gbit_per_s(run) or 0.0 for run in own]).median if own else None


def _median(values: Iterable[int]) -> float:
    return Spread.of([float(value) for value in values]).median
