"""Whether an answer takes the cache, waits for it, or reads the prefix again: ``policy: auto``.

The choice is made when the question arrives, and again every quarter of a second while it waits for a
cache that is still arriving. How long that will take follows from what has arrived so far; while nothing
has, from how long it has been waited for already, so that the wait is never much longer than reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from cachelink_core.codec_spec import Trust
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.engine.header_memory import HeaderMemory
from cachelink_core.engine.store import CacheStore
from cachelink_core.errors import StillInTransfer
from cachelink_core.node.arrivals import Arrivals, Arriving
from cachelink_core.node.measured import Measured
from cachelink_core.planner import (
    TEXT,
    Job,
    Measures,
    Plan,
    Prediction,
    Queue,
    Wanted,
    Way,
    predict,
)
from cachelink_core.planner.choice import decide
from cachelink_core.planner.readings import Load, measures_of
from cachelink_core.planner.shape import shape_of
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.types import AnswerRequest

_LOOK_S: Final = 0.25
"""How often a waiting answer looks whether waiting is still the better choice."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for one question.

    Attributes:
        plan: with every prediction; None where there was nothing to decide on.
        prefix: to be read again if the plan says so.
        waited_s: for a cache that was arriving.
    """

    plan: Plan | None
    prefix: Prefix | None
    waited_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a cache that was asked for."""

    prefix: Prefix
    trust: Trust
    codec: str
    left_s: float
    turns: int


class Chooser:
    """Decides for the questions of one node. Safe for threads."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: CacheStore,
        memory: HeaderMemory,
        arrivals: Arrivals,
        measured: Measured,
        answers: Callable[[], int],
        block_tokens: int,
        in_line: bool,
    ) -> None:
        """Binds the node's parts.

        Args:
            engine: of the node's model.
            store: its caches.
            memory: token ids of caches that are gone.
            arrivals: handoffs under way.
            measured: what it decides on.
            answers: under way at this node, the one that asks included.
            block_tokens: the prefill schedule.
            in_line: whether questions to one cache wait for each other's end.
        """
        self._store = store
        self._memory = memory
        self._arrivals = arrivals
        self._measured = measured
        self._answers = answers
        self._in_line = in_line
        self._dtype = engine.identity.dtype
        self._shape = shape_of(engine.identity.layers, engine.identity.dtype, block_tokens)

    def settle(self, name: str, request: AnswerRequest, wait_s: float, call: Call) -> Choice:
        """Waits as long as waiting is the best choice, and decides.

        Raises:
            HandoffAborted: the caller is gone.
        """
        began = time.monotonic()
        while True:
            waited_s = time.monotonic() - began
            arriving = self._arrivals.arriving(call.tenant, name)
            seen = self._seen(name, call.tenant, arriving)
            if seen is None:
                return self._gone(name, call.tenant, waited_s)
            plan = self._plan(seen, request, waited_s)
            if arriving is None or plan.text:
                return Choice(plan, seen.prefix, waited_s)
            if waited_s >= wait_s:
                said = f"still arriving after {waited_s:.3f} s; {plan.why}"
                late = msgspec.structs.replace(plan, chosen=TEXT.name, why=said)
                return Choice(late, seen.prefix, waited_s)
            try:
                self._arrivals.wait(call.tenant, name, min(_LOOK_S, wait_s - waited_s), call)
            except StillInTransfer:
                continue

    def _seen(self, name: str, tenant: str, arriving: Arriving | None) -> _Seen | None:
        if arriving is not None:
            return _Seen(arriving.prefix, arriving.trust, arriving.codec, arriving.left_s, 0)
        entry = self._store.find(tenant, name)
        if entry is None:
            return None
        readers = [
            listed.pins
            for listed in self._store.list(tenant)
            if listed.stored.cache_id == entry.cache_id
        ]
        turns = sum(readers) if self._in_line else 0
        return _Seen(Prefix(entry.ids, entry.frame), entry.trust, entry.codec, 0.0, turns)

    def _gone(self, name: str, tenant: str, waited_s: float) -> Choice:
        """A cache that is neither here nor arriving can only be read again, by its header."""
        remembered = self._memory.recall(tenant, name)
        if remembered is None:
            return Choice(None, None, waited_s)
        prefix = Prefix(remembered.ids, remembered.frame)
        text = predict(TEXT, self._job(prefix), self._measures())
        plan = Plan(
            chosen=TEXT.name,
            why="the cache is gone",
            predicted_s=text.first_token_s,
            predictions=(text,),
        )
        return Choice(plan, prefix, waited_s)

    def _plan(self, seen: _Seen, request: AnswerRequest, waited_s: float) -> Plan:
        """Both predictions, from the request on: what was waited so far is spent either way."""
        job, measures = self._job(seen.prefix), self._measures()
        way = Way(seen.codec or "native", seen.trust == "mapped")
        busy = Queue(seen.turns, measures.receiver_queue.mean_s)
        ready_s = waited_s + seen.left_s + busy.wait_s
        first_s = ready_s + measures.query_s
        cache = Prediction(
            way=way.name,
            ready_s=ready_s,
            first_token_s=first_s,
            total_s=first_s,
            parts={"arrival": seen.left_s, "turn": busy.wait_s, "query": measures.query_s},
            excluded=refusal(request, seen.trust, seen.codec, self._dtype),
        )
        text = predict(TEXT, job, measures)
        if text.first_token_s is not None and text.ready_s is not None:
            text = msgspec.structs.replace(
                text,
                ready_s=text.ready_s + waited_s,
                first_token_s=text.first_token_s + waited_s,
                total_s=text.first_token_s + waited_s,
            )
        if cache.excluded:
            # The only way left, whatever it takes; there may be nothing to predict it from.
            text = msgspec.structs.replace(text, excluded="", total_s=text.total_s or 0.0)
        plan = decide((cache, text), job, measures)
        by_way = {each.way: each for each in plan.predictions}
        return msgspec.structs.replace(plan, predicted_s=by_way[plan.chosen].first_token_s)

    def _job(self, prefix: Prefix) -> Job:
        return Job(shape=self._shape, tokens=len(prefix.ids), answer_tokens=0)

    def _measures(self) -> Measures:
        """Of this node alone.

        Answers in line for one cache do not use the device, and neither does the one that asks.
        """
        own = self._measured.snapshot()
        lines = self._store.list() if self._in_line else ()
        queued = sum(max(0, listed.pins - 1) for listed in lines)
        load = Load(receiver_answers=max(0, self._answers() - 1 - queued))
        measures = measures_of((), own, "", load=load, link_bytes_per_s=1.0)
        return msgspec.structs.replace(measures, assumed=())


def refusal(request: AnswerRequest, trust: Trust, codec: str, dtype: str) -> str:
    """Why a cache is not good enough for a request; empty if it is."""
    error: float | None = 0.0
    if trust != "exact":
        error = Way(codec, trust == "mapped").error_nats(dtype) if codec else None
    return Wanted(request.least_trust, request.max_error).refusal_of(trust, error)
