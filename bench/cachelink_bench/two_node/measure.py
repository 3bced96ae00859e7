"""Measures a run as a client of two nodes; loads no torch, so it may run anywhere beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from cachelink_bench.turns import turned
from cachelink_bench.two_node.client import Addresses, Nodes, forget
from cachelink_bench.two_node.plan import TEXT, Mode, Plan
from cachelink_bench.two_node.prefill_times import PrefillTimes
from cachelink_bench.two_node.runs import PREFILL, Key, Run, RunLog
from cachelink_bench.two_node.stopping import Stop
from cachelink_bench.two_node.subjects import WARM_UP, Subject
from cachelink_core.errors import CacheLinkError, IdentityMismatch, InternalError
from cachelink_core.rpc.client import Document, HeldCache, Receipt

OnWork = Callable[[str, float], None]
"""Told what runs now, and how much work ended before it."""


class Measurement:
    """All runs of a plan that its log does not hold yet."""

    def __init__(
        self,
        plan: Plan,
        subjects: Sequence[Subject],
        nodes: Mapping[str, Nodes],
        log: RunLog,
        times: Mapping[Mode, PrefillTimes],
        *,
        bytes_only: bool,
    ) -> None:
        """Binds a plan to its nodes.

        Args:
            plan: what to do.
            subjects: its documents, the warm-up's first.
            nodes: that do it, two of each mode.
            log: takes every run as soon as it is there.
            times: of prefixes that the sender of each mode prefilled earlier.
            bytes_only: ask nothing: a run ends with its handoff.
        """
        self._times = times
        self._bytes_only = bytes_only
        self._plan = plan
        self._subjects = subjects
        self._nodes = nodes
        self._log = log

    def run(self, on_work: OnWork = lambda _what, _done: None) -> None:
        """Warms both ends up once, then measures.

        Args:
            on_work: told of each step; the shares of ``work`` that it gets sum to it.

        Raises:
            CacheLinkError: a node refused or failed; the message begins with what was done.
        """
        doing = ""

        def told(what: str, done: float) -> None:
            nonlocal doing
            doing = what
            on_work(what, done)

        try:
            self._documents(told)
        except CacheLinkError as error:
            raise _during(doing, error) from error
        on_work("done", 0.0)

    def _documents(self, on_work: OnWork) -> None:
        done = self._log.done
        for subject in self._subjects:
            keys = [key for key in self._keys(subject) if key not in done]
            if keys and (subject.context != WARM_UP or self._left(done)):
                self._document(subject, keys, on_work)

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
        """A document's runs, in an order that turns by one from repeat to repeat.

        The two modes of a representation follow each other, and so does which of them is first.
        """
        place = subject.context, subject.document
        names, modes = self._plan.representations, self._plan.modes
        keys: list[Key] = [(*place, 0, PREFILL, mode) for mode in modes]
        for repeat in range(1 if subject.context == WARM_UP else self._plan.repeats):
            turn = repeat + subject.document
            for name in turned(names, turn):
                in_turn: Sequence[str] = ("",) if name == TEXT else turned(modes, turn)
                keys += [(*place, repeat, name, mode) for mode in in_turn]
        return keys

    def _document(self, subject: Subject, keys: Sequence[Key], on_work: OnWork) -> None:
        measured = subject.context != WARM_UP
        title = f"{subject.context} document {subject.document + 1}"
        with ExitStack() as stack:
            held: dict[str, Receipt] = {}
            for mode in self._plan.modes:
                if not any(key[4] == mode for key in keys):
                    continue
                on_work(f"{title}: prefill", 0.0)
                held[mode], prefill = stack.enter_context(self._prefilled(subject, mode))
                if prefill.key in keys:
                    on_work(f"{title}: prefill", _weight(subject, PREFILL))
                    if measured and prefill.handoff:  # without a time, --resume asks again
                        self._log.add(prefill)
            for key in keys:
                if key[3] != PREFILL:
                    run = self._watched(subject, key, held, on_work)
                    if measured:
                        self._log.add(run)

    def _watched(
        self, subject: Subject, key: Key, held: Mapping[str, Receipt], on_work: OnWork
    ) -> Run:
        """One run of a document that was prefilled, shown."""
        _, _, repeat, name, mode = key
        shown = mode if len(self._plan.modes) > 1 else ""
        what = f"{subject.context} document {subject.document + 1}: {name} {shown}".rstrip()
        on_work(what, 0.0)
        if name == TEXT:
            run = self._re_read(subject, repeat)
        else:
            run = self._moved(subject, repeat, name, mode, held[mode])
        on_work(what, _weight(subject, name))
        return run

    @contextmanager
    def _prefilled(self, subject: Subject, mode: Mode) -> Iterator[tuple[Receipt, Run]]:
        """Has a sender read the document, or read it back from disk; forgets the cache at the end."""
        nodes = self._nodes[mode]
        receipt = nodes.read(subject.text)
        if receipt.prefix_origin == "held" or 0 < receipt.prefilled_tokens < receipt.tokens:
            nodes.sender.evict(receipt.sender_cache_id)  # some of it was there from an earlier run
            receipt = nodes.read(subject.text)
        try:
            _check(subject, "tokens", receipt.tokens, subject.tokens)
            yield receipt, self._prefill_run(subject, mode, receipt)
        finally:
            forget(nodes.sender, receipt.sender_cache_id)

    def _prefill_run(self, subject: Subject, mode: Mode, receipt: Receipt) -> Run:
        """Its time, or the earlier one of a cache that was captured; without one it has no phases."""
        run = Run(
            context=subject.context,
            document=subject.document,
            repeat=0,
            representation=PREFILL,
            mode=mode,
            tokens=receipt.tokens,
        )
        if receipt.prefilled_tokens == receipt.tokens:
            self._times[mode].add(subject.ids_digest, receipt.phases["prefill"])
            return msgspec.structs.replace(run, handoff=dict(receipt.phases))
        known = self._times[mode].get(subject.ids_digest)
        if known is None:
            return run
        return msgspec.structs.replace(run, handoff={"prefill": known.seconds}, earlier=known.date)

    def _moved(self, subject: Subject, repeat: int, name: str, mode: str, held: Receipt) -> Run:
        nodes = self._nodes[mode]
        began = time.monotonic()
        receipt = nodes.hand_over(name, held)
        if receipt.already_installed:  # left over from a run that was killed
            nodes.receiver.evict(receipt.cache_id)
            began = time.monotonic()
            receipt = nodes.hand_over(name, held)
        run = Run(
            context=subject.context,
            document=subject.document,
            repeat=repeat,
            representation=name,
            mode=mode,
            tokens=receipt.tokens,
            payload_bytes=receipt.wire_bytes,
            handoff=dict(receipt.phases),
            round_trip_s=time.monotonic() - began,
        )
        try:
            if self._bytes_only:
                return run
            context = HeldCache(receipt.cache_id)
            said = nodes.ask(context, subject.question, self._plan.decode)
        finally:
            forget(nodes.receiver, receipt.cache_id)
        return msgspec.structs.replace(
            run,
            answer=dict(said.phases),
            first_token_s=said.first_token_at_s - began,
            round_trip_s=said.ended_at_s - began,
            ids=said.ids,
        )

    def _re_read(self, subject: Subject, repeat: int) -> Run:
        nodes = self._nodes[self._plan.modes[0]]
        began = time.monotonic()
        said = nodes.ask(Document(subject.text), subject.question, self._plan.decode)
        _check(subject, "path", said.path, "recompute")
        return Run(
            context=subject.context,
            document=subject.document,
            repeat=repeat,
            representation=TEXT,
            mode="",
            tokens=subject.tokens,
            payload_bytes=len(subject.text.encode()),
            answer=dict(said.phases),
            first_token_s=said.first_token_at_s - began,
            round_trip_s=said.ended_at_s - began,
            ids=said.ids,
        )


def measure(
    plan: Plan,
    subjects: Sequence[Subject],
    log: RunLog,
    pairs: Mapping[Mode, Addresses],
    watch: Callable[[float], OnWork],
    stop: Stop,
    *,
    times: Mapping[Mode, PrefillTimes],
    bytes_only: bool = False,
) -> None:
    """Measures what is missing in a log.

    Args:
        plan: what to do.
        subjects: its documents.
        log: of all runs.
        pairs: where the nodes of each mode are.
        watch: told how much work there is, gives what is told of it.
        stop: asked now and then.
        times: of prefixes that the sender of each mode prefilled earlier.
        bytes_only: ask nothing: a run ends with its handoff.

    Raises:
        HandoffAborted: it was asked to stop.
        CacheLinkError: a node cannot be reached, refused or failed.
    """
    with ExitStack() as stack:
        nodes: dict[str, Nodes] = {
            mode: Nodes(
                stack.enter_context(at.connection.sender(at.sender)),
                stack.enter_context(at.connection.receiver(at.receiver)),
                at.receiver_name,
                stop,
            )
            for mode, at in pairs.items()
        }
        measurement = Measurement(plan, subjects, nodes, log, times, bytes_only=bytes_only)
        measurement.run(watch(measurement.work()))


def _weight(subject: Subject, name: str) -> float:
    """Work of one run: reading costs most, moving a cache about a tenth."""
    share = 1.0 if name in (PREFILL, TEXT) else 0.1
    return share * subject.tokens + 100.0


def _during(doing: str, error: CacheLinkError) -> CacheLinkError:
    """The same error, with what was being done."""
    message = f"{doing}: {error}"
    if isinstance(error, IdentityMismatch):
        return IdentityMismatch(error.diffs, message)
    return type(error)(message)


def _check(subject: Subject, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise InternalError(
            f"{subject.context} document {subject.document}: {what} is {found!r}, not {wanted!r}"
        )
