"""The documents of a run, cut to their context class by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from blake3 import blake3

from cachelink_bench.two_node.corpus import Corpus
from cachelink_bench.two_node.plan import Plan, context_tokens
from cachelink_core.errors import ConfigError
from cachelink_core.manifest import QueryFrame, pack_ids

if TYPE_CHECKING:  # torch comes with it, and whoever measures needs none
    from cachelink_core.engine.base import Prefix

WARM_UP: Final = "warm-up"
"""Context class of the document on which both ends are warmed up; it is not reported."""

WARM_UP_TOKENS: Final = 512

_LEAST_TOKENS: Final = 8
"""Every sentence has more words, so no document has more sentences than its tokens by this."""


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    def document(self, text: str) -> Prefix:
        """The prefix that a node makes of a text."""

    def question(self, text: str, frame: QueryFrame) -> tuple[int, ...]:
        """Ids of a question in its frame."""


class Subject(msgspec.Struct, frozen=True):
    """One document with its question.

    Attributes:
        context: its class.
        document: its number within the class.
        text: sent to whoever reads it.
        question: asked each time.
        tokens: of the prefix that a node makes of the text.
        question_tokens: of the question in its frame.
        text_digest: BLAKE3-256 of the text.
        ids_digest: of the prefix's token ids.
    """

    context: str
    document: int
    text: str
    question: str
    tokens: int
    question_tokens: int
    text_digest: str
    ids_digest: str


class LeftOut(msgspec.Struct, frozen=True):
    """A context class that does not run, and why."""

    context: str
    reason: str


def make_subjects(
    plan: Plan, tokens: Tokens, window: int
) -> tuple[tuple[Subject, ...], tuple[LeftOut, ...]]:
    """Generates the documents of a run, the warm-up's first.

    Args:
        plan: of the run.
        tokens: of the model.
        window: its positions.

    Returns:
        Documents, and the classes beyond the model's window.

    Raises:
        ConfigError: no class is left, or one is too small for a document.
    """
    left_out = beyond(plan.contexts, window)
    out = {item.context for item in left_out}
    kept = [name for name in plan.contexts if name not in out]
    if not kept:
        raise ConfigError(f"contexts: {'; '.join(item.reason for item in left_out)}")
    smallest = min(WARM_UP_TOKENS, *map(context_tokens, kept))
    made = [_subject(WARM_UP, 0, smallest - plan.decode, tokens)]
    for name in kept:
        room = context_tokens(name) - plan.decode
        made += [_subject(name, number, room, tokens) for number in range(plan.documents)]
    return tuple(made), left_out


def beyond(contexts: Sequence[str], window: int) -> tuple[LeftOut, ...]:
    """The classes that a model with this window cannot read."""
    return tuple(
        LeftOut(name, f"{context_tokens(name)} tokens exceed the model's window of {window}")
        for name in contexts
        if context_tokens(name) > window
    )


def _subject(context: str, number: int, room: int, tokens: Tokens) -> Subject:
    """As many whole sentences as leave space for the question.

    Args:
        context: the class.
        number: of the document.
        room: tokens of document and question together.
        tokens: of the model.
    """
    corpus = Corpus(f"{context} {number}")
    most = max(2, room // _LEAST_TOKENS)
    sentences = list(islice(corpus.sentences(), most))

    def sizes(count: int) -> tuple[Prefix, int]:
        prefix = tokens.document(_text(sentences[:count]))
        return prefix, len(tokens.question(corpus.question, prefix.frame))

    low, high = 0, len(sentences)  # `low` sentences fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        prefix, question_tokens = sizes(middle)
        fits = len(prefix.ids) + question_tokens <= room
        low, high = (middle, high) if fits else (low, middle)
    if not low:
        raise ConfigError(f"context {context!r} leaves {room} tokens: no sentence and question fit")
    prefix, question_tokens = sizes(low)
    text = _text(sentences[:low])
    return Subject(
        context=context,
        document=number,
        text=text,
        question=corpus.question,
        tokens=len(prefix.ids),
        question_tokens=question_tokens,
        text_digest=blake3(text.encode()).hexdigest(),
        ids_digest=blake3(pack_ids(prefix.ids)).hexdigest(),
    )


def _text(sentences: Sequence[str]) -> str:
    return " ".join(sentences)
