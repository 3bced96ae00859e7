"""From texts to token sequences: what a fit sees, split by document into fitted and held out.

Held-out tokens of a document that was fitted on would flatter the fit, so the split is by document.
Within each side the documents are joined and cut into sequences of equal length; every sequence
begins with the beginning-of-sequence token, if the tokenizer has one, as a prefix does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from cachelink_core.errors import ConfigError, InvalidRequest
from cachelink_core.identity import canonical_bytes
from cachelink_core.transport.card import CalibrationRecord

TEXT_SUFFIXES: Final = frozenset({".txt", ".md"})
JSONL_SUFFIXES: Final = frozenset({".jsonl", ".ndjson"})
TEXT_FIELD: Final = "text"
"""Of a JSONL line or a data set's row."""

SHUFFLE_BUFFER: Final = 10_000
"""Rows of a streamed data set among which the order is drawn."""


@dataclass(frozen=True)
class Calibration:
    """Token sequences for a fit.

    Attributes:
        record: where they came from, for the card.
        bos_id: first token of every sequence, None if the tokenizer has none.
        train: sequences fitted on, ``length`` ids each.
        held_out: sequences of other documents.
    """

    record: CalibrationRecord
    bos_id: int | None
    train: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]


@dataclass
class _Side:
    """One side of the split, while documents are added."""

    sequences: int
    needed: int
    ids: list[int] = field(default_factory=list)
    documents: int = 0

    @property
    def filled(self) -> float:
        return len(self.ids) / self.needed if self.needed else 1.0


def calibrate(
    documents: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    *,
    bos_id: int | None,
    source: str,
    sequences: int = 500,
    length: int = 1_024,
    stride: int = 4,
    held_out: float = 0.1,
    seed: int = 0,
) -> Calibration:
    """Tokenizes documents until both sides have enough.

    A document goes to the side that is further from full, so both fill in proportion.

    Args:
        documents: in the order in which they are taken.
        encode: text to ids, nothing added.
        bos_id: of the tokenizer.
        source: name of the text, for the card.
        sequences: to fit on.
        length: tokens of each.
        stride: for the card: every how manyth position becomes an observation.
        held_out: held-out sequences as a share of ``sequences``; 0 for none.
        seed: for the card: of the order of documents.

    Raises:
        InvalidRequest: a number out of range, or too little text; with what is there and what is
            needed.
    """
    _check_numbers(sequences, length, stride, held_out)
    piece = length - (bos_id is not None)
    extra = max(1, round(sequences * held_out)) if held_out else 0
    train, other = _Side(sequences, sequences * piece), _Side(extra, extra * piece)
    for text in documents:
        side = other if other.filled < train.filled else train
        side.ids += encode(text)
        side.documents += 1
        if train.filled >= 1 and other.filled >= 1:
            break
    for name, side in (("to fit on", train), ("held out", other)):
        if side.filled < 1:
            raise InvalidRequest(
                f"calibration text {source!r} is too short: {len(side.ids)} tokens {name} in "
                f"{side.documents} documents; {side.sequences} sequences of {length} need "
                f"{side.needed}"
            )
    parts = tuple(_cut(train, piece, bos_id)), tuple(_cut(other, piece, bos_id))
    record = CalibrationRecord(
        source=source,
        digest=blake3(canonical_bytes(parts)).hexdigest(),
        sequences=sequences,
        held_out_sequences=extra,
        length=length,
        stride=stride,
        documents=train.documents,
        held_out_documents=other.documents,
        seed=seed,
    )
    return Calibration(record, bos_id, *parts)


def read_documents(source: str, *, seed: int = 0) -> Iterable[str]:
    """Documents of a file, a folder or a data set on the hub, in an order drawn by ``seed``.

    Args:
        source: a ``.txt`` or ``.md`` file (one document), a ``.jsonl`` file (one document a line,
            in its field ``text``), a folder of such files, or ``NAME[:CONFIG[:SPLIT]]`` of a data
            set, which is streamed through the package ``datasets``.
        seed: of the order.

    Raises:
        ConfigError: the path holds no text, or the package ``datasets`` is missing.
        InvalidRequest: a line of a JSONL file is not an object with a text.
    """
    path = Path(source).expanduser()
    if path.exists():
        documents = list(_local_documents(path))
        random.Random(seed).shuffle(documents)  # noqa: S311 - an order, not a secret
        return documents
    if path.suffix in TEXT_SUFFIXES | JSONL_SUFFIXES or source.startswith((".", "/", "~")):
        raise ConfigError(f"calibration {source!r}: no such file or folder")
    return _hub_documents(source, seed)


def _local_documents(path: Path) -> Iterator[str]:
    if path.is_dir():
        known = TEXT_SUFFIXES | JSONL_SUFFIXES
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in known)
        if not files:
            raise ConfigError(f"calibration {str(path)!r} has no {', '.join(sorted(known))} files")
        for file in files:
            yield from _local_documents(file)
    elif path.suffix.lower() in JSONL_SUFFIXES:
        yield from _jsonl_documents(path)
    else:
        yield path.read_text(encoding="utf-8")


def _jsonl_documents(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[TEXT_FIELD]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequest(
                    f"{path}:{number} is no JSON object with a field {TEXT_FIELD!r}"
                ) from error
            yield str(text)


def _hub_documents(source: str, seed: int) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"calibration {source!r} is no local path; a data set of the hub needs the package "
            "datasets: pip install datasets"
        ) from error
    name, config, split = [*source.split(":"), "", ""][:3]
    rows: Any = datasets.load_dataset(
        name, config or None, split=split or "train", streaming=True
    ).shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return (str(row[TEXT_FIELD]) for row in rows)


def _cut(side: _Side, piece: int, bos_id: int | None) -> Iterator[tuple[int, ...]]:
    first = () if bos_id is None else (bos_id,)
    for start in range(0, side.sequences * piece, piece):
        yield (*first, *side.ids[start : start + piece])


def _check_numbers(sequences: int, length: int, stride: int, held_out: float) -> None:
    if sequences < 1 or length < 2:
        raise InvalidRequest(f"sequences is {sequences} and length {length}; at least 1 and 2")
    if not 1 <= stride < length:
        raise InvalidRequest(f"stride is {stride}; it is at least 1 and below length {length}")
    if not 0 <= held_out <= 1:
        raise InvalidRequest(f"held_out is {held_out}; it is a share of sequences, 0 to 1")
