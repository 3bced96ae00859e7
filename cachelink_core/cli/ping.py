"""``cachelink ping``: who two nodes are, and whether a cache of one fits the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from cachelink_core import units
from cachelink_core.cli.connection import (
    DEFAULT_RECEIVER,
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
from cachelink_core.cli.exit_codes import ExitCode, exit_code
from cachelink_core.cli.output import (
    columns,
    console,
    error_document,
    print_json,
    reporting,
    show_error,
)
from cachelink_core.errors import CacheLinkError
from cachelink_core.identity import LayerGeometry, diff
from cachelink_core.rpc.client import NodeInfo


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two nodes differ, so that one refuses the other's caches.

    Attributes:
        field: its dotted name.
        sender: value there.
        receiver: value there.
    """

    field: str
    sender: str
    receiver: str


@reporting
def ping(
    sender: SenderOption = DEFAULT_SENDER,
    receiver: Annotated[
        str, typer.Option("--receiver", metavar="HOST:PORT", help="The receiver.")
    ] = DEFAULT_RECEIVER,
    node: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Only this one, whichever it is.")
    ] = None,
    deadline: Annotated[str, typer.Option(metavar="TIME", help="For each node.")] = "5s",
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show what the nodes are, and field by field whether their caches fit; exits 3 if they do not."""
    connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
    deadline_s = units.parse_duration(deadline)
    nodes: dict[str, NodeInfo] = {}
    failures: list[CacheLinkError] = []
    wanted = {"node": node} if node is not None else {"sender": sender, "receiver": receiver}
    for role, address in wanted.items():
        try:
            info = _ask(connection, role, address, deadline_s)
            nodes[info.role if role == "node" else role] = info
        except CacheLinkError as error:
            failures.append(error)
    differences: tuple[Difference, ...] = ()
    if len(nodes) == 2:
        differences = compare(nodes["sender"], nodes["receiver"])
    fits = None if len(nodes) < 2 else not differences
    if json_output:
        print_json(
            {
                **{role: _plain(info) for role, info in nodes.items()},
                "fits": fits,
                "differences": differences,
                **(error_document(failures[0]) if failures else {}),
            }
        )
    else:
        _show(nodes, differences, fits=fits)
    for failure in failures:
        show_error(failure, as_json=False)
    if failures:
        raise typer.Exit(exit_code(failures[0]))
    if fits is False:
        raise typer.Exit(ExitCode.REFUSED)


def compare(sender: NodeInfo, receiver: NodeInfo) -> tuple[Difference, ...]:
    """Every field because of which the receiver refuses the sender's caches."""
    found = [
        Difference(each.field, each.ours, each.theirs)
        for each in diff(sender.identity, receiver.identity)
    ]
    if sender.schema_version > receiver.schema_version:
        found.append(
            Difference("schema_version", str(sender.schema_version), str(receiver.schema_version))
        )
    return tuple(found)


def _ask(connection: Connection, role: str, address: str, deadline_s: float) -> NodeInfo:
    open_client = {
        "sender": connection.sender,
        "receiver": connection.receiver,
        "node": connection.node,
    }[role]
    with open_client(address) as client:
        return client.ping(deadline_s=deadline_s)


def _plain(info: NodeInfo) -> dict[str, object]:
    fields = {name: getattr(info, name) for name in NodeInfo.__dataclass_fields__}
    return {**fields, "identity_digest": info.identity.digest()}


def _show(
    nodes: Mapping[str, NodeInfo], differences: tuple[Difference, ...], *, fits: bool | None
) -> None:
    if not nodes:
        return
    table = columns("", *nodes)
    described = [_described(info) for info in nodes.values()]
    for name in described[0]:
        table.add_row(name, *(each[name] for each in described))
    console().print(table)
    if fits:
        console().print("\nThey fit: every field of the identity is the same.")
    elif differences:
        console().print(f"\nThey do not fit; {len(differences)} differ:")
        details = columns("field", "sender", "receiver")
        for each in differences:
            details.add_row(each.field, each.sender, each.receiver)
        console().print(details)


def _described(info: NodeInfo) -> dict[str, str]:
    identity = info.identity
    rope = ", ".join(f"{key} {value}" for key, value in sorted(identity.rope.items()))
    return {
        "version": info.version,
        "manifest schema": str(info.schema_version),
        "epoch": info.epoch,
        "model": info.model_name,
        "identity": identity.digest()[:16],
        "architecture": identity.architecture,
        "dtype": identity.dtype,
        "device": f"{info.device or '-'}, attention {info.attention or '-'}",
        "config": identity.config_digest[:16],
        "weights": identity.weights_digest[:16],
        "vocabulary": identity.vocabulary_digest[:16],
        "chat template": identity.template_digest[:16],
        "rope": rope,
        "layers": describe_layers(identity.layers),
        "window": f"{identity.max_positions} tokens",
        "adapter": identity.adapter_digest[:16] or "none",
        "codecs": f"{' '.join(info.codecs)}, packings {' '.join(info.packings)}",
        "receivers": " ".join(info.receivers) or "-",
        "transfers": f"{info.transfers} of {info.transfer_slots}",
        "answers": f"{info.answers} of {info.answer_slots}",
        "measured": ", ".join(f"{m.name} {m.value:.4g} {m.unit}" for m in info.measurements)
        or "nothing yet",
    }


def describe_layers(layers: tuple[LayerGeometry, ...]) -> str:
    """Layers in words, equal neighbours counted."""
    parts: list[tuple[str, int]] = []
    for layer in layers:
        window = f" over {layer.window}" if layer.window else ""
        text = (
            f"{layer.attention}{window}, {layer.kv_heads} heads of {layer.head_dim}, "
            f"keys {layer.key_layout}"
        )
        if parts and parts[-1][0] == text:
            parts[-1] = text, parts[-1][1] + 1
        else:
            parts.append((text, 1))
    return "; ".join(f"{count} × {text}" for text, count in parts)
