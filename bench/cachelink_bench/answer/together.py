"""Several questions to one cache at once, by each policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cachelink_bench.answer.batch import batch_cache, forward
from cachelink_bench.answer.subject import HEADROOM_TOKENS, NAME, TENANT, Subject
from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.errors import SlotsTaken
from cachelink_core.kv.branch import Branch
from cachelink_core.kv.prefix_cache import PrefixCache

MOST: Final = 4
"""Questions that a subject has."""

Open = Callable[[Subject, ExitStack], PrefixCache]


@dataclass(frozen=True, slots=True)
class Together:
    """All answers of one round.

    Attributes:
        total_s: until the last answer has ended.
        first_s: of each question, to its first token.
        done_s: of each question, to its last token.
        ids: of each answer.
        logits: float32 ``[V]`` of each answer's last token.
    """

    total_s: float
    first_s: tuple[float, ...]
    done_s: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]


def in_order(subject: Subject, stack: ExitStack) -> PrefixCache:
    """The cache itself, when those before have ended."""
    entry = stack.enter_context(subject.store.lease(TENANT, NAME)).stored
    stack.callback(entry.cache.truncate, len(entry.ids))
    return entry.cache


def copied(subject: Subject, stack: ExitStack) -> PrefixCache:
    """The cache itself for the first, a copy for each other."""
    try:
        lease = stack.enter_context(subject.store.lease(TENANT, NAME, timeout_s=0.0))
    except SlotsTaken:
        entry = stack.enter_context(subject.store.pin(TENANT, NAME))
        size = subject.engine.cache_bytes(subject.tokens, HEADROOM_TOKENS, whole=True)
        stack.enter_context(subject.store.reserve(size))
        return entry.cache.copy(subject.tokens, HEADROOM_TOKENS)
    stack.callback(lease.stored.cache.truncate, subject.tokens)
    return lease.stored.cache


def shared(subject: Subject, stack: ExitStack) -> PrefixCache:
    """A share of the cache: what a receiver does unless told otherwise."""
    entry = stack.enter_context(subject.store.share(TENANT, NAME))
    branch = Branch(entry.cache)
    stack.callback(branch.close)
    return branch


POLICIES: dict[str, Open] = {"in order": in_order, "copied": copied, "shared": shared}


def ask(subject: Subject, questions: int, opened: Open, *, first: int = 0) -> Together:
    """Asks ``questions`` questions from the ``first`` on, each in a thread of its own.

    Raises:
        Exception: what a question's thread raised.
    """
    answers = [_Answer() for _ in range(questions)]
    start, over = threading.Barrier(questions + 1), threading.Event()

    def answer(number: int) -> None:
        start.wait()
        with ExitStack() as stack:
            cache = opened(subject, stack)
            steps = subject.engine.generate_steps(
                cache, subject.ids, subject.queries[first + number], subject.sampling
            )
            for step in steps:
                answers[number].note(step.token_id, step.logits)
                if over.is_set():
                    return

    with ThreadPoolExecutor(questions) as threads:
        asked = [threads.submit(answer, number) for number in range(questions)]
        try:
            began = time.perf_counter()  # before a thread can pass the barrier
            start.wait()
            for each in asked:
                each.result()
            total_s = time.perf_counter() - began
        except BaseException:
            over.set()
            start.abort()  # nobody waits for one that will not come
            raise
    return _together(answers, began, total_s)


def ask_batched(subject: Subject, questions: int) -> Together:
    """One forward a token for all of them; copying the prefix is within the clock."""
    answers = [_Answer() for _ in range(questions)]
    model, count = subject.engine.model, subject.sampling.max_new_tokens
    argument = cache_argument(model)
    began = time.perf_counter()
    cache = batch_cache(subject.cache, questions, len(subject.queries[0]) + count)
    ids = torch.tensor(subject.queries[:questions])
    for _ in range(count):
        logits = forward(model, argument, cache, ids)
        chosen = logits.argmax(dim=-1)
        for answer, token, row in zip(answers, chosen.tolist(), logits, strict=True):
            answer.note(token, row)
        ids = chosen.unsqueeze(1)
    return _together(answers, began, time.perf_counter() - began)


class _Answer:
    """Tokens of one answer and when they came."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.at: list[float] = []
        self.logits = torch.empty(0)

    def note(self, token: int, logits: Tensor) -> None:
        self.at.append(time.perf_counter())
        self.ids.append(token)
        self.logits = logits


def _together(answers: list[_Answer], began: float, total_s: float) -> Together:
    return Together(
        total_s=total_s,
        first_s=tuple(answer.at[0] - began for answer in answers),
        done_s=tuple(answer.at[-1] - began for answer in answers),
        ids=tuple(tuple(answer.ids) for answer in answers),
        logits=tuple(answer.logits for answer in answers),
    )
