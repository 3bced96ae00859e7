"""What a demonstration of two different models needs: a folder, and what must be in it.

FOLDER/sender/             a model, its tokenizer
FOLDER/receiver/           another model of the same tokenizer
FOLDER/mappers/ridge/      a mapper without a residual
FOLDER/mappers/cachelink/  the same with one
FOLDER/held_out.json       documents that neither model nor mapper was trained on
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from cachelink_core.errors import InvalidRequest, UnknownCache

MAPPERS: Final = ("ridge", "cachelink")
PAIRS: Final = Path("bench", "models")
"""Where a pair that is given by name lies, seen from the repository."""


class Asked(msgspec.Struct, frozen=True):
    """One question: the next token after ``query_ids`` should be ``answer_id``."""

    query_ids: tuple[int, ...]
    answer_id: int
    question: str
    answer: str


class HeldOut(msgspec.Struct, frozen=True):
    """One document and everything that is asked about it."""

    facts: int
    text: str
    prefix_ids: tuple[int, ...]
    queries: tuple[Asked, ...]


class _File(msgspec.Struct, frozen=True):
    documents: tuple[HeldOut, ...]


class PairPlan(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        folder: of the pair.
        documents: held out, at least two with each number of facts.
        mappers: digest of each mapper by name.
    """

    folder: Path
    documents: tuple[HeldOut, ...]
    mappers: dict[str, str]


def read_pair(name: str) -> PairPlan:
    """Reads a pair by folder, or by name from the repository's own.

    Raises:
        UnknownCache: there is no such pair.
        InvalidRequest: its held-out documents are malformed or too few.
        CacheLinkError: a mapper is missing or damaged.
    """
    from cachelink_core.transport.artifact import read_card

    folder = Path(name) if Path(name).is_dir() else PAIRS / name
    path = folder / "held_out.json"
    if not path.is_file():
        raise UnknownCache(f"pair {name!r}: no {path}; give a folder, or run in the repository")
    try:
        documents = msgspec.json.decode(path.read_bytes(), type=_File).documents
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    for facts in {document.facts for document in documents}:
        if sum(document.facts == facts for document in documents) < 2:
            raise InvalidRequest(f"{path}: one document of {facts} facts; two are needed")
    digests = {each: read_card(folder / "mappers" / each).digest for each in MAPPERS}
    return PairPlan(folder, documents, digests)
