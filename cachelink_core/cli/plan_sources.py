"""Where ``cachelink plan`` gets its measured values: nodes, a stored ping, or a published pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cachelink_core.cli.connection import Connection
from cachelink_core.cli.sources import read_text
from cachelink_core.errors import InvalidRequest
from cachelink_core.identity import ModelIdentity
from cachelink_core.planner import CacheShape, Job, Measurement, Measures, Way, transfer_ways
from cachelink_core.planner.pairs import pair_named
from cachelink_core.planner.readings import LINK, Load, measures_of
from cachelink_core.planner.shape import shape_of
from cachelink_core.rpc.client import NodeInfo

_PAIR_LINK_BYTES_PER_S = 125_000_000
"""1 Gb/s: what a pair is shown over when no link is given."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a plan is made from.

    Attributes:
        shape: of the sender's cache.
        measures: of both nodes and the link.
        ways: of moving the cache.
        published: whether it is a published pair, whose sender holds every prefix and whose link and
            translation follow each other.
    """

    shape: CacheShape
    measures: Measures
    ways: tuple[Way, ...]
    published: bool = False

    def job(self, tokens: int, *, held: bool, questions: int, answer_tokens: int) -> Job:
        """One prefix of ``tokens`` tokens."""
        return Job(
            shape=self.shape,
            tokens=tokens,
            held_tokens=tokens if held or self.published else 0,
            overlap=not self.published,
            questions=questions,
            answer_tokens=answer_tokens,
        )


class _Node(msgspec.Struct, frozen=True):
    """What a plan needs of a node: the fields of ping's document that it reads."""

    identity: ModelIdentity
    measurements: tuple[Measurement, ...]
    receivers: tuple[str, ...] = ()


class _Ping(msgspec.Struct, frozen=True):
    sender: _Node
    receiver: _Node


def from_pair(name: str, link_bytes_per_s: float | None) -> Source:
    """A published pair, as its published latencies suppose.

    Raises:
        InvalidRequest: no pair has that name.
    """
    pair = pair_named(name)
    ways = transfer_ways(pair.shape.dtype, mapped=True)
    measures = pair.measures(link_bytes_per_s or _PAIR_LINK_BYTES_PER_S)
    return Source(pair.shape, measures, ways, published=True)


def from_file(file: str, name: str | None, link_bytes_per_s: float | None) -> Source:
    """What ``cachelink ping --json`` printed.

    Raises:
        InvalidRequest: the file cannot be read or holds something else, or nothing is known of the
            link.
    """
    try:
        ping = msgspec.json.decode(read_text(file), type=_Ping)
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"measurements in {file!r} are not what ping --json prints for two nodes: {error}"
        ) from error
    return _source(ping.sender, ping.receiver, name, link_bytes_per_s, Load())


def from_nodes(
    connection: Connection,
    sender: str,
    receiver: str,
    name: str | None,
    link_bytes_per_s: float | None,
    deadline_s: float,
) -> Source:
    """Asks both nodes now; what is under way there counts.

    Raises:
        InvalidRequest: nothing is known of the link.
        CacheLinkError: a node cannot be asked.
    """
    with connection.sender(sender) as sending, connection.receiver(receiver) as receiving:
        ours = sending.ping(deadline_s=deadline_s)
        theirs = receiving.ping(deadline_s=deadline_s)
    load = Load(
        sender_answers=ours.answers, transfers=theirs.transfers, receiver_answers=theirs.answers
    )
    return _source(_node(ours), _node(theirs), name, link_bytes_per_s, load)


def _node(info: NodeInfo) -> _Node:
    return _Node(info.identity, info.measurements, info.receivers)


def _source(
    sender: _Node,
    receiver: _Node,
    name: str | None,
    link_bytes_per_s: float | None,
    load: Load,
) -> Source:
    same_model = sender.identity == receiver.identity
    measures = measures_of(
        sender.measurements,
        receiver.measurements,
        name or _receiver_name(sender.receivers, sender.measurements),
        load=load,
        link_bytes_per_s=link_bytes_per_s,
        same_model=same_model,
    )
    identity = sender.identity
    ways = transfer_ways(identity.dtype, mapped=not same_model)
    return Source(shape_of(identity.layers, identity.dtype), measures, ways)


def _receiver_name(listed: Sequence[str], measurements: Sequence[Measurement]) -> str:
    """The receiver that the sender has measured, or the only one of its list."""
    measured = sorted(
        {m.name.partition("/")[0] for m in measurements if m.name.endswith(f"/{LINK}")}
    )
    known = measured or list(listed)
    if len(known) > 1:
        raise InvalidRequest(f"name: the sender knows {', '.join(known)}; name one with --name")
    return known[0] if known else ""
