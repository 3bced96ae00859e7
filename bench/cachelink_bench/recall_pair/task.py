"""Documents, queries and calibration text of the recall task.

Every random choice comes from a generator that the caller seeds. Training, held-out documents and
calibration text draw from separate streams, so that equal seeds never give equal documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from cachelink_bench.recall_pair.words import (
    ACTIONS,
    ADJECTIVES,
    ADVERBS,
    ARTICLE,
    ASK_ID,
    BOS_ID,
    SCENES,
    STOP_ID,
    SUBJECTS,
    TOKEN_IDS,
)

PLAIN_SENTENCE_RATE: Final = 0.25
"""Probability of a plain sentence before each fact and after the last one."""

MAX_FACTS: Final = min(len(SUBJECTS), len(ACTIONS))
"""Subjects and actions of one document are distinct."""


class Stream(IntEnum):
    """What a random stream is for; the first word of its seed."""

    TRAINING = 1
    HELD_OUT = 2
    CALIBRATION = 3


class Query(NamedTuple):
    """One question about a document.

    Attributes:
        query_ids: tokens after the prefix, "? <subject>"; the answer is the next token.
        answer_id: the right next token, one of the document's actions.
    """

    query_ids: tuple[int, ...]
    answer_id: int


@dataclass(frozen=True)
class Document:
    """A text that states facts.

    Attributes:
        prefix_ids: ``<bos>`` and the text's tokens: what a model prefills.
        text: the same for readers, as the tokenizer decodes it (without ``<bos>``).
        facts: subject to action, in the order stated.
        queries: one for every fact, in shuffled order.
    """

    prefix_ids: tuple[int, ...]
    text: str
    facts: dict[str, str]
    queries: list[Query]


def generator(stream: Stream, *seeds: int) -> np.random.Generator:
    """The random generator of one stream and seed (and, for instance, of one step)."""
    return np.random.default_rng([int(stream), *seeds])


def document(
    rng: np.random.Generator, facts: int, plain_rate: float = PLAIN_SENTENCE_RATE
) -> Document:
    """Draws one document.

    Args:
        rng: its state decides everything, and moves on.
        facts: how many facts it states, 0 to ``MAX_FACTS``.
        plain_rate: probability of a plain sentence before each fact and at the end.

    Raises:
        ValueError: ``facts`` is out of range.
    """
    if not 0 <= facts <= MAX_FACTS:
        raise ValueError(f"facts is {facts}, a document states 0 to {MAX_FACTS}")
    pairs = _facts(rng, facts)
    sentences: list[list[str]] = []
    for subject, action in pairs:
        if rng.random() < plain_rate:
            sentences.append(plain_sentence(rng))
        sentences.append([subject, action])
    if rng.random() < plain_rate or not sentences:
        sentences.append(plain_sentence(rng))
    return Document(
        prefix_ids=(BOS_ID, *(token for sentence in sentences for token in _ids(sentence))),
        text=" ".join(" ".join(sentence) + "." for sentence in sentences),
        facts=dict(pairs),
        queries=[query(*pairs[index]) for index in rng.permutation(facts)],
    )


def query(subject: str, action: str) -> Query:
    """The question about one subject, with its answer."""
    return Query((ASK_ID, TOKEN_IDS[subject]), TOKEN_IDS[action])


def plain_sentence(rng: np.random.Generator) -> list[str]:
    """A sentence that states no fact: "the (adjective) noun verb (adverb)", without its stop."""
    words = [ARTICLE]
    if rng.random() < 0.5:
        words.append(_choice(rng, ADJECTIVES))
    noun = _choice(rng, tuple(SCENES))
    words += [noun, _choice(rng, SCENES[noun])]
    if rng.random() < 0.5:
        words.append(_choice(rng, ADVERBS))
    return words


def held_out_documents(count: int, facts: int, seed: int) -> list[Document]:
    """Documents that no training step and no calibration text draws.

    Args:
        count: how many.
        facts: stated in each, at most ``MAX_FACTS``.
        seed: the same seed gives the same documents, and a longer list starts with a shorter one.
    """
    return [document(generator(Stream.HELD_OUT, seed, facts, i), facts) for i in range(count)]


def calibration_sequences(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Token sequences like the documents, to fit a cross-model map on.

    Each starts with ``<bos>`` and is cut at exactly ``length`` tokens. Beyond ``MAX_FACTS`` facts
    the subjects and actions are dealt anew, so that any length can be had.

    Args:
        count: how many sequences.
        length: tokens in each, at least 1.
        seed: the same seed gives the same sequences.
    """
    return [_sequence(generator(Stream.CALIBRATION, seed, i), length) for i in range(count)]


def _sequence(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    ids = [BOS_ID]
    for sentence in _endless_sentences(rng):
        if len(ids) >= length:
            break
        ids += _ids(sentence)
    return tuple(ids[:length])


def _endless_sentences(rng: np.random.Generator) -> Iterator[list[str]]:
    while True:
        for fact in _facts(rng, MAX_FACTS):
            if rng.random() < PLAIN_SENTENCE_RATE:
                yield plain_sentence(rng)
            yield list(fact)


def _facts(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Distinct subjects with distinct actions: guessing among the document's actions is 1/n."""
    subjects = rng.permutation(len(SUBJECTS))[:count]
    actions = rng.permutation(len(ACTIONS))[:count]
    return [(SUBJECTS[s], ACTIONS[a]) for s, a in zip(subjects, actions, strict=True)]


def _ids(sentence: list[str]) -> list[int]:
    return [*(TOKEN_IDS[word] for word in sentence), STOP_ID]


def _choice(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(rng.integers(len(words)))]
