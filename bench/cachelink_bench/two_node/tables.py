"""The result as tables: Markdown for people, CSV with every run for programs."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cachelink_bench.report import load_text, table
from cachelink_bench.statistics import Spread
from cachelink_bench.two_node.plan import TEXT
from cachelink_bench.two_node.results import METRICS, Link, Results, Row
from cachelink_bench.two_node.runs import PREFILL, Session
from cachelink_core.atomic_write import new_file

_TIMES: Final = {
    "send": "send_s",
    "load": "load_s",
    "install": "install_s",
    "remote prefill": "remote_prefill_s",
    "fresh query": "query_prefill_s",
    "first token": "first_token_s",
    "round trip": "round_trip_s",
}
_SERIAL: Final = {
    "serialize": "encode_s",
    "send": "send_s",
    "load": "load_s",
    "install": "install_s",
    "remote prefill": "remote_prefill_s",
    "fresh query": "query_prefill_s",
    "round trip": "round_trip_s",
}

_LEGEND: Final = """\
Medians, p25–p75 in parentheses; milliseconds. The sender holds the document's cache already. *send*
(sender's clock): first frame handed over to receipt, less the receiver's tail. *load* (receiver's):
exposed, last frame to all chunks verified and decoded, and the manifest's check. *remote prefill*
and *fresh query* (receiver's): reading the document, and the question. *first token* and *round
trip* (client's): request to the first and to the last of {decode} tokens. *equal*: answers whose
tokens are all those of the re-read of the same document."""

_SERIAL_LEGEND: Final = """\
*Serial*: measured with nodes that begin a stage when the last one has ended. *prefill* (sender's):
reading the document. *serialize* (sender's): encoding all of the cache into memory. *send*
(sender's): socket time, first frame handed over to receipt, less the receiver's tail. *load*
(receiver's): the manifest's check, then, all frames being there, verifying and decoding all of them.
*round trip* (client's): of a document that was prefilled before; it has the reservation in it."""

_WIDE_LEGEND: Final = """\
*Wide KV*: classes beyond the model's window, on a model with random weights and a cache of
{token_bytes:,} bytes a token. Its caches are moved, verified and installed like any other; its text means
nothing, so there are no questions and no re-reads, and a round trip ends with the receipt. How long it
reads says nothing about a real model."""


def markdown(results: Results) -> str:
    """The whole report."""
    modes = results.config.modes
    parts = ["# Two-node transfer", _head(results), _link(results), sessions_text(results)]
    if "overlapped" in modes:
        parts.append(rows_text(results))
        parts.append(_LEGEND.format(decode=results.config.decode))
    if "serial" in modes:
        parts += ["## One stage after another", serial_text(results), _SERIAL_LEGEND]
    if results.wide_kv is not None:
        parts.append(_WIDE_LEGEND.format(token_bytes=results.wide_kv.nodes["token_bytes"]))
    parts += [prefills_text(results), missing_prefills_text(results)]
    parts += [f"Left out: {item.context}: {item.reason}." for item in results.left_out]
    parts.append(results.note and f"Limits: {results.note}")
    return "\n\n".join(part for part in parts if part) + "\n"


def rows_text(results: Results) -> str:
    """The main table."""
    header = ("context", "representation", "payload MB", *_TIMES, "Gb/s", "equal")
    body = [
        (
            _context(row, results),
            label(row.representation, results),
            megabytes(row),
            *_cells(row, _TIMES.values()),
            _rate(row),
            _equal(row),
        )
        for row in results.rows_of("overlapped")
    ]
    return table(header, body)


def serial_text(results: Results) -> str:
    """The columns of one stage after another; last, what the other mode's round trip was."""
    both = "overlapped" in results.config.modes
    prefills = {item.context: item.seconds for item in results.prefills_of("serial")}
    header = ("context", "representation", "payload MB", "prefill", *_SERIAL, "Gb/s", "equal")
    body = [
        (
            _context(row, results),
            label(row.representation, results),
            megabytes(row),
            _ms(prefills.get(row.context) if row.mode else None),
            *_cells(row, _SERIAL.values()),
            _rate(row),
            _equal(row),
            *((_overlapped(row, results),) if both else ()),
        )
        for row in results.rows_of("serial")
    ]
    return table((*header, *(("overlapped",) if both else ())), body)


def prefills_text(results: Results) -> str:
    """The senders' own prefills, measured apart."""
    body = [
        (
            item.context,
            item.mode,
            f"{item.tokens:.0f}",
            item.seconds.text(1e3, 0),
            item.tokens_per_s.text(1, 0),
            item.earlier or "in this run",
        )
        for item in results.comparable().prefills
    ]
    if not body:
        return ""
    return "The sender's own prefill of each document:\n\n" + table(
        ("context", "sender", "tokens", "ms", "tokens/s", "measured"), body
    )


def missing_prefills_text(results: Results) -> str:
    """Names the prefills that have no time: each sender's, of every document."""
    timed = {
        (run.context, run.document, run.mode)
        for run in results.runs
        if run.representation == PREFILL and run.handoff
    }
    missing = [
        f"{item.context} document {item.document + 1} ({mode})"
        for mode in results.config.modes
        for item in results.documents
        if (item.context, item.document, mode) not in timed
    ]
    if not missing:
        return ""
    return (
        f"No prefill time: {', '.join(missing)}. The sender read these caches back from disk, and "
        "no time was kept with them. `--resume` measures it once the sender prefills them "
        "(`--no-capture`, or without its captured caches)."
    )


def sessions_text(results: Results) -> str:
    """Conditions of each session, where one line in the head does not say them all."""
    sessions = results.sessions
    unknown = len(results.runs) - sum(session.runs for session in sessions)
    if len(sessions) < 2 and not unknown:
        return ""
    lines = [f"- earlier: {unknown} runs, whose conditions were not recorded"] if unknown else []
    for session in sessions:
        parts = [f"{session.runs} runs", load_text(session.load_average)]
        if results.link is not None:
            parts.append(_iperf(session))
        parts.append(f"`{session.command}`")
        if session.note:
            parts.append(session.note)
        lines.append(f"- {session.began}: {'; '.join(parts)}")
    return "Measured in several sessions, each from its begin on:\n\n" + "\n".join(lines)


def write_csv(path: Path, results: Results) -> None:
    """One line a run."""
    key = ("context", "document", "repeat", "representation", "mode")
    names = (*key, "tokens", *METRICS, "answer_ids")
    with new_file(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(names)
        for run in results.runs:
            values = (METRICS[name](run) for name in METRICS)
            cells = ("" if value is None else f"{value:.9g}" for value in values)
            ids = " ".join(map(str, run.ids))
            lines.writerow((*run.key, run.tokens, *cells, ids))


def label(representation: str, results: Results) -> str:
    """A representation as people read it."""
    if representation == TEXT:
        return "text → remote prefill"
    dtype = str(results.nodes.get("dtype", "native"))
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)
    return representation.replace("native", f"native {short}")


def megabytes(row: Row) -> str:
    """The payload."""
    spread = row.metrics["payload_bytes"]
    return _short(spread, 1e-6, 1 if spread.median >= 1e6 else 4)


def _head(results: Results) -> str:
    machine = results.environment
    lines = [
        f"{results.date}, `{results.command}`",
        f"{machine['processor']}, {machine['cpus']} cores, {machine['system']}; "
        f"{_models(results)}; "
        f"CacheLink {results.nodes['sender']} → {results.nodes['receiver']}.",
        f"{load_text(results.load_average)}."
        + (" The worst that was recorded of the sessions below." if sessions_text(results) else ""),
    ]
    return "  \n".join(lines)


def _models(results: Results) -> str:
    """The models, and which classes each ran where there are classes of the wide-KV model."""
    model, wide = results.config.model, results.wide_kv
    if wide is None:
        return f"model {model} ({_kind(results.nodes)})"
    ran = dict.fromkeys(item.context for item in results.documents)
    own = [context for context in ran if context not in wide.contexts]
    parts = [f"{', '.join(own)} on model {model} ({_kind(results.nodes)})"] if own else []
    parts.append(f"{', '.join(wide.contexts)} on the wide-KV model ({_kind(wide.nodes)})")
    return " and ".join(parts)


def _kind(nodes: dict[str, object]) -> str:
    return f"{nodes['architecture']}, {nodes['dtype']}"


def _link(results: Results) -> str:
    link = results.link
    if link is None:
        return ""
    rows = [row for row in results.rows if row.representation == "native"]
    rates = ", ".join(
        f"{row.context}{' serial' if row.mode == 'serial' else ''} "
        f"{row.metrics['gbit_per_s'].median:.3g}"
        for row in rows
    )
    native = f"native rows: {rates} Gb/s" if rows else "no native rows"
    sessions = results.sessions
    alone: Link | Session = sessions[0] if sessions else link
    iperf = "iperf3 of each session below" if len(sessions) > 1 else _iperf(alone)
    return (
        f"Emulated link: {link.rate}, {link.delay_s * 1e3:g} ms each way, loss {link.loss_percent:g} %"
        f" ({link.shaper}); echo {link.round_trip_s * 1e3:.2f} ms. {iperf}; {native}."
    )


def _iperf(measured: Link | Session) -> str:
    rates = (measured.iperf_before_gbit, measured.iperf_after_gbit)
    before, after = ("not measured" if rate is None else f"{rate:.3g} Gb/s" for rate in rates)
    return f"iperf3 before {before}, after {after}"


def _cells(row: Row, metrics: Iterable[str]) -> Iterable[str]:
    return [_ms(row.metrics.get(name)) for name in metrics]


def _ms(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if not spread.median:
        return "0"
    return spread.text(1e3, 0 if spread.median >= 0.1 else 1)


def _context(row: Row, results: Results) -> str:
    wide = ", wide KV" if row.context in results.wide_contexts else ""
    return f"{row.context} ({row.tokens:.0f} tokens{wide})"


def _equal(row: Row) -> str:
    alone = row.representation == TEXT or not row.compared
    return "–" if alone else f"{row.equal}/{row.compared}"


def _overlapped(row: Row, results: Results) -> str:
    """The round trip of the same representation in the other mode."""
    for other in results.rows_of("overlapped"):
        if (other.context, other.representation) == (row.context, row.representation):
            return _ms(other.metrics["round_trip_s"])
    return "–"


def _rate(row: Row) -> str:
    spread = row.metrics.get("gbit_per_s")
    return "–" if spread is None else _short(spread, 1.0, 3)


def _short(spread: Spread, scale: float, digits: int) -> str:
    """Median and quartiles; the median alone where rounding leaves no difference."""
    text = spread.text(scale, digits)
    middle, low, high = text.replace("(", "").replace(")", "").replace("–", " ").split()
    return middle if low == high == middle else text
