"""Looks at both daemons before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from cachelink_bench.serial.versions import is_serial
from cachelink_bench.two_node.measure import Addresses
from cachelink_bench.two_node.plan import Mode
from cachelink_core.errors import (
    ConfigError,
    IdentityMismatch,
    LinkError,
    PeerGone,
    UnsupportedVersion,
)
from cachelink_core.identity import ModelIdentity, diff
from cachelink_core.rpc.client import NodeInfo, ReceiverClient, SenderClient

PROBE_DEADLINE_S: Final = 10.0


class Pair(msgspec.Struct, frozen=True):
    """Two daemons that fit.

    Attributes:
        sender: its address.
        receiver: its address.
        receiver_name: of the receiver in the sender's list.
        sender_version: of the distribution.
        receiver_version: of the distribution.
        identity: of the model on both.
    """

    sender: str
    receiver: str
    receiver_name: str
    sender_version: str
    receiver_version: str
    identity: ModelIdentity


def find_pair(
    sender: str, receiver: str, receiver_name: str = "", mode: Mode = "overlapped"
) -> Pair:
    """Asks both daemons what they are.

    Args:
        sender: its address.
        receiver: its address.
        receiver_name: of the receiver in the sender's list; empty if there is only one.
        mode: in which they have to work.

    Raises:
        PeerGone: one cannot be reached; the message says which.
        IdentityMismatch: they do not have the same model.
        ConfigError: an address of the other kind, a node of the other mode, or a name that the
            sender does not have.
    """
    with SenderClient(sender) as asks, ReceiverClient(receiver) as answers:
        ours, theirs = _ping(asks, "sender"), _ping(answers, "receiver")
    _check_mode(ours, "sender", sender, mode)
    _check_mode(theirs, "receiver", receiver, mode)
    differing = diff(theirs.identity, ours.identity)
    if differing:
        raise IdentityMismatch(differing)
    return Pair(
        sender=sender,
        receiver=receiver,
        receiver_name=_name(ours.receivers, receiver_name),
        sender_version=ours.version,
        receiver_version=theirs.version,
        identity=theirs.identity,
    )


def find_pairs(wanted: Mapping[Mode, Addresses]) -> dict[Mode, Pair]:
    """The same for the nodes of every mode, which must all have one model.

    Raises:
        CacheLinkError: see ``find_pair``.
    """
    found = {
        mode: find_pair(at.sender, at.receiver, at.receiver_name, mode)
        for mode, at in wanted.items()
    }
    first, *others = found.values()
    for other in others:
        differing = diff(first.identity, other.identity)
        if differing:
            raise IdentityMismatch(differing)
    return found


def _ping(client: SenderClient | ReceiverClient, role: str) -> NodeInfo:
    try:
        return client.ping(deadline_s=PROBE_DEADLINE_S)
    except LinkError as error:
        raise PeerGone(f"--{role} {client.address} cannot be reached: {error}") from error
    except UnsupportedVersion as error:  # it has no such method
        raise ConfigError(f"--{role} {client.address} is no {role}: {error}") from error


def _check_mode(node: NodeInfo, role: str, address: str, mode: Mode) -> None:
    if is_serial(node.version) == (mode == "serial"):
        return
    raise ConfigError(
        f"--{role} {address} is a serial node ({node.version}); --serial measures it"
        if mode == "overlapped"
        else f"--{role} {address} is no serial node ({node.version}); --serial needs one that "
        f"was started with: python -m cachelink_bench.serial {role}"
    )


def _name(known: tuple[str, ...], wanted: str) -> str:
    if wanted in known:
        return wanted
    if not wanted and len(known) == 1:
        return known[0]
    listed = ", ".join(known) or "nobody"
    chosen = f"has no {wanted!r}" if wanted else "has several or none"
    raise ConfigError(f"receiver: the sender's list {chosen}; it knows {listed} (--receiver-name)")
