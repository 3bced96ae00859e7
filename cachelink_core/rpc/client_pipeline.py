"""The one-slot pipeline over two nodes: the sender prepares, the receiver answers.

stages = HandoffStages(sender, receiver, "receiver", codec="int4")
tasks = [Task(Document(text), Question("Who wrote it?")) for text in documents]
with pipelined(tasks, stages) as outcomes:
    for outcome in outcomes:
        print(outcome.index, outcome.value().text)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final as Constant

from cachelink_core.errors import CacheLinkError, InvalidRequest
from cachelink_core.rpc.client_sync import ReceiverClient, SenderClient
from cachelink_core.rpc.pipeline import OneSlotPipeline, Stop
from cachelink_core.rpc.types import (
    Context,
    Final,
    HeldCache,
    PrefixSource,
    Progress,
    Query,
    Receipt,
    Sampling,
)

_SETTLE_S: Constant = 2.0
"""Other handoffs may be arriving all the time; what crosses a cancellation does so within this."""

_SETTLE_POLL_S: Constant = 0.02


@dataclass(frozen=True, slots=True)
class Task:
    """One item: a prefix that the sender reads, and what the receiver is asked about it."""

    prefix: PrefixSource
    query: Query
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task whose cache is at the receiver."""

    task: Task
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Answered:
    """A task's answer, read to its end.

    Attributes:
        text: of the answer.
        token_ids: every generated token.
        final: how it ended.
        receipt: of the handoff it was made from.
    """

    text: str
    token_ids: tuple[int, ...]
    final: Final
    receipt: Receipt


@dataclass(slots=True)
class _Use:
    """The caches of one prefix: how many tasks need them, and which of them are ours to evict."""

    users: int = 0
    ours: set[tuple[SenderClient | ReceiverClient, str]] = field(default_factory=set)


class HandoffStages:
    """Prepare, answer, release: the three callables of a pipeline.

    What a handoff brought is evicted on both nodes when its answer has ended. What a node held
    before stays there. Equal prefixes that follow each other share one cache, which is evicted after
    the last of them; two that differ and give the same ids do not know of each other. What was
    prefilled for a handoff that failed stays at the sender, for the next attempt.
    """

    def __init__(
        self,
        sender: SenderClient,
        receiver: ReceiverClient,
        receiver_name: str,
        *,
        codec: str = "",
        mapper: str = "",
    ) -> None:
        """Binds two nodes.

        Args:
            sender: that reads the prefixes.
            receiver: that answers.
            receiver_name: of the receiver in the sender's list.
            codec: ``native``, ``int4+zstd`` and the like; the sender's default if empty.
            mapper: digest of a mapper, ``any`` or ``none``.
        """
        self._sender = sender
        self._receiver = receiver
        self._receiver_name = receiver_name
        self._codec = codec
        self._mapper = mapper
        self._lock = threading.Lock()
        self._uses: dict[PrefixSource, _Use] = {}

    def prepare(self, task: Task, stop: Stop) -> PreparedTask:
        """Has the sender read a prefix and hand its cache over.

        It looks at ``stop`` at each progress event, which the sender sends every fifth of a second.

        Raises:
            CacheLinkError: the handoff failed.
        """
        with self._lock:
            self._uses.setdefault(task.prefix, _Use()).users += 1
        handoff_id = ""

        def watch(progress: Progress) -> None:
            nonlocal handoff_id
            handoff_id = progress.handoff_id
            stop.check()

        try:
            receipt = self._sender.handoff(
                task.prefix,
                self._receiver_name,
                codec=self._codec,
                mapper=self._mapper,
                on_progress=watch,
            )
        except BaseException:
            self._leave(task.prefix)
            if handoff_id:
                with suppress(CacheLinkError):
                    self._evict_arrived(handoff_id)
            raise
        with self._lock:
            ours = self._uses[task.prefix].ours
            if receipt.cache_id and not receipt.already_installed:
                ours.add((self._receiver, receipt.cache_id))
            if receipt.prefix_origin in ("prefilled", "captured"):
                ours.add((self._sender, receipt.sender_cache_id))
        return PreparedTask(task, receipt)

    def answer(self, prepared: PreparedTask, stop: Stop) -> Answered:
        """Asks the receiver, and reads the answer to its end.

        Raises:
            CacheLinkError: the answer failed.
        """
        task, receipt = prepared.task, prepared.receipt
        token_ids: list[int] = []
        text = ""
        context = _context(task, receipt)
        with self._receiver.answer(context, task.query, sampling=task.sampling) as running:
            for delta in running:
                stop.check()
                text += delta.text
                token_ids += delta.token_ids
            assert running.final is not None, "the answer was read to its end"
            return Answered(text, tuple(token_ids), running.final, receipt)

    def release(self, prepared: PreparedTask) -> None:
        """Evicts the cache on both nodes, unless the next task needs it or it was there before.

        A node that cannot be reached keeps it for its time to live.
        """
        self._leave(prepared.task.prefix)

    def _evict_arrived(self, handoff_id: str) -> None:
        """Evicts what a handoff that was given up has brought all the same.

        Giving up and the commit may cross. Once nothing is arriving any more it is settled.
        """
        ends_s = time.monotonic() + _SETTLE_S
        while True:
            listing = self._receiver.caches()
            for cache in listing.caches:
                if cache.handoff_id == handoff_id:
                    self._receiver.evict(cache.cache_id)
                    return
            if not listing.reserved_bytes or time.monotonic() > ends_s:
                return
            time.sleep(_SETTLE_POLL_S)

    def _leave(self, prefix: PrefixSource) -> None:
        with self._lock:
            use = self._uses[prefix]
            use.users -= 1
            if use.users:
                return
            del self._uses[prefix]
        for client, cache_id in use.ours:
            with suppress(CacheLinkError):
                client.evict(cache_id)


def _context(task: Task, receipt: Receipt) -> Context:
    """The installed cache, or the prefix itself where codec ``auto`` sent nothing."""
    if receipt.cache_id and receipt.recommendation != "re_read":
        return HeldCache(receipt.cache_id)
    if isinstance(task.prefix, HeldCache):
        raise InvalidRequest(
            "codec 'auto' chose that the receiver reads the prefix, which is given as a cache"
        )
    return task.prefix


def pipelined(
    tasks: Iterable[Task], stages: HandoffStages
) -> OneSlotPipeline[Task, PreparedTask, Answered]:
    """Answers tasks in order, each one's cache prepared while the one before is answered."""
    return OneSlotPipeline(tasks, stages.prepare, stages.answer, stages.release)


__all__ = ["Answered", "HandoffStages", "PreparedTask", "Task", "pipelined"]
