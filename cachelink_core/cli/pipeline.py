"""``cachelink pipeline``: many documents and questions; the next prefix is always under way."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cachelink_core.cli.connection import (
    DEFAULT_RECEIVER,
    DEFAULT_SENDER,
    CaOption,
    CertificateOption,
    Connection,
    KeyOption,
    NodeOption,
    SenderOption,
    TlsOption,
    TokenOption,
)
from cachelink_core.cli.exit_codes import ExitCode, exit_code
from cachelink_core.cli.handoff import only_receiver
from cachelink_core.cli.output import error_document, reporting
from cachelink_core.cli.sources import STDIN, read_text
from cachelink_core.errors import CacheLinkError, InternalError, InvalidRequest
from cachelink_core.rpc.client import (
    Answered,
    Document,
    HandoffStages,
    OneSlotPipeline,
    Outcome,
    Question,
    Sampling,
    Stop,
    Task,
)
from cachelink_core.rpc.client_pipeline import PreparedTask


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file."""

    question: str
    document: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    """A line, and the folder that its paths are relative to."""

    line: _Line
    folder: Path

    def task(self, sampling: Sampling) -> Task:
        """Reads the document.

        Raises:
            InvalidRequest: it cannot be read.
        """
        line = self.line
        text = line.text if line.document is None else read_text(str(self.folder / line.document))
        return Task(Document(text or ""), Question(line.question), sampling)


@reporting
def pipeline(
    items: Annotated[
        str,
        typer.Option(
            metavar="FILE|-",
            help='JSON lines: {"document": PATH, "question": TEXT}, or "text" for the document.',
        ),
    ],
    sender: SenderOption = DEFAULT_SENDER,
    node: NodeOption = DEFAULT_RECEIVER,
    receiver: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the sender's list; by default the only one there."),
    ] = None,
    codec: Annotated[
        str, typer.Option(help="auto, native, bf16, int8 or int4, each perhaps with +zstd.")
    ] = "",
    mapper: Annotated[
        str, typer.Option(help="Digest of a mapper, any or none, for another model.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer at most.")] = 256,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
) -> None:
    """Answer many questions in order, each document handed over while the one before is answered.

    Prints one JSON line an item, as soon as it is answered. An item that fails has its error there,
    and the later ones go on; the exit code is then that of the first error.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    given = read_items(items)
    connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
    first_error: CacheLinkError | None = None
    with connection.sender(sender) as asked, connection.receiver(node) as answering:
        stages = HandoffStages(
            asked, answering, receiver or only_receiver(asked), codec=codec, mapper=mapper
        )

        def prepare(item: _Item, stop: Stop) -> PreparedTask:
            # Here and not before: a document that is missing is an error of its own item.
            return stages.prepare(item.task(sampling), stop)

        with OneSlotPipeline(given, prepare, stages.answer, stages.release) as outcomes:
            for outcome in outcomes:
                error = _show(outcome)
                first_error = first_error or error
    raise typer.Exit(ExitCode.OK if first_error is None else exit_code(first_error))


def read_items(name: str) -> list[_Item]:
    """The lines of a file; paths in it are relative to its folder.

    Raises:
        InvalidRequest: it cannot be read, or a line is no item; the message has its number.
    """
    folder = Path() if name == STDIN else Path(name).parent
    lines = read_text(name).splitlines()
    return [
        _Item(_read_line(number, line), folder)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _read_line(number: int, text: str) -> _Line:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"items, line {number}: {error}") from error
    if (line.document is None) == (line.text is None):
        raise InvalidRequest(f"items, line {number}: give exactly one of document and text")
    if line.document == STDIN:
        raise InvalidRequest(f"items, line {number}: document is '-'; give a file")
    return line


def _show(outcome: Outcome[_Item, Answered]) -> CacheLinkError | None:
    """Prints one outcome; returns its error."""
    times = {"prepare_s": outcome.prepare_s, "answer_s": outcome.answer_s}
    error = outcome.error
    if error is None:
        document = _answer_document(outcome.value())
    else:
        if not isinstance(error, CacheLinkError):
            error = InternalError(f"{type(error).__name__}: {error}")
        document = error_document(error)
    encoded = msgspec.json.encode({"item": outcome.index, **document, **times})
    sys.stdout.write(encoded.decode() + "\n")
    sys.stdout.flush()
    return error


def _answer_document(answered: Answered) -> dict[str, Any]:
    return {
        "text": answered.text,
        "token_ids": answered.token_ids,
        "finish_reason": answered.final.finish_reason,
        "path": answered.final.path,
        "prefix_tokens": answered.receipt.tokens,
        "wire_bytes": answered.receipt.wire_bytes,
    }
