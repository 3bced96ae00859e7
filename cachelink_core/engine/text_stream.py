"""Token ids in, whole characters out, up to a stop string.

Two things hold text back. *Detokenization*: a character's bytes may span tokens, and a tokenizer
may drop the space in front of the first token of a call; so ids are decoded with the ones before
them, and a text that ends inside a character waits. *Stop strings*: text that may be the beginning
of one waits until it is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
"""What decoders give for bytes that are no whole character."""

MAX_UNDECIDED_TOKENS: Final = 8
"""A character has at most four bytes, so at most four tokens. Ids that give no whole character for
longer than twice that are no text: they are shown as they decode, up to the last three marks, which
the next bytes may still complete."""

MAX_INVALID_TOKENS: Final = 64
"""Ids that give no whole character for longer than this are settled: each id costs a decode of all
undecided ones."""


class Detokenizer:
    """Decodes ids one by one so that the joined pieces equal the decoded whole."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Begins an empty text.

        Args:
            decode: ids → text, special tokens skipped.
        """
        self._decode = decode
        self._context: list[int] = []  # ids whose text is out, and that the next ids need
        self._undecided: list[int] = []
        self._shown = 0  # characters of the undecided ids that are out

    def push(self, token_id: int) -> str:
        """Takes one id; gives the characters that became certain."""
        self._undecided.append(token_id)
        text = self._undecided_text()
        if text and not text.endswith(INCOMPLETE):
            return self._settle(text)
        if len(self._undecided) <= MAX_UNDECIDED_TOKENS:
            return ""
        if len(self._undecided) > MAX_INVALID_TOKENS:
            return self._settle(text)
        marks = len(text) - len(text.rstrip(INCOMPLETE))
        return self._show(text[: len(text) - min(3, marks)])

    def flush(self) -> str:
        """What is left, even if it ends inside a character."""
        return self._settle(self._undecided_text())

    def _undecided_text(self) -> str:
        known = self._decode(self._context)
        return self._decode(self._context + self._undecided)[len(known) :]

    def _show(self, text: str) -> str:
        out = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return out

    def _settle(self, text: str) -> str:
        out = self._show(text)
        # Ids without text (special tokens) cannot serve as context: the tokenizer would take the
        # next id for the first of a text.
        if text:
            self._context = self._undecided
        self._undecided = []
        self._shown = 0
        return out


class TextStream:
    """Detokenized text up to the first stop string.

    Attributes:
        stopped: a stop string was found; what follows is dropped.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """Begins an empty text.

        Args:
            decode: ids → text, special tokens skipped.
            stop: texts at which to end; none of them is empty.
        """
        self._detokenizer = Detokenizer(decode)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Takes one id; gives the text that can no longer become part of a stop string."""
        return self._advance(self._detokenizer.push(token_id), final=False)

    def flush(self) -> str:
        """Ends the text; gives what was held back."""
        return self._advance(self._detokenizer.flush(), final=True)

    def _advance(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else self._undecided_tail()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _undecided_tail(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0
