"""A chat template taken apart: its own text, and the places where messages go.

The template is rendered with a mark in place of each content, and cut at the marks. So template
text is tokenized with its special tokens and contents without, and a content that spells a special
token stays text. What the template does to a content (most trim it) is found by rendering each
content alone between the marks of its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2.exceptions import TemplateError

from cachelink_core.engine.base import Message
from cachelink_core.errors import InvalidRequest, UnsupportedModel

_PRIVATE_USE: Final = range(0xE000, 0xF8FF)
"""Code points without a meaning: a mark is made of one that no content uses."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template writes it.

    Attributes:
        frames: template text before the first content, between contents, and behind the last: one
            more than there are contents.
        contents: as the template passes them on, for instance trimmed.
    """

    frames: tuple[str, ...]
    contents: tuple[str, ...]

    def pieces(self) -> list[tuple[str, bool]]:
        """(text, whether it is the template's own), in order; joined, the whole rendering."""
        found = [(self.frames[0], True)]
        for content, frame in zip(self.contents, self.frames[1:], strict=True):
            found += [(content, False), (frame, True)]
        return found


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Takes a tokenizer of transformers that has a template."""
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], *, generation: bool) -> Rendered:
        """Renders a conversation.

        Args:
            messages: at least one.
            generation: with the prompt of the next answer behind it.

        Raises:
            InvalidRequest: a malformed message, or one that the template refuses or rewrites in a
                way that cannot be told from its own text.
        """
        _check_messages(messages)
        marks = _marks([message["content"] for message in messages])
        frames = self._frames(messages, marks, generation=generation)
        contents = tuple(
            self._content(messages, marks, index, frames, generation=generation)
            for index in range(len(messages))
        )
        return Rendered(frames, contents)

    def _frames(
        self, messages: Sequence[Message], marks: Sequence[str], *, generation: bool
    ) -> tuple[str, ...]:
        marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        rest = self._text(marked, generation=generation)
        frames = []
        for index, mark in enumerate(marks):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise InvalidRequest(
                    f"messages[{index}]: the chat template does not write the content of a "
                    f"{messages[index]['role']!r} message once and in order"
                )
            frames.append(before)
        return (*frames, rest)

    def _content(
        self,
        messages: Sequence[Message],
        marks: Sequence[str],
        index: int,
        frames: Sequence[str],
        *,
        generation: bool,
    ) -> str:
        """The content of one message as it comes out of the template."""
        mixed = [
            message if at == index else {**message, "content": marks[at]}
            for at, message in enumerate(messages)
        ]
        text = self._text(mixed, generation=generation)
        start = "".join(f + m for f, m in zip(frames, marks[:index], strict=False)) + frames[index]
        end = frames[index + 1] + "".join(
            m + f for m, f in zip(marks[index + 1 :], frames[index + 2 :], strict=True)
        )
        fits = len(text) >= len(start) + len(end)
        if not (fits and text.startswith(start) and text.endswith(end)):
            raise InvalidRequest(
                f"messages[{index}]: the chat template changes its own text around this content; "
                f"send text or token ids instead"
            )
        return text[len(start) : len(text) - len(end)]

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation
            )
        except TemplateError as error:
            raise InvalidRequest(f"messages: the chat template refuses them: {error}") from error
        if not isinstance(text, str):
            raise UnsupportedModel(f"the chat template renders to {type(text).__name__}, not text")
        return text


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty")
    for index, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise InvalidRequest(
                    f"messages[{index}].{field} is {message.get(field)!r}; a text is needed"
                )


def _marks(contents: Sequence[str]) -> list[str]:
    """One text for each content, none of which is part of any content or of another mark."""
    for point in _PRIVATE_USE:
        if not any(chr(point) in content for content in contents):
            return [f"{chr(point)}{index}{chr(point)}" for index in range(len(contents))]
    raise InvalidRequest("messages use every private-use character; none is left to mark them")
