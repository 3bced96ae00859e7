"""Opens what an answer is made from: an installed cache, one still arriving, or a prefix read here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cachelink_core.codec_spec import Trust
from cachelink_core.engine.base import Engine, Prefix
from cachelink_core.engine.header_memory import HeaderMemory
from cachelink_core.engine.store import CacheStore, StoredCache
from cachelink_core.errors import (
    BudgetExceeded,
    CacheLinkError,
    HeadroomExceeded,
    InsufficientTrust,
    ResourceExhausted,
    SlotsTaken,
    StillInTransfer,
    UnknownCache,
)
from cachelink_core.kv.branch import Branch
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import QueryFrame
from cachelink_core.metrics import Metrics
from cachelink_core.node.arrivals import Arrivals
from cachelink_core.node.choosing import Choice, Chooser, refusal
from cachelink_core.node.measured import BlockClock, Measured
from cachelink_core.node.queries import prefix_of
from cachelink_core.planner import Plan
from cachelink_core.rpc.handlers import Call
from cachelink_core.rpc.types import AnswerRequest, HeldCache, HeldHandoff, Path

OverlapPolicy = Literal["share", "wait", "copy"]
"""What a question does that finds its cache busy: take turns with the others token by token, wait
until they have ended, or take a copy."""


@dataclass
class Opened:
    """A prefix ready to be asked.

    Attributes:
        cache: holding the prefix; this answer alone may write behind it.
        ids: of the prefix.
        frame: around a question.
        path: how it came to be here.
        why: in words.
        cached_tokens: taken from a cache.
        fresh_tokens: read for this answer.
        trust: what an answer's cache is worth.
        cache_id: its name, if it has one.
        phases: seconds spent so far.
        plan: why this way, where there was a choice.
    """

    cache: PrefixCache
    ids: tuple[int, ...]
    frame: QueryFrame
    path: Path
    why: str
    cached_tokens: int
    fresh_tokens: int
    trust: Trust
    cache_id: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    plan: Plan | None = None


class Reader(Protocol):
    """Reads a prefix with this node's own model."""

    def read(
        self, prefix: Prefix, room: int, call: Call
    ) -> AbstractContextManager[tuple[PrefixCache, int]]:
        """Gives a cache that holds the prefix, and how many of its tokens were read just now.

        Args:
            prefix: what to read.
            room: tokens of room needed behind it.
            call: of the caller; reading stops when it is cancelled.

        Raises:
            BudgetExceeded: no room for it.
            HandoffAborted: the caller is gone.
        """


class TransientReader:
    """Reads a prefix for one answer and forgets it."""

    def __init__(
        self, engine: Engine, store: CacheStore, measured: Measured, block_tokens: int
    ) -> None:
        """Binds engine, byte budget, what notes the times, and prefill schedule."""
        self._engine = engine
        self._store = store
        self._measured = measured
        self._block_tokens = block_tokens

    @contextmanager
    def read(self, prefix: Prefix, room: int, call: Call) -> Iterator[tuple[PrefixCache, int]]:
        """See ``Reader``."""
        size = self._engine.cache_bytes(len(prefix.ids), room, whole=True)
        with self._store.reserve(size):
            cache = self._engine.open_cache(len(prefix.ids), room, whole=True)
            clock = BlockClock(0, len(prefix.ids), self._block_tokens)
            self._engine.prefill(
                cache, prefix.ids, self._block_tokens, on_block=clock, cancelled=call.cancelled
            )
            cache.use_window()
            self._measured.prefilled(clock.blocks)
            yield cache, len(prefix.ids)


