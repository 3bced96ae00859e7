"""Measured values as nodes publish them, and back to what a prediction needs.

A name is flat text: ``prefill_token``, ``encode:int4+zstd``; what a sender measured towards one receiver
of its list begins with that receiver's name and a slash: ``far/link``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from cachelink_core.errors import InvalidRequest
from cachelink_core.planner.measures import (
    DEFAULT_RATES,
    CodecRates,
    Link,
    Measures,
    Prefill,
    Queue,
)

PREFILL_TOKEN: Final = "prefill_token"  # noqa: S105 - tokens of a model, not a secret
PREFILL_TOKEN2: Final = "prefill_token2"
PREFILL: Final = "prefill"
QUERY: Final = "query"
DECODE_TOKEN: Final = "decode_token"  # noqa: S105
ANSWER: Final = "answer"
TRANSFER: Final = "transfer"
MAP_TOKEN: Final = "map_token"  # noqa: S105
LINK: Final = "link"
FIXED: Final = "fixed"
ALLOCATE: Final = "allocate"

UNITS: Final[dict[str, str]] = {
    PREFILL_TOKEN: "s/token",
    PREFILL_TOKEN2: "s/token^2",
    PREFILL: "s",
    QUERY: "s",
    DECODE_TOKEN: "s/token",
    ANSWER: "s",
    TRANSFER: "s",
    MAP_TOKEN: "s/token",
    LINK: "B/s",
    FIXED: "s",
    ALLOCATE: "B/s",
    "encode": "B/s",
    "load": "B/s",
    "packed": "share",
}
"""Unit of each reading, by the word after the receiver's name and before the codec's."""


class Measurement(msgspec.Struct, frozen=True):
    """One measured value.

    Attributes:
        name: see the module.
        value: in ``unit``.
        unit: as in ``UNITS``.
        samples: how many measurements it comes from.
    """

    name: str
    value: float
    unit: str
    samples: int


def unit_of(name: str) -> str:
    """The unit of a reading, from its name."""
    return UNITS[name.rpartition("/")[2].partition(":")[0]]


class Load(msgspec.Struct, frozen=True):
    """What is under way at two nodes now.

    One answer alternates with a prefill, token by block; the others go before it. So of the answers
    at a node all but one count.

    Attributes:
        sender_answers: answers at the sender.
        sender_prefills: prefills there for other requests.
        transfers: to the receiver, from this sender or another.
        receiver_answers: answers at the receiver.
    """

    sender_answers: int = 0
    sender_prefills: int = 0
    transfers: int = 0
    receiver_answers: int = 0


def measures_of(
    sender: Iterable[Measurement],
    receiver: Iterable[Measurement],
    peer: str,
    *,
    load: Load | None = None,
    link_bytes_per_s: float | None = None,
    expected_bytes_per_s: float | None = None,
    same_model: bool = True,
) -> Measures:
    """Puts the readings of two nodes together.

    Args:
        sender: of the sender.
        receiver: of the receiver.
        peer: the receiver's name in the sender's list.
        load: what is under way now.
        link_bytes_per_s: overrides the measured link.
        expected_bytes_per_s: of the link as configured, while nothing was sent.
        same_model: whether one node's prefill may stand in for the other's that was not measured.

    Raises:
        InvalidRequest: nothing was sent over the link yet, and no rate is given.
    """
    ours = {each.name: each for each in sender}
    theirs = {each.name: each for each in receiver}
    load = load or Load()
    assumed: list[str] = []
    sender_prefill = _prefill(ours)
    receiver_prefill = _prefill(theirs)
    if receiver_prefill is None and sender_prefill is not None and same_model:
        receiver_prefill = sender_prefill
        assumed.append("the receiver's prefill: as the sender's")
    if sender_prefill is None and receiver_prefill is not None and same_model:
        sender_prefill = receiver_prefill
        assumed.append("the sender's prefill: as the receiver's")
    link = _link(ours, peer, link_bytes_per_s, expected_bytes_per_s, assumed)
    query = theirs.get(QUERY) or (ours.get(QUERY) if same_model else None)
    decode = theirs.get(DECODE_TOKEN) or (ours.get(DECODE_TOKEN) if same_model else None)
    map_token = ours.get(f"{peer}/{MAP_TOKEN}") or theirs.get(MAP_TOKEN)
    codecs, missing = _codecs(ours, theirs, peer)
    if missing:
        assumed.append(f"codec rates: {', '.join(missing)}")
    return Measures(
        link=link,
        codecs=codecs,
        receiver_prefill=receiver_prefill,
        sender_prefill=sender_prefill,
        map_token_s=map_token.value if map_token else None,
        query_s=query.value if query else 0.0,
        decode_token_s=decode.value if decode else 0.0,
        sender_queue=_sender_queue(load, ours),
        link_queue=Queue(load.transfers, _value(ours, f"{peer}/{TRANSFER}")),
        receiver_queue=Queue(max(0, load.receiver_answers - 1), _value(theirs, ANSWER)),
        assumed=tuple(assumed),
    )


def _sender_queue(load: Load, ours: Mapping[str, Measurement]) -> Queue:
    answers = max(0, load.sender_answers - 1)
    waiting = answers + load.sender_prefills
    busy_s = answers * _value(ours, ANSWER) + load.sender_prefills * _value(ours, PREFILL)
    return Queue(waiting, busy_s / waiting) if waiting else Queue()


def _prefill(readings: Mapping[str, Measurement]) -> Prefill | None:
    if PREFILL_TOKEN not in readings:
        return None
    return Prefill(readings[PREFILL_TOKEN].value, _value(readings, PREFILL_TOKEN2))


def _value(readings: Mapping[str, Measurement], name: str) -> float:
    found = readings.get(name)
    return found.value if found else 0.0


def _link(
    ours: Mapping[str, Measurement],
    peer: str,
    given: float | None,
    expected: float | None,
    assumed: list[str],
) -> Link:
    measured = ours.get(f"{peer}/{LINK}")
    rate = given or (measured.value if measured else None)
    if rate is None:
        rate = expected
        assumed.append("the link's rate: as configured")
    if rate is None:
        raise InvalidRequest(
            f"link: the sender has sent nothing to {peer!r} yet; give its rate, such as 1Gbit/s"
        )
    allocate = ours.get(f"{peer}/{ALLOCATE}")
    return Link(rate, _value(ours, f"{peer}/{FIXED}"), allocate.value if allocate else None)


def _codecs(
    ours: Mapping[str, Measurement], theirs: Mapping[str, Measurement], peer: str
) -> tuple[dict[str, CodecRates], list[str]]:
    """Measured rates over the assumed ones, and the codecs of which anything is assumed."""
    found: dict[str, CodecRates] = {}
    missing: list[str] = []
    for codec, usual in DEFAULT_RATES.items():
        encode = ours.get(f"encode:{codec}")
        load = ours.get(f"{peer}/load:{codec}") or theirs.get(f"load:{codec}")
        packed = ours.get(f"packed:{codec}")
        found[codec] = CodecRates(
            encode.value if encode else usual.encode_bytes_per_s,
            load.value if load else usual.load_bytes_per_s,
            packed.value if packed else usual.packed_share,
        )
        if encode is None or load is None:
            missing.append(codec)
    return found, missing
