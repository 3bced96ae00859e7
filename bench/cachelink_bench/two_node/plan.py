"""What one run of the two-node benchmark does, as plain data that a result file can hold."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from cachelink_core.codec_spec import parse_codec
from cachelink_core.errors import CacheLinkError, ConfigError

TEXT: Final = "text"
"""The representation that is none: the text goes over, and the receiver reads it."""

CONTEXTS: Final = ("2k", "8k", "16k")
Mode = Literal["overlapped", "serial"]
"""Of two nodes: blocks on their way while others are computed, or one stage after another."""

REPRESENTATIONS: Final = (TEXT, "native", "native+zstd", "int8", "int4", "int4+zstd")

_CONTEXT: Final = re.compile(r"(?P<count>[1-9][0-9]{0,5})(?P<kilo>k?)")


class Plan(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        contexts: context classes such as ``8k``, in the order in which they run.
        representations: ``text`` and codecs such as ``int4+zstd``.
        documents: of each class.
        repeats: of each document and representation.
        decode: tokens of each answer.
        modes: of the nodes; each has a pair of its own, and they take turns.
        wide_kv: run classes beyond the model's window on the bytes-only model of the same cache width
            as a large one, where the daemons are started here.
        model: as the daemons name it; its tokenizer cuts the documents.
    """

    contexts: tuple[str, ...] = CONTEXTS
    representations: tuple[str, ...] = REPRESENTATIONS
    documents: int = 6
    repeats: int = 3
    decode: int = 32
    modes: tuple[Mode, ...] = ("overlapped",)
    model: str = "demo"
    wide_kv: bool = True

    def __post_init__(self) -> None:
        for name in ("documents", "repeats", "decode"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, not at least 1")
        for name in ("contexts", "representations", "modes"):
            given: tuple[str, ...] = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(f"{name} is {','.join(given)!r}: some, each once")
        for context in self.contexts:
            context_tokens(context)
        for representation in self.representations:
            _check_representation(representation)


def context_tokens(name: str) -> int:
    """Tokens of a context class, which counts document, question and answer: ``8k`` is 8,192.

    Raises:
        ConfigError: not such a name.
    """
    match = _CONTEXT.fullmatch(name)
    if match is None:
        raise ConfigError(f"context {name!r} is not a number of tokens such as 8k or 1500")
    return int(match["count"]) * (1024 if match["kilo"] else 1)


def split(text: str) -> tuple[str, ...]:
    """The parts of a list that commas separate."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_representation(name: str) -> None:
    if name == TEXT:
        return
    try:
        parse_codec(name)
    except CacheLinkError as error:
        raise ConfigError(f"representation {name!r}: {error}; or {TEXT}") from error
