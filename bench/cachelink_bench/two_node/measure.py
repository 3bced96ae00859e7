"""Measures a run as a client of two nodes; loads no torch, so it may run anywhere beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from cachelink_bench.two_node.plan import TEXT, Plan
from cachelink_bench.two_node.runs import PREFILL, Key, Run, RunLog
from cachelink_bench.two_node.subjects import WARM_UP, Subject
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.rpc.client import (
    Document,
    HeldCache,
    Question,
    Receipt,
    ReceiverClient,
    Sampling,
    SenderClient,
)
from cachelink_core.rpc.types import Context, Phases

DEADLINE_S: Final = 3600.0
"""For one prefill or answer: a long document on a slow machine."""

FORGET_DEADLINE_S: Final = 3.0
"""For an eviction: after Ctrl-C the daemon may be ending as well."""

OnWork = Callable[[str, float], None]
"""Told what runs now, and how much work ended before it."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two daemons as their client sees them.

    Attributes:
        sender: that reads documents.
        receiver: that answers.
        receiver_name: of the receiver in the sender's list.
    """

    sender: SenderClient
    receiver: ReceiverClient
    receiver_name: str


class Said(NamedTuple):
    """One answer."""

    ids: tuple[int, ...]
    first_token_at_s: float
    ended_at_s: float
    path: str
    phases: Phases


class Measurement:
    """All runs of a plan that its log does not hold yet."""

    def __init__(self, plan: Plan, subjects: Sequence[Subject], nodes: Nodes, log: RunLog) -> None:
        """Binds a plan to two nodes.

        Args:
            plan: what to do.
            subjects: its documents, the warm-up's first.
            nodes: that do it.
            log: takes every run as soon as it is there.
        """
        self._plan = plan
        self._subjects = subjects
        self._nodes = nodes
        self._log = log

    def run(self, on_work: OnWork = lambda _what, _done: None) -> None:
        """Warms both ends up once, then measures.

        Args:
            on_work: told of each step; the shares of ``work`` that it gets sum to it.

        Raises:
            CacheLinkError: a node refused or failed.
        """
        done = self._log.done
        for subject in self._subjects:
            keys = [key for key in self._keys(subject) if key not in done]
            if keys and (subject.context != WARM_UP or self._left(done)):
                self._document(subject, keys, on_work)
        on_work("done", 0.0)

    def work(self) -> float:
        """How much is left to do, in tokens read by a model or about as dear."""
        done = self._log.done
        if not self._left(done):
            return 0.0
        return sum(
            _weight(subject, key[3])
            for subject in self._subjects
            for key in self._keys(subject)
            if key not in done
        )

    def _left(self, done: set[Key]) -> bool:
        real = (s for s in self._subjects if s.context != WARM_UP)
        return any(key not in done for subject in real for key in self._keys(subject))

    def _keys(self, subject: Subject) -> list[Key]:
        """A document's runs. The order of representations turns by one from repeat to repeat."""
        place = subject.context, subject.document
        keys: list[Key] = [(*place, 0, PREFILL)]
        names = self._plan.representations
        for repeat in range(1 if subject.context == WARM_UP else self._plan.repeats):
            turn = (repeat + subject.document) % len(names)
            keys += [(*place, repeat, name) for name in names[turn:] + names[:turn]]
        return keys

    def _document(self, subject: Subject, keys: Sequence[Key], on_work: OnWork) -> None:
        measured = subject.context != WARM_UP
        title = f"{subject.context} document {subject.document + 1}"
        on_work(f"{title}: prefill", 0.0)
        with self._prefilled(subject) as (receipt, prefill):
            on_work(f"{title}: prefill", _weight(subject, PREFILL))
            if measured and prefill.key in keys:
                self._log.add(prefill)
            for key in keys:
                _, _, repeat, name = key
                if name == PREFILL:
                    continue
                on_work(f"{title}: {name}", 0.0)
                run = self._measured(subject, repeat, name, receipt)
                on_work(f"{title}: {name}", _weight(subject, name))
                if measured:
                    self._log.add(run)

    @contextmanager
    def _prefilled(self, subject: Subject) -> Iterator[tuple[Receipt, Run]]:
        """Has the sender read the document, whole; forgets the cache at the end."""
        sender = self._nodes.sender
        document = Document(subject.text)
        receipt = sender.prefill(document, deadline_s=DEADLINE_S)
        if receipt.prefilled_tokens < receipt.tokens:  # some of it was there from an earlier run
            sender.evict(receipt.sender_cache_id)
            receipt = sender.prefill(document, deadline_s=DEADLINE_S)
        try:
            _check(subject, "tokens", receipt.tokens, subject.tokens)
            yield (
                receipt,
                Run(
                    context=subject.context,
                    document=subject.document,
                    repeat=0,
                    representation=PREFILL,
                    tokens=receipt.tokens,
                    handoff=dict(receipt.phases),
                ),
            )
        finally:
            _forget(sender, receipt.sender_cache_id)

    def _measured(self, subject: Subject, repeat: int, name: str, held: Receipt) -> Run:
        if name == TEXT:
            return self._re_read(subject, repeat)
        began = time.monotonic()
        receipt = self._handoff(name, held)
        if receipt.already_installed:  # left over from a run that was killed
            self._nodes.receiver.evict(receipt.cache_id)
            began = time.monotonic()
            receipt = self._handoff(name, held)
        try:
            said = self._ask(HeldCache(receipt.cache_id), subject.question)
        finally:
            _forget(self._nodes.receiver, receipt.cache_id)
        return Run(
            context=subject.context,
            document=subject.document,
            repeat=repeat,
            representation=name,
            tokens=receipt.tokens,
            payload_bytes=receipt.wire_bytes,
            handoff=dict(receipt.phases),
            answer=dict(said.phases),
            first_token_s=said.first_token_at_s - began,
            round_trip_s=said.ended_at_s - began,
            ids=said.ids,
        )

    def _handoff(self, codec: str, held: Receipt) -> Receipt:
        return self._nodes.sender.handoff(
            HeldCache(held.sender_cache_id),
            self._nodes.receiver_name,
            codec=codec,
            deadline_s=DEADLINE_S,
        )

    def _re_read(self, subject: Subject, repeat: int) -> Run:
        began = time.monotonic()
        said = self._ask(Document(subject.text), subject.question)
        _check(subject, "path", said.path, "recompute")
        return Run(
            context=subject.context,
            document=subject.document,
            repeat=repeat,
            representation=TEXT,
            tokens=subject.tokens,
            payload_bytes=len(subject.text.encode()),
            answer=dict(said.phases),
            first_token_s=said.first_token_at_s - began,
            round_trip_s=said.ended_at_s - began,
            ids=said.ids,
        )

    def _ask(self, context: Context, question: str) -> Said:
        ids: list[int] = []
        first_s = 0.0
        with self._nodes.receiver.answer(
            context,
            Question(question),
            sampling=Sampling(max_new_tokens=self._plan.decode, ignore_eos=True),
            deadline_s=DEADLINE_S,
        ) as answer:
            for delta in answer:
                if delta.token_ids and not ids:
                    first_s = time.monotonic()
                ids += delta.token_ids
            ended_s = time.monotonic()
        assert answer.final is not None, "the answer was read to its end"
        return Said(tuple(ids), first_s, ended_s, answer.final.path, answer.final.phases)


