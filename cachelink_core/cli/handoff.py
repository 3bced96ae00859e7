"""``cachelink handoff``: have a sender read a prefix and hand its cache over."""

from __future__ import annotations

from typing import Annotated, Self

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cachelink_core import limits, units
from cachelink_core.cli.connection import (
    DEFAULT_SENDER,
    CaOption,
    CertificateOption,
    Connection,
    JsonOption,
    KeyOption,
    SenderOption,
    TlsOption,
    TokenOption,
)
from cachelink_core.cli.output import console, facts, megabytes, print_json, reporting, seconds
from cachelink_core.cli.sources import only_one, read_messages, read_text, read_token_ids
from cachelink_core.cli.wanted import ErrorOption, LeastTrust, TrustOption
from cachelink_core.errors import InvalidRequest
from cachelink_core.rpc import types
from cachelink_core.rpc.client import Document, HeldCache, Receipt, SenderClient


@reporting
def handoff(
    document: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="A document; - is standard input.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="FILE|LIST", help="A prefix of token ids, verbatim.")
    ] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="A conversation, as a JSON list.")
    ] = None,
    cache_id: Annotated[
        str | None, typer.Option(metavar="ID", help="A cache that the sender holds already.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put a document into the chat template; by default where the model has one.",
        ),
    ] = None,
    sender: SenderOption = DEFAULT_SENDER,
    receiver: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the sender's list; by default the only one there."),
    ] = None,
    codec: Annotated[
        str, typer.Option(help="auto, native, bf16, int8 or int4, each perhaps with +zstd.")
    ] = "",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Send each block once it is prefilled.")
    ] = True,
    lease: Annotated[str | None, typer.Option(metavar="TIME", help="Such as 30s.")] = None,
    mapper: Annotated[
        str, typer.Option(help="Digest of a mapper, any or none, for another model.")
    ] = "",
    least_trust: TrustOption = LeastTrust.MAPPED,
    max_error: ErrorOption = None,
    questions: Annotated[
        int, typer.Option(min=1, help="That will be asked about it, for --codec auto.")
    ] = 1,
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="For all of it, prefill included.")
    ] = units.format_duration(limits.HANDOFF_DEADLINE_S),
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
    json_output: JsonOption = False,
) -> None:
    """Have a sender read a prefix and hand its cache over; prints the cache's id and the times."""
    prefix = read_prefix(document, token_ids, messages, cache_id, chat=chat)
    deadline_s = units.parse_duration(deadline)
    lease_s = None if lease is None else units.parse_duration(lease)
    connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
    with connection.sender(sender) as client, ProgressBars(quiet=json_output) as bars:
        receipt = client.handoff(
            prefix,
            receiver or only_receiver(client),
            codec=codec,
            stream=stream,
            lease_s=lease_s,
            mapper=mapper,
            least_trust=least_trust.value,
            max_error=max_error,
            questions=questions,
            on_progress=bars.show,
            deadline_s=deadline_s,
        )
    if json_output:
        print_json(receipt)
    else:
        show_receipt(receipt)


def read_prefix(
    document: str | None,
    token_ids: str | None,
    messages: str | None,
    cache_id: str | None,
    *,
    chat: bool | None,
) -> types.PrefixSource:
    """The prefix that the arguments name.

    Raises:
        InvalidRequest: not exactly one is given, or it cannot be read.
    """
    which = only_one(
        "prefix", FILE=document, token_ids=token_ids, messages=messages, cache_id=cache_id
    )
    if which == "token_ids":
        return read_token_ids(str(token_ids))
    if which == "messages":
        return read_messages(str(messages))
    if which == "cache_id":
        return HeldCache(str(cache_id))
    return Document(read_text(str(document)), chat)


def only_receiver(client: SenderClient) -> str:
    """The one receiver of a sender's list.

    Raises:
        InvalidRequest: it has none, or several.
        CacheLinkError: the sender cannot be asked.
    """
    names = client.ping().receivers
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise InvalidRequest(f"receiver: the sender's list has {found}; name one with --receiver")
    return names[0]


def show_receipt(receipt: Receipt) -> None:
    """Prints a receipt for people."""
    share = receipt.wire_bytes / receipt.native_bytes if receipt.native_bytes else 0.0
    rows = {
        "cache": receipt.cache_id,
        "handoff": receipt.handoff_id,
        "at the sender": receipt.sender_cache_id,
        "tokens": f"{receipt.tokens}, of these prefilled now {receipt.prefilled_tokens}",
        "codec": f"{receipt.codec} ({receipt.trust})",
        "sent": f"{megabytes(receipt.wire_bytes)} in {receipt.chunk_count} chunks, "
        f"{share:.3f} of native",
    }
    if receipt.already_installed:
        rows["sent"] = "nothing: the receiver had it"
    if receipt.recommendation == "re_read":
        rows = {
            "sent": "nothing: the receiver is faster when it reads the prefix itself",
            "tokens": str(receipt.tokens),
        }
    if receipt.plan is not None:
        rows["chosen"] = receipt.plan.why
        if receipt.plan.predicted_s is not None:
            rows["predicted"] = seconds(receipt.plan.predicted_s)
    rows |= {name: seconds(value) for name, value in receipt.phases.items()}
    console().print(facts(rows))


class ProgressBars:
    """Two bars on standard error: prefilled and sent. Nothing where nobody watches."""

    def __init__(self, *, quiet: bool) -> None:
        """Prepares the bars.

        Args:
            quiet: show nothing at all.
        """
        shown_on = console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=shown_on,
            transient=True,
            disable=quiet or not shown_on.is_terminal,
        )
        self._prefilled: TaskID = self._progress.add_task("prefilled", total=None)
        self._sent: TaskID = self._progress.add_task("sent", total=None)

    def show(self, progress: types.Progress) -> None:
        """Moves both bars."""
        self._progress.update(
            self._prefilled, total=progress.tokens, completed=progress.prefilled_tokens
        )
        self._progress.update(
            self._sent, total=progress.raw_bytes or None, completed=progress.sent_raw_bytes
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()
