"""Text to token ids and back with a tokenizer of transformers.

Two copies of the tokenizer's pipeline are kept, one that knows special tokens and one that takes
their strings for text. transformers switches one shared pipeline between the two at every call,
which two threads would do to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, Final

from tokenizers import Tokenizer

from cachelink_core import limits
from cachelink_core.engine.base import Message, Prefix
from cachelink_core.engine.chat_template import ChatTemplate, Rendered
from cachelink_core.engine.identify import fast_backend
from cachelink_core.errors import InvalidRequest, PrefixMismatch
from cachelink_core.manifest import QueryFrame

DOCUMENT_GAP: Final = "\n\n"
"""Between a document and the question about it, within one user message."""

_ANCHOR: Final = "\n"
"""Put in front of a text that continues another one, so that a tokenizer which writes a space
before the first word of everything does not write one there; its ids are cut off again."""


class HFTokens:
    """``Tokens`` over a fast tokenizer of transformers. Safe to call from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """Copies the tokenizer's pipeline.

        Args:
            tokenizer: of transformers.

        Raises:
            UnsupportedModel: it is not a fast one.
        """
        self._tokenizer = tokenizer
        self._special = _pipeline(tokenizer, special_strings_are_text=False)
        self._plain = _pipeline(tokenizer, special_strings_are_text=True)
        self._bos_id: int | None = tokenizer.bos_token_id
        self._chat = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self._anchor_ids = tuple(_encode(self._plain, _ANCHOR))
        alone = tuple(_encode(self._plain, "a"))
        self._anchored = (
            alone != tuple(_encode(self._plain, _ANCHOR + "a"))[len(self._anchor_ids) :]
        )

    def document(self, text: str, *, chat: bool | None = None) -> Prefix:
        """Tokenizes a document as a prefix; see ``engine/base.py``.

        Raises:
            InvalidRequest: ``chat`` is asked for and the model has no template, or too long a text.
        """
        _check_text("document", text)
        if chat is None:
            chat = self._chat is not None
        if not chat:
            bos = () if self._bos_id is None else (self._bos_id,)
            # The first text of all: a tokenizer that writes a space in front of it does so here.
            return Prefix(_bounded((*bos, *_encode(self._plain, text))))
        template = self._template()
        # With a question behind it, so that a template which trims contents leaves the document's
        # end alone.
        question = "?"
        rendered = template.render(
            [{"role": "user", "content": text + DOCUMENT_GAP + question}], generation=True
        )
        content = rendered.contents[0].removesuffix(question).removesuffix(DOCUMENT_GAP)
        ids = (*self._framing(rendered.frames[0]), *self.plain(content))
        return Prefix(_bounded(ids), QueryFrame(DOCUMENT_GAP, rendered.frames[1]))

    def conversation(self, messages: Sequence[Message]) -> Prefix:
        """Renders a conversation as a prefix; see ``engine/base.py``.

        The prefix ends where the template would go on with whatever comes next. The frame is empty
        if the template allows no user message there, for instance two in a row.

        Raises:
            InvalidRequest: no template, a malformed message, or one that the template refuses.
        """
        template = self._template()
        closed = template.render(messages, generation=False)
        try:
            # Rendered with the next message there: templates write a last message differently.
            going_on = template.render([*messages, _user("?")], generation=True)
        except InvalidRequest:
            ids = self._ids(closed.pieces())
            return Prefix(_bounded(ids), messages=tuple(messages))
        last, before = self._cut(going_on.frames[-2], closed.frames[-1])
        held = Rendered((*going_on.frames[:-2], last), going_on.contents[:-1])
        frame = QueryFrame(before, going_on.frames[-1])
        return Prefix(_bounded(self._ids(held.pieces())), frame, tuple(messages))

    def question(self, text: str, frame: QueryFrame) -> tuple[int, ...]:
        """Ids of a question in its frame."""
        return (*self._framing(frame.before), *self.plain(text), *self._framing(frame.after))

    def plain(self, text: str) -> tuple[int, ...]:
        """Ids of a text that continues what was there, special-token strings plain.

        Raises:
            InvalidRequest: too long a text, or one that is not Unicode.
        """
        _check_text("text", text)
        return self._continued(self._plain, text)

    def continuation(self, messages: Sequence[Message], cached: Sequence[int]) -> tuple[int, ...]:
        """Ids that follow ``cached`` when ``messages`` are rendered for an answer.

        A content in whose middle the cached ids end is tokenized in two parts, cut there: so the
        document of a cache may be followed, in the same message, by a question.

        Raises:
            PrefixMismatch: the rendered ids do not begin with ``cached``; names the first differing
                position with both ids.
            InvalidRequest: no template, a malformed message, or one that the template refuses.
        """
        held = tuple(cached)
        ids: list[int] = []
        for text, own in self._template().render(messages, generation=True).pieces():
            piece = self._framing(text) if own else self._content(text, held[len(ids) :])
            ids += piece
        if tuple(ids[: len(held)]) != held:
            raise self._mismatch(ids, held)
        return tuple(ids[len(held) :])

    def next_frame(self, frame: QueryFrame, last_id: int) -> QueryFrame:
        """The frame of the next turn, after an answer that ended with ``last_id``.

        Args:
            frame: of the turn that was answered; an empty one stays empty.
            last_id: the answer's last token. If it is the one with which the template ends an
                answer, the frame does not repeat it.

        Raises:
            InvalidRequest: the template cannot go on after an answer.
        """
        if self._chat is None or frame == QueryFrame():
            return QueryFrame()
        between, after = self._turn
        ids = _encode(self._special, between)
        if ids and ids[0] == last_id:
            ended: str = self._special.decode([last_id], skip_special_tokens=False)
            between = between.removeprefix(ended)
        return QueryFrame(between, after)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens skipped."""
        text: str = self._special.decode(list(ids), skip_special_tokens=True)
        return text

    @cached_property
    def _turn(self) -> tuple[str, str]:
        """Template text between an answer and the next question, and behind that question."""
        messages = [_user("?"), {"role": "assistant", "content": "!"}, _user("?")]
        frames = self._template().render(messages, generation=True).frames
        return frames[2], frames[3]

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise InvalidRequest("messages: the model has no chat template; send text or token ids")
        return self._chat

    def _framing(self, text: str) -> tuple[int, ...]:
        return self._continued(self._special, text)

    def _ids(self, pieces: Iterable[tuple[str, bool]]) -> tuple[int, ...]:
        return tuple(
            token
            for text, own in pieces
            for token in (self._framing(text) if own else self.plain(text))
        )

    def _continued(self, pipeline: Tokenizer, text: str) -> tuple[int, ...]:
        """Ids of a text that is not the first one."""
        if not text or not self._anchored:
            return tuple(_encode(pipeline, text))
        ids = tuple(_encode(pipeline, _ANCHOR + text))
        width = len(self._anchor_ids)
        if ids[:width] != self._anchor_ids:  # the anchor merged with the text
            return tuple(_encode(pipeline, text))
        return ids[width:]

    def _content(self, text: str, held: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of a content, cut where ``held``, the cached ids from its start on, end in it."""
        ids = self.plain(text)
        both = min(len(ids), len(held))
        if ids[:both] == held[:both]:
            return ids
        begun = self.decode(held)
        if text.startswith(begun) and self.plain(begun) == held:
            return (*held, *self.plain(text[len(begun) :]))
        return ids

    def _cut(self, between: str, closing: str) -> tuple[str, str]:
        """Splits template text behind a message into what closes it and what opens the next one.

        Only where the ids of the two parts are those of the whole; otherwise all of it opens.
        """
        if between.startswith(closing):
            opening = between[len(closing) :]
            if self._framing(closing) + self._framing(opening) == self._framing(between):
                return closing, opening
        return "", between

    def _mismatch(self, ids: Sequence[int], held: Sequence[int]) -> PrefixMismatch:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, held)))  # noqa: B905
        ours = self._show(held[same])
        theirs = self._show(ids[same]) if same < len(ids) else "nothing"
        return PrefixMismatch(
            f"messages differ from the cached prefix at position {same}: "
            f"cached {ours}, rendered {theirs}"
        )

    def _show(self, token: int) -> str:
        return f"{token} ({self._special.id_to_token(token)!r})"


def _pipeline(tokenizer: Any, *, special_strings_are_text: bool) -> Tokenizer:
    pipeline = Tokenizer.from_str(fast_backend(tokenizer).to_str())
    pipeline.no_truncation()
    pipeline.no_padding()
    pipeline.encode_special_tokens = special_strings_are_text
    return pipeline


def _encode(pipeline: Tokenizer, text: str) -> list[int]:
    ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
    return ids


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _check_text(field: str, text: str) -> None:
    if len(text) > limits.MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"{field} has {len(text)} characters; the limit is {limits.MAX_TEXT_CHARS}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} is not Unicode text: {error}") from error


def _bounded(ids: tuple[int, ...]) -> tuple[int, ...]:
    if len(ids) > limits.MAX_PREFIX_TOKENS:
        raise InvalidRequest(
            f"the prefix has {len(ids)} tokens; the limit is {limits.MAX_PREFIX_TOKENS}"
        )
    return ids