class Contexts:
    """Opens contexts and applies the policies: waiting, trust, fallback, overlap, growth."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: CacheStore,
        memory: HeaderMemory,
        reader: Reader,
        arrivals: Arrivals,
        chooser: Chooser,
        metrics: Metrics,
        headroom_tokens: int,
        overlap: OverlapPolicy,
        default_wait_s: float,
    ) -> None:
        """Binds the node's parts."""
        self._engine = engine
        self._store = store
        self._memory = memory
        self._reader = reader
        self._arrivals = arrivals
        self._chooser = chooser
        self._metrics = metrics
        self._headroom_tokens = headroom_tokens
        self._overlap = overlap
        self._default_wait_s = default_wait_s

    @contextmanager
    def open(self, request: AnswerRequest, room: int, call: Call) -> Iterator[Opened]:
        """Opens the context of a request.

        Args:
            request: names the context and the policies.
            room: tokens of room needed behind the prefix; the query may need more, see ``grown``.
            call: of the caller.

        Raises:
            UnknownCache: no such cache, and re-reading was not asked for or is impossible.
            StillInTransfer: still arriving after the wait.
            InsufficientTrust: less exact than asked for.
            ResourceExhausted: no room to re-read.
        """
        context = request.context
        if not isinstance(context, HeldCache | HeldHandoff):
            prefix = prefix_of(self._engine.tokens, context)
            with self._read(prefix, room, "the request gives the prefix itself", call) as opened:
                yield opened
            return
        name = context.cache_id if isinstance(context, HeldCache) else context.handoff_id
        if request.policy == "auto":
            with self._chosen(name, request, room, call) as opened:
                yield opened
            return
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(self._held(name, request, call))
            except (UnknownCache, InsufficientTrust) as error:
                if request.on_failure != "recompute" or isinstance(error, StillInTransfer):
                    raise
                prefix = self._remembered(name, call.tenant, error)
                cause = self._arrivals.failure(call.tenant, name) or error
                self._metrics.fallback_recompute.labels(reason=cause.reason).inc()
                why = f"{cause.reason}: {cause}"
                opened = stack.enter_context(self._read(prefix, room, why, call))
            yield opened

    @contextmanager
    def _chosen(self, name: str, request: AnswerRequest, room: int, call: Call) -> Iterator[Opened]:
        """What the planner chose; the prefix is read again where a chosen cache is gone after all."""
        wait_s = self._wait_s(request)
        choice = self._chooser.settle(name, request, wait_s, call)
        with ExitStack() as stack:
            opened = self._try_cache(stack, name, request, choice, call)
            if opened is None:
                prefix, why = self._to_read(name, choice, call)
                opened = stack.enter_context(self._read(prefix, room, why, call))
            opened.plan = choice.plan
            opened.phases["wait"] = opened.phases.get("wait", 0.0) + choice.waited_s
            yield opened

    def _try_cache(
        self, stack: ExitStack, name: str, request: AnswerRequest, choice: Choice, call: Call
    ) -> Opened | None:
        if choice.plan is not None and choice.plan.text:
            return None
        try:
            return stack.enter_context(self._held(name, request, call))
        except (UnknownCache, InsufficientTrust):
            if choice.prefix is None:
                raise
            return None

    def _to_read(self, name: str, choice: Choice, call: Call) -> tuple[Prefix, str]:
        assert choice.prefix is not None, "something to read was seen"
        failed = self._arrivals.failure(call.tenant, name)
        if failed is not None:
            self._metrics.fallback_recompute.labels(reason=failed.reason).inc()
            return choice.prefix, f"{failed.reason}: {failed}"
        return choice.prefix, choice.plan.why if choice.plan else "the cache is gone"

    @contextmanager
    def grown(self, opened: Opened, room: int) -> Iterator[PrefixCache]:
        """The cache with at least ``room`` tokens behind the prefix, copied if it has to be.

        Raises:
            HeadroomExceeded: it has less room, and the byte budget does not allow a copy.
        """
        cache = opened.cache
        if cache.capacity - cache.length >= room:
            yield cache
            return
        size = self._engine.cache_bytes(len(opened.ids), room, whole=True)
        try:
            reservation = self._store.reserve(size)
        except ResourceExhausted as error:
            raise HeadroomExceeded(
                f"query and answer need {room} tokens of room, the cache has "
                f"{cache.capacity - cache.length}, and it cannot grow: {error}"
            ) from error
        with reservation:
            yield cache.copy(len(opened.ids), room)

    @contextmanager
    def _held(self, name: str, request: AnswerRequest, call: Call) -> Iterator[Opened]:
        began = time.monotonic()
        self._await(name, request, call)
        phases = {"wait": time.monotonic() - began}
        began = time.monotonic()
        with self._writable(name, call) as (entry, cache):
            refused = refusal(request, entry.trust, entry.codec, self._engine.identity.dtype)
            if refused:
                raise InsufficientTrust(f"cache {entry.cache_id}: {refused}")
            phases["queue"] = time.monotonic() - began
            yield Opened(
                cache=cache,
                ids=entry.ids,
                frame=entry.frame,
                path=entry.trust,
                why=f"cache {entry.cache_id} is installed" + (entry.note and f"; {entry.note}"),
                cached_tokens=len(entry.ids),
                fresh_tokens=0,
                trust=entry.trust,
                cache_id=entry.cache_id,
                phases=phases,
            )

    def _await(self, name: str, request: AnswerRequest, call: Call) -> None:
        """Waits for a cache that is still arriving; one that is here needs no wait."""
        self._metrics.cache_lookups.inc()
        if self._store.find(call.tenant, name) is None:
            self._arrivals.wait(call.tenant, name, self._wait_s(request), call)

    def _wait_s(self, request: AnswerRequest) -> float:
        return self._default_wait_s if request.wait_s is None else request.wait_s

    @contextmanager
    def _writable(self, name: str, call: Call) -> Iterator[tuple[StoredCache, PrefixCache]]:
        """The entry and a cache of its prefix that this answer alone sees itself write to.

        By policy a share of the entry's own, a copy if another answer has it and the budget allows,
        or the entry's own in turn.
        """
        with ExitStack() as stack:
            entry: StoredCache
            if self._overlap == "share":
                entry = stack.enter_context(
                    self._store.share(call.tenant, name, cancelled=call.cancelled)
                )
                branch = Branch(entry.cache)
                stack.callback(branch.close)
                self._metrics.cache_hits.inc()
                yield entry, branch
                return
            copied = self._copied(stack, name, call) if self._overlap == "copy" else None
            if copied is None:
                copied = self._own(stack, name, call, timeout_s=None)
            self._metrics.cache_hits.inc()
            yield copied

    def _own(
        self, stack: ExitStack, name: str, call: Call, *, timeout_s: float | None
    ) -> tuple[StoredCache, PrefixCache]:
        """The entry's own cache, in turn."""
        lease = stack.enter_context(
            self._store.lease(call.tenant, name, timeout_s=timeout_s, cancelled=call.cancelled)
        )
        entry = lease.stored
        stack.callback(entry.cache.truncate, len(entry.ids))
        return entry, entry.cache

    def _copied(
        self, stack: ExitStack, name: str, call: Call
    ) -> tuple[StoredCache, PrefixCache] | None:
        """The entry's own if nobody has it, else a copy; None if the budget has no room for one."""
        try:
            return self._own(stack, name, call, timeout_s=0.0)
        except SlotsTaken:
            entry = stack.enter_context(self._store.pin(call.tenant, name))
        tokens = len(entry.ids)
        size = self._engine.cache_bytes(tokens, self._headroom_tokens, whole=True)
        try:
            stack.enter_context(self._store.reserve(size))
        except BudgetExceeded:
            return None
        return entry, entry.cache.copy(tokens, self._headroom_tokens)

    @contextmanager
    def _read(self, prefix: Prefix, room: int, why: str, call: Call) -> Iterator[Opened]:
        began = time.monotonic()
        with self._reader.read(prefix, room, call) as (cache, fresh):
            elapsed = time.monotonic() - began
            self._metrics.tokens.labels(kind="prefix").inc(fresh)
            cached = len(prefix.ids) - fresh
            yield Opened(
                cache=cache,
                ids=prefix.ids,
                frame=prefix.frame,
                path="exact" if cached else "recompute",
                why=why,
                cached_tokens=cached,
                fresh_tokens=fresh,
                trust="exact",
                phases={"prefix": elapsed},
            )

    def _remembered(self, name: str, tenant: str, error: CacheLinkError) -> Prefix:
        entry = self._store.find(tenant, name)
        if entry is not None:
            return Prefix(entry.ids, entry.frame)
        remembered = self._memory.recall(tenant, name)
        if remembered is None:
            raise error
        return Prefix(remembered.ids, remembered.frame)
