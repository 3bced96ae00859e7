"""One case: the link is made, warmed up and left to calm down; then handoffs and iperf3 take turns."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from cachelink_bench.emulation.namespaces import EmulatedLink, emulated_link
from cachelink_bench.emulation.probes import echo_s, iperf_gbit
from cachelink_bench.link.caller import Moved
from cachelink_bench.link.cases import Case
from cachelink_bench.link.hosts import Hosts, Plane, started
from cachelink_bench.link.socket_pair import NAME as SOCKET
from cachelink_bench.link.socket_pair import SocketPair
from cachelink_bench.link.subjects import Prefix
from cachelink_bench.report import QUIET_LOAD, load_average
from cachelink_bench.turns import turned

WARM_UPS: Final = 2
"""Handoffs of each plane before the first that counts: windows and buffers have grown by then."""

_LOOK_S: Final = 2.0


class Round(msgspec.Struct, frozen=True):
    """What was measured between two runs of iperf3.

    Attributes:
        before_gbit: iperf3 before it.
        after_gbit: iperf3 after it, which is the next round's before.
        moved: plane → its handoff; ``socket`` → a plain copy of as many bytes.
    """

    before_gbit: float
    after_gbit: float
    moved: dict[str, Moved]


class Measured(msgspec.Struct, frozen=True):
    """One case.

    Attributes:
        shaper: what limits and delays.
        round_trip_s: of a byte.
        tokens: of the cache.
        load_before: load average when the command began.
        load_average: when the first round began, after waiting for it to settle.
        rounds: in order.
    """

    shaper: str
    round_trip_s: float
    tokens: int
    load_before: float
    load_average: float
    rounds: tuple[Round, ...]


def measure(
    case: Case,
    prefix: Prefix,
    planes: Sequence[Plane],
    *,
    captures: Path,
    settle_s: float,
    load_before: float,
) -> Measured:
    """Runs a case from nothing to its figures; nothing of it but captured caches is left behind.

    Args:
        case: to run.
        prefix: that is handed over.
        planes: that take turns with a plain socket, in an order that rotates.
        captures: folder of caches that were read before.
        settle_s: how long to wait at most for the load of prefill and warm-up to pass.
        load_before: when the command began.

    Raises:
        CacheLinkError: the link cannot be made, or a daemon failed.
    """
    options = ["--model.name", prefix.model, "--model.device", "cpu", "--model.threads", "1"]
    with (
        tempfile.TemporaryDirectory(prefix="cachelink-link-") as logs,
        emulated_link(case.link) as on,
        started(on, planes, options, captures=captures, logs=Path(logs)) as hosts,
    ):
        _say(f"{case.name}: reading {len(prefix.ids)} tokens and warming up")
        held = {plane: hosts.hold(plane, prefix.ids) for plane in planes}
        # Nobody asks a model whose cache alone is of interest.
        payload_bytes = _warm_up(hosts, held, compare=case.subject != "wide")
        with SocketPair(on, payload_bytes) as socket_pair:
            arms: dict[str, Callable[[], Moved]] = {
                plane: partial(hosts.move, plane, cache_id) for plane, cache_id in held.items()
            }
            arms[SOCKET] = socket_pair.copy
            socket_pair.copy()
            load = _settled(settle_s)
            rounds = _rounds(case, on, arms, payload_bytes)
        return Measured(on.shaper, echo_s(on), len(prefix.ids), load_before, load, rounds)


def _rounds(
    case: Case, on: EmulatedLink, arms: dict[str, Callable[[], Moved]], payload_bytes: int
) -> tuple[Round, ...]:
    rounds: list[Round] = []
    before = iperf_gbit(on, payload_bytes=payload_bytes)
    for number in range(case.rounds):
        moved = {name: arms[name]() for name in turned(arms, number)}
        after = iperf_gbit(on, payload_bytes=payload_bytes)
        rounds.append(Round(before, after, {name: moved[name] for name in arms}))
        before = after
        _say(f"{case.name}: round {number + 1} of {case.rounds}")
    return tuple(rounds)


def _warm_up(hosts: Hosts, held: dict[Plane, str], *, compare: bool) -> int:
    """Moves each cache a few times, the first time to be asked; returns its payload's bytes."""
    moved = [
        hosts.move(plane, cache_id, compare=compare and number == 0)
        for plane, cache_id in held.items()
        for number in range(WARM_UPS)
    ]
    return moved[-1].payload_bytes


def _settled(most_s: float) -> float:
    """Waits for the load average to fall to that of a quiet machine; returns the last reading."""
    deadline_s = time.monotonic() + most_s
    while (load := load_average()) > QUIET_LOAD and time.monotonic() < deadline_s:
        time.sleep(min(_LOOK_S, max(0.0, deadline_s - time.monotonic())))
    return load


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