def measure(
    plan: Plan,
    subjects: Sequence[Subject],
    log: RunLog,
    *,
    sender: str,
    receiver: str,
    receiver_name: str,
    watch: Callable[[float], OnWork],
) -> None:
    """Measures what is missing in a log.

    Args:
        plan: what to do.
        subjects: its documents.
        log: of all runs.
        sender: its address.
        receiver: its address.
        receiver_name: of the receiver in the sender's list.
        watch: told how much work there is, gives what is told of it.

    Raises:
        CacheLinkError: a node cannot be reached, refused or failed.
    """
    with ExitStack() as stack:
        nodes = Nodes(
            stack.enter_context(SenderClient(sender)),
            stack.enter_context(ReceiverClient(receiver)),
            receiver_name,
        )
        measurement = Measurement(plan, subjects, nodes, log)
        measurement.run(watch(measurement.work()))


def _weight(subject: Subject, name: str) -> float:
    """Work of one run: reading costs most, moving a cache about a tenth."""
    share = 1.0 if name in (PREFILL, TEXT) else 0.1
    return share * subject.tokens + 100.0


def _forget(client: SenderClient | ReceiverClient, cache_id: str) -> None:
    with suppress(CacheLinkError):  # it is gone, or the node is: nothing to clean up
        client.evict(cache_id, deadline_s=FORGET_DEADLINE_S)


def _check(subject: Subject, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise InternalError(
            f"{subject.context} document {subject.document}: {what} is {found!r}, not {wanted!r}"
        )
