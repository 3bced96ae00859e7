"""Reads what a command is given: documents, token ids and conversations, from files or arguments."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import msgspec

from cachelink_core import limits
from cachelink_core.errors import InvalidRequest
from cachelink_core.rpc.client import Conversation, Message, TokenIds

STDIN: Final = "-"

_MAX_FILE_BYTES: Final = 4 * limits.MAX_TEXT_CHARS
"""UTF-8 needs up to four bytes a character."""


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises:
        InvalidRequest: it cannot be read, is not UTF-8 or too large.
    """
    if name == STDIN:
        return _decoded(name, sys.stdin.buffer.read(_MAX_FILE_BYTES + 1))
    try:
        with Path(name).open("rb") as file:
            return _decoded(name, file.read(_MAX_FILE_BYTES + 1))
    except OSError as error:
        raise InvalidRequest(f"file {name!r} cannot be read: {error.strerror}") from error


def read_token_ids(given: str) -> TokenIds:
    """Token ids: a list such as ``1,2,3``, or a file that holds one, with or without brackets.

    Raises:
        InvalidRequest: it is neither.
    """
    text = given if re.fullmatch(r"[\s\d,\[\]]*", given) else read_text(given)
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for position, part in enumerate(parts):
        if not (part.isascii() and part.isdigit()):
            raise InvalidRequest(f"token_ids[{position}] is {part[:40]!r}, not a token id")
    return TokenIds(tuple(int(part) for part in parts))


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


def read_messages(name: str) -> Conversation:
    """A conversation: a JSON list of ``{"role": …, "content": …}``.

    Raises:
        InvalidRequest: the file cannot be read, or holds something else.
    """
    try:
        written = msgspec.json.decode(read_text(name), type=list[_Written])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"messages in {name!r}: {error}") from error
    return Conversation(tuple(Message(each.role, each.content) for each in written))


def only_one(what: str, **given: object) -> str:
    """The name of the one argument that is given.

    Args:
        what: they say, for the message.
        **given: by option; None is not given.

    Raises:
        InvalidRequest: none is given, or more than one.
    """
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = ", ".join(_flag(name) for name in named) or "nothing"
        known = ", ".join(_flag(name) for name in given)
        raise InvalidRequest(f"{what}: {found} given; give exactly one of {known}")
    return named[0]


def _flag(name: str) -> str:
    return name if name.isupper() else "--" + name.replace("_", "-")


def _decoded(name: str, data: bytes) -> str:
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(f"file {name!r} has more than {_MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"file {name!r} is not UTF-8: {error}") from error
