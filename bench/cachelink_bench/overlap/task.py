"""What is measured and what comes out, as plain data for the measuring process and result files."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cachelink_bench.emulation.namespaces import EmulatedLink

Way = Literal["prefill", "link", "overlap", "serial"]

OVERLAP: Final = "overlap"
SERIAL: Final = "serial"
"""Receivers' names in their senders' lists begin with the mode."""


class Case(msgspec.Struct, frozen=True):
    """One kind of handoff.

    Attributes:
        name: for people.
        codec: as the sender takes it.
        receiver: its name in the senders' lists.
        mapper: ``any`` for a receiver with another model, else empty.
    """

    name: str
    codec: str
    receiver: str
    mapper: str = ""


class Nodes(msgspec.Struct, frozen=True):
    """A sender and its receivers, by the addresses of their gRPC servers."""

    sender: str
    receivers: dict[str, str]


class Task(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        link: between the nodes; its rate is set for each case and ratio.
        nodes: that overlap.
        serial: that do one stage after another.
        cases: kinds of handoffs.
        ratios: of prefill seconds to link seconds.
        ids: of the prefix.
        rounds: measured runs of each case and ratio.
    """

    link: EmulatedLink
    nodes: Nodes
    serial: Nodes
    cases: tuple[Case, ...]
    ratios: tuple[float, ...]
    ids: tuple[int, ...]
    rounds: int


class Run(msgspec.Struct, frozen=True):
    """One call.

    Attributes:
        round: its number.
        case: its name.
        ratio: of prefill to link that was aimed at.
        way: what ran.
        rate_bits: of the shaper, a second.
        wire_bytes: of the payload; 0 for a prefill.
        phases: of the receipt.
        prefilled_at_s: of each block, from the reply to Reserve, sender's clock.
        sent_at_s: likewise.
    """

    round: int
    case: str
    ratio: float
    way: Way
    rate_bits: int
    wire_bytes: int
    phases: dict[str, float]
    prefilled_at_s: tuple[float, ...] = ()
    sent_at_s: tuple[float, ...] = ()


class Measured(msgspec.Struct, frozen=True):
    """What the measuring process says in the end.

    Attributes:
        prefill_s: alone, once before the rounds: from it the rates follow.
        runs: all of them, in the order in which they ran.
    """

    prefill_s: float
    runs: tuple[Run, ...]
