"""Rows of public data sets as training lines: prefix, query, continuation.

The data sets are those that CacheLink was trained on (section 5). The wording of the queries is
ours; the paper does not give its own. A row without an answer gives no line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cachelink_core.atomic_write import new_file
from cachelink_core.errors import ConfigError, InvalidRequest

Row = Mapping[str, Any]
Line = dict[str, str]
Convert = Callable[[Row], Iterator[Line]]

NO_ANSWER: Final = "The text does not say."
"""What is right where SQuAD v2 has no answer."""


def commonsense_qa(row: Row) -> Iterator[Line]:
    """A question with five choices; there is no document, so the choices are the prefix."""
    choices = _choices(row["choices"]["label"], row["choices"]["text"])
    if answer := row["answerKey"]:
        text = dict(choices)[answer]
        yield _line(_listed(choices), f"{row['question']}\nAnswer:", f" {answer}. {text}")


def cosmos_qa(row: Row) -> Iterator[Line]:
    """A short story and a question with four choices."""
    choices = _choices("ABCD", [row[f"answer{index}"] for index in range(4)])
    label = int(row["label"])
    if label >= 0:
        letter, text = choices[label]
        query = f"{row['question']}\n{_listed(choices)}\nAnswer:"
        yield _line(row["context"], query, f" {letter}. {text}")


def squad_v2(row: Row) -> Iterator[Line]:
    """A paragraph and a question, which it may leave open."""
    texts = row["answers"]["text"]
    answer = texts[0] if texts else NO_ANSWER
    yield _line(row["context"], f"Question: {row['question']}\nAnswer:", f" {answer}")


def drop(row: Row) -> Iterator[Line]:
    """A passage and a question that takes counting or arithmetic."""
    spans = row["answers_spans"]["spans"]
    if spans:
        unique = ", ".join(dict.fromkeys(spans))
        yield _line(row["passage"], f"Question: {row['question']}\nAnswer:", f" {unique}")


def multidoc2dial(row: Row) -> Iterator[Line]:
    """A document and a dialogue about it: every reply of the agent is a line.

    Reads a dialogue row, ``{"document": …, "turns": [{"role", "utterance"}]}``; rows of the
    published release name their documents by id and must be joined with them first.
    """
    said: list[str] = []
    for turn in row["turns"]:
        name = "Agent" if turn["role"] == "agent" else "User"
        if name == "Agent" and said and turn["utterance"].strip():
            query = "\n".join([*said, "Agent:"])
            yield _line(row["document"], query, f" {turn['utterance'].strip()}")
        said.append(f"{name}: {turn['utterance'].strip()}")


def contract_nli(row: Row) -> Iterator[Line]:
    """A contract and a claim about it."""
    labels = {0: "contradicted", 1: "entailed", 2: "not mentioned"}
    label = row["label"]
    answer = labels.get(label) if isinstance(label, int) else str(label).lower()
    if answer:
        query = (
            f"Claim: {row['hypothesis']}\n"
            "Is it entailed, contradicted or not mentioned by the contract?\nAnswer:"
        )
        yield _line(row["premise"], query, f" {answer}")


def long_align(row: Row) -> Iterator[Line]:
    """A long instruction and its answer; the instruction's last paragraph is the query."""
    messages = row["messages"]
    asked, answer = messages[0]["content"], messages[1]["content"]
    document, _, question = asked.rstrip().rpartition("\n")
    if document.strip() and question.strip() and answer.strip():
        yield _line(document, f"{question.strip()}\n", answer.strip())


CONVERTERS: Final[Mapping[str, Convert]] = {
    "commonsense_qa": commonsense_qa,
    "cosmos_qa": cosmos_qa,
    "squad_v2": squad_v2,
    "drop": drop,
    "multidoc2dial": multidoc2dial,
    "contract_nli": contract_nli,
    "long_align": long_align,
}


def convert(
    name: str, source: str, out: Path, *, limit: int | None = None, max_chars: int | None = None
) -> int:
    """Writes training lines of a data set.

    Args:
        name: which converter.
        source: a JSONL file of rows, or ``NAME[:CONFIG[:SPLIT]]`` on the hub, streamed.
        out: JSONL file, replaced.
        limit: lines at most.
        max_chars: longer prefixes are left out.

    Returns:
        Lines written.

    Raises:
        ConfigError: no such converter, or the package ``datasets`` is missing.
        InvalidRequest: a row lacks a field, or nothing was left.
    """
    if name not in CONVERTERS:
        raise ConfigError(f"converter is {name!r}; known: {', '.join(CONVERTERS)}")
    count = 0
    with new_file(out) as aside, aside.open("w", encoding="utf-8") as file:
        for line in _lines(name, source):
            if limit is not None and count >= limit:
                break
            if max_chars is None or len(line["prefix"]) <= max_chars:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise InvalidRequest(f"{source}: no row gave a line for {name}")
    return count


def _lines(name: str, source: str) -> Iterator[Line]:
    for number, row in enumerate(_rows(source), start=1):
        try:
            yield from CONVERTERS[name](row)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{source}: row {number} is none of {name}: {type(error).__name__} {error}"
            ) from error


def _rows(source: str) -> Iterable[Row]:
    path = Path(source).expanduser()
    if path.is_file():
        return _local_rows(path)
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"source {source!r} is no local file; a data set of the hub needs the package "
            "datasets: pip install datasets"
        ) from error
    hub, config, split = [*source.split(":"), "", ""][:3]
    rows: Iterable[Row] = datasets.load_dataset(
        hub, config or None, split=split or "train", streaming=True
    )
    return rows


def _local_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InvalidRequest(f"{path}:{number}: not JSON: {error}") from error


def _choices(labels: Iterable[str], texts: Iterable[str]) -> list[tuple[str, str]]:
    return list(zip(labels, texts, strict=True))


def _listed(choices: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{label}. {text}" for label, text in choices)


def _line(prefix: str, query: str, continuation: str) -> Line:
    return {"prefix": prefix, "query": query, "continuation": continuation}
