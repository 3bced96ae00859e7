"""Looks at both daemons before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from cachelink_bench.serial.versions import is_serial
from cachelink_bench.two_node.client import Addresses
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
        at: where they are, with the receiver's name.
        sender_version: of the distribution.
        receiver_version: of the distribution.
        identity: of the model on both.
    """

    at: Addresses
    sender_version: str
    receiver_version: str
    identity: ModelIdentity


def find_pair(at: Addresses, mode: Mode = "overlapped") -> Pair:
    """Asks both daemons what they are.

    Args:
        at: where they are.
        mode: in which they have to work.

    Raises:
        PeerGone: one cannot be reached; the message says which.
        IdentityMismatch: they do not have the same model.
        Denied: they ask for a token, or for another one.
        ConfigError: an address of the other kind, a node of the other mode, a name that the sender
            does not have, or no file of that name.
    """
    reach = at.connection
    with reach.sender(at.sender) as asks, reach.receiver(at.receiver) as answers:
        ours, theirs = _ping(asks, "sender"), _ping(answers, "receiver")
    _check_mode(ours, "sender", at.sender, mode)
    _check_mode(theirs, "receiver", at.receiver, mode)
    differing = diff(theirs.identity, ours.identity)
    if differing:
        raise IdentityMismatch(differing)
    return Pair(
        at=msgspec.structs.replace(at, receiver_name=_name(ours.receivers, at.receiver_name)),
        sender_version=ours.version,
        receiver_version=theirs.version,
        identity=theirs.identity,
    )


def find_pairs(wanted: Mapping[Mode, Addresses]) -> dict[Mode, Pair]:
    """The same for the nodes of every mode, which must all have one model.

    Raises:
        CacheLinkError: see ``find_pair``.
    """
    found = {mode: find_pair(at, mode) for mode, at in wanted.items()}
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
