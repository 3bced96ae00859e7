"""What is measured and what comes out, as plain data for the measuring process and result files."""

from __future__ import annotations

from typing import Literal

import msgspec

from cachelink_bench.emulation.namespaces import EmulatedLink
from cachelink_core.rpc.types import Receipt

Way = Literal["prefill", "link", "overlap", "serial"]


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
        receipt: with the phases, and the times of each block.
    """

    round: int
    case: str
    ratio: float
    way: Way
    rate_bits: int
    receipt: Receipt


class Measured(msgspec.Struct, frozen=True, tag=True):
    """What the measuring process says in the end.

    Attributes:
        prefill_s: alone, once before the rounds: from it the rates follow.
        runs: all of them, in the order in which they ran.
    """

    prefill_s: float
    runs: tuple[Run, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What it says instead when it failed.

    Attributes:
        message: of the error.
    """

    message: str
