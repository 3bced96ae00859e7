"""A handoff as a trace that Perfetto (ui.perfetto.dev) and Chrome (about:tracing) show.

Both sides are processes of the trace, each with a clock of its own that begins with the reply to
Reserve; the two are drawn from the same origin, but never subtracted.
"""

from __future__ import annotations

from typing import Any, Final

from cachelink_core.cli.timeline_spans import STAGES, Side, Span, Spans, make_spans
from cachelink_core.rpc.types import Receipt

_US: Final = 1e6

CLOCKS: Final[dict[Side, str]] = {
    "sender": "sender (its clock, from Reserve's reply)",
    "receiver": "receiver (its clock, from Reserve's reply)",
}


def make_trace(receipt: Receipt) -> dict[str, Any]:
    """The JSON object format of trace events; times in microseconds.

    Args:
        receipt: of a handoff that sent something.

    Raises:
        InvalidRequest: it has no whole timeline.
    """
    spans = make_spans(receipt)
    events: list[dict[str, Any]] = []
    for pid, (side, stages) in enumerate(STAGES.items(), start=1):
        events.append(_name("process_name", CLOCKS[side], pid))
        events.append(_instant("Reserve answered", spans, pid))
        for tid, stage in enumerate(stages, start=1):
            events.append(_name("thread_name", stage, pid, tid))
            for span in spans.stages[stage]:
                name = f"block {span.block}"
                events.append(_complete(name, stage, span, spans.first_s, pid, tid))
    receipt_tid = STAGES["sender"].index("send") + 1
    events.append(_complete("receipt", "receipt", spans.receipt, spans.first_s, 1, receipt_tid))
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "handoff_id": receipt.handoff_id,
            "tokens": receipt.tokens,
            "codec": receipt.codec,
            "trust": receipt.trust,
            "wire_bytes": receipt.wire_bytes,
            "clocks": "Each side counts from the reply to Reserve on its own clock; times of two "
            "sides are not comparable beyond that.",
        },
    }


def _name(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _instant(name: str, spans: Spans, pid: int) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": name, "ts": -spans.first_s * _US, "pid": pid, "tid": 1}


def _complete(
    name: str, category: str, span: Span, first_s: float, pid: int, tid: int
) -> dict[str, Any]:
    """A complete event. Viewers take no negative times, so the earliest span begins at 0."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": (span.begin_s - first_s) * _US,
        "dur": (span.end_s - span.begin_s) * _US,
        "pid": pid,
        "tid": tid,
        "args": {"block": span.block},
    }
