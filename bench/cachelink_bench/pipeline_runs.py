"""The measuring half of ``pipeline``: both arms over two nodes, and how many caches were alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cachelink_bench.two_node.corpus import Corpus
from cachelink_core.errors import CacheLinkError, InternalError
from cachelink_core.rpc.client import (
    Answered,
    Document,
    HandoffStages,
    Question,
    ReceiverClient,
    Sampling,
    SenderClient,
    Stop,
    Task,
    pipelined,
)

SERIAL: Final = "serial"
PIPELINED: Final = "pipelined"
ARMS: Final = (SERIAL, PIPELINED)

MOST_ALIVE: Final = 2
"""The cache being answered and the next one."""

_LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """All items once, by one arm.

    Attributes:
        wall_s: from the first preparation's begin to the last answer's end, evictions included.
        prepare_s: of each item: prefill and handoff.
        answer_s: of each item.
        most_alive: caches at the receiver at one moment: held, or arriving.
    """

    wall_s: float
    prepare_s: tuple[float, ...]
    answer_s: tuple[float, ...]
    most_alive: int

    @property
    def one_slot_s(self) -> float:
        """What these stages would take with one slot: the first, the last, and the slower each."""
        between = zip(self.prepare_s[1:], self.answer_s[:-1], strict=True)
        return self.prepare_s[0] + sum(max(pair) for pair in between) + self.answer_s[-1]

    @property
    def endless_ratio(self) -> float:
        """Serial over the slower stage, means of all items: the ratio for a run without end."""
        prepare_s, answer_s = sum(self.prepare_s), sum(self.answer_s)
        return (prepare_s + answer_s) / max(prepare_s, answer_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs by arm in the order in which they were made, and the tokens of each document."""

    runs: dict[str, list[Run]]
    prefix_tokens: tuple[int, ...]


def make_tasks(documents: int, sentences: int, decode: int) -> list[Task]:
    """Documents that differ, each with the question that its first sentence answers."""
    sampling = Sampling(max_new_tokens=decode, ignore_eos=True)
    corpora = [Corpus(f"pipeline {number}") for number in range(documents)]
    return [
        Task(
            Document(" ".join(islice(corpus.sentences(), sentences))),
            Question(corpus.question),
            sampling,
        )
        for corpus in corpora
    ]


def measure(
    sender: SenderClient,
    receiver: ReceiverClient,
    receiver_name: str,
    tasks: Sequence[Task],
    rounds: int,
    codec: str,
) -> Measured:
    """Runs both arms in turn, after a warm-up of two items each; the order turns every round.

    Raises:
        InternalError: an answer differs between the arms, or more than two caches were alive.
        CacheLinkError: a node failed.
    """
    stages = HandoffStages(sender, receiver, receiver_name, codec=codec)
    for arm in ARMS:
        _run(arm, tasks[:2], stages, receiver)
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    expected: list[Answered] = []
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            run, answers = _run(arm, tasks, stages, receiver)
            expected = expected or answers
            _check(arm, run, answers, expected)
            runs[arm].append(run)
    return Measured(runs, tuple(answered.receipt.tokens for answered in expected))


def _run(
    arm: str, tasks: Sequence[Task], stages: HandoffStages, receiver: ReceiverClient
) -> tuple[Run, list[Answered]]:
    answers: list[Answered] = []
    prepare_s: list[float] = []
    answer_s: list[float] = []
    with _watching(receiver) as counts:
        began = time.monotonic()
        for answered, preparing_s, answering_s in (
            _serial(tasks, stages) if arm == SERIAL else _pipelined(tasks, stages)
        ):
            answers.append(answered)
            prepare_s.append(preparing_s)
            answer_s.append(answering_s)
        wall_s = time.monotonic() - began
    return Run(wall_s, tuple(prepare_s), tuple(answer_s), max(counts)), answers


def _serial(
    tasks: Sequence[Task], stages: HandoffStages
) -> Iterator[tuple[Answered, float, float]]:
    stop = Stop()
    for task in tasks:
        began = time.monotonic()
        prepared = stages.prepare(task, stop)
        ready = time.monotonic()
        answered = stages.answer(prepared, stop)
        ended = time.monotonic()
        stages.release(prepared)
        yield answered, ready - began, ended - ready


def _pipelined(
    tasks: Sequence[Task], stages: HandoffStages
) -> Iterator[tuple[Answered, float, float]]:
    with pipelined(tasks, stages) as outcomes:
        for outcome in outcomes:
            yield outcome.value(), outcome.prepare_s, outcome.answer_s


def _check(arm: str, run: Run, answers: Sequence[Answered], expected: Sequence[Answered]) -> None:
    for number, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        if ours.token_ids != theirs.token_ids:
            raise InternalError(f"{arm}: the answer of item {number} differs from the first run's")
    if run.most_alive > MOST_ALIVE:
        raise InternalError(f"{arm}: {run.most_alive} caches alive at once, not {MOST_ALIVE}")


@contextmanager
def _watching(receiver: ReceiverClient) -> Iterator[list[int]]:
    """Asks the receiver all the time how many caches it holds or is getting.

    Raises:
        CacheLinkError: it did not say.
    """
    counts, ended, failed = [0], threading.Event(), list[CacheLinkError]()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            try:
                listing = receiver.caches()
            except CacheLinkError as error:
                failed.append(error)
                return
            counts.append(len(listing.caches) + (listing.reserved_bytes > 0))

    watcher = threading.Thread(target=watch, name="watch-caches")
    watcher.start()
    try:
        yield counts
    finally:
        ended.set()
        watcher.join()
    if failed:
        raise failed[0]
