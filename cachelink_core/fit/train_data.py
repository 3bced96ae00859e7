"""Training examples: a prefix whose cache is translated, a query, and how the receiver goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from cachelink_core.engine.base import Tokens
from cachelink_core.errors import InvalidRequest
from cachelink_core.identity import canonical_bytes

FIELDS = ("prefix", "query", "continuation")


@dataclass(frozen=True, slots=True)
class Example:
    """One example, as token ids; no part is empty.

    Attributes:
        prefix_ids: read by the sender; positions from 0.
        query_ids: read by the receiver.
        continuation_ids: what the receiver should say then.
    """

    prefix_ids: tuple[int, ...]
    query_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of all three parts."""
        return len(self.prefix_ids) + len(self.query_ids) + len(self.continuation_ids)

    @property
    def read_ids(self) -> tuple[int, ...]:
        """What the receiver reads: everything that predicts a token of the continuation."""
        return self.query_ids + self.continuation_ids[:-1]

    @property
    def target_ids(self) -> tuple[int, ...]:
        """The token after each of ``read_ids``."""
        return (self.query_ids + self.continuation_ids)[1:]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What a training sees.

    Attributes:
        name: where it came from, for the card.
        digest: over the token ids, the same for the same data.
        train: examples to train on; may make them as they are asked for.
        held_out: examples of other documents, evaluated on during training.
    """

    name: str
    digest: str
    train: Sequence[Example]
    held_out: Sequence[Example]


def read_examples(
    path: Path,
    tokens: Tokens,
    *,
    chat: bool | None = None,
    max_tokens: int | None = None,
) -> tuple[Example, ...]:
    """Reads a JSONL file.

    A line has ``prefix``, ``query`` and ``continuation``, each as text or, by the names
    ``prefix_ids``, ``query_ids`` and ``continuation_ids``, as token ids. Texts are tokenized as in
    a handoff: the prefix as a document, the query in that document's frame.

    Args:
        path: of the file.
        tokens: of the receiver.
        chat: whether documents go into the chat template; None for where the model has one.
        max_tokens: longer examples are refused.

    Raises:
        InvalidRequest: a line is malformed, or a part of it is empty or too long; names file, line
            and part.
    """
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"training data {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            example = _example(where, _parsed(where, line), tokens, chat)
            if max_tokens is not None and example.tokens > max_tokens:
                raise InvalidRequest(
                    f"{where}: {example.tokens} tokens in all; the model has {max_tokens} positions"
                )
            examples.append(example)
    if not examples:
        raise InvalidRequest(f"training data {str(path)!r} has no examples")
    return tuple(examples)


def split_held_out(
    examples: Sequence[Example], count: int, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Parts examples into those to train on and ``count`` held-out ones, by prefix.

    Examples of one prefix stay on one side: a document that was trained on would flatter.

    Raises:
        InvalidRequest: nothing would be left to train on.
    """
    prefixes = sorted({example.prefix_ids for example in examples})
    random.Random(seed).shuffle(prefixes)  # noqa: S311 - an order, not a secret
    sizes = dict.fromkeys(prefixes, 0)
    for example in examples:
        sizes[example.prefix_ids] += 1
    held: set[tuple[int, ...]] = set()
    while prefixes and sum(sizes[prefix] for prefix in held) < count:
        held.add(prefixes.pop())
    if not prefixes:
        raise InvalidRequest(
            f"held-out examples: {count} of {len(examples)} with {len(sizes)} different prefixes "
            "leave none to train on"
        )
    train = tuple(e for e in examples if e.prefix_ids not in held)
    return train, tuple(e for e in examples if e.prefix_ids in held)


def data_digest(examples: Sequence[Example]) -> str:
    """BLAKE3-256 over the token ids of all examples, in hexadecimal."""
    hasher = blake3()
    for example in examples:
        hasher.update(
            canonical_bytes((example.prefix_ids, example.query_ids, example.continuation_ids))
        )
    return hasher.hexdigest()


def batch_order(count: int, batch: int, step: int, seed: int) -> list[int]:
    """Which examples a step sees: a new permutation each epoch, a function of its arguments only."""
    order: list[int] = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(place, count)
        order.append(_permutation(count, epoch, seed)[index])
    return order


@lru_cache(maxsize=2)
def _permutation(count: int, epoch: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
    return tuple(order)


def _parsed(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where}: a {type(row).__name__}, not an object")
    return row


def _example(where: str, row: dict[str, Any], tokens: Tokens, chat: bool | None) -> Example:
    ids: dict[str, tuple[int, ...]] = {}
    given = {name: _part(where, row, name) for name in FIELDS}
    frame = None
    for name, value in given.items():
        if isinstance(value, tuple):
            ids[name] = value
        elif name == "prefix":
            document = tokens.document(value, chat=chat)
            ids[name], frame = document.ids, document.frame
        elif name == "query" and frame is not None:
            ids[name] = tokens.question(value, frame)
        else:
            ids[name] = tokens.plain(value)
        if not ids[name]:
            raise InvalidRequest(f"{where}: {name} has 0 tokens; at least 1 is needed")
    return Example(ids["prefix"], ids["query"], ids["continuation"])


def _part(where: str, row: dict[str, Any], name: str) -> str | tuple[int, ...]:
    text, ids = row.get(name), row.get(f"{name}_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest(f"{where}: needs one of {name!r} and {name + '_ids'!r}")
    value = text if ids is None else ids
    if not value:
        raise InvalidRequest(f"{where}: {name} is empty")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise InvalidRequest(f"{where}: {name} is neither a text nor a list of token ids")
