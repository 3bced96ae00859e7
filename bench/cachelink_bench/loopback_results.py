"""From runs to rates, ratios and the sentence that says what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cachelink_bench.loopback_parts import Parts, Side
from cachelink_bench.loopback_rounds import Rounds
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread, ratios

TIME_TO_SOCKET: Final = 1.1
"""Time of a native handoff with digests over tcp, by that of a socket copy of the same bytes."""

TIME_TO_BARE: Final = 1.1
"""Time of a native handoff with digests, over either plane, by that of a bare gRPC stream."""

CPU_S_PER_GB: Final = 0.6
"""CPU seconds of both processes for 10⁹ bytes over tcp."""


@dataclass(frozen=True, slots=True)
class RateRow:
    """One arm.

    Attributes:
        name: of the arm.
        wall_s: of each run.
        gb_per_s: of the cache's own bytes, whatever was sent for them.
        to_bare: rate divided by that of bare gRPC in the same round.
        to_socket: rate divided by that of the socket in the same round.
        cpu_to_bare: CPU seconds of both processes divided by bare gRPC's in the same round. Other
            programs slow a run down without adding to it.
        sender_cpu_s: of each run.
        receiver_cpu_s: of each run.
    """

    name: str
    wall_s: Spread
    gb_per_s: Spread
    to_bare: Spread
    to_socket: Spread
    cpu_to_bare: Spread
    sender_cpu_s: Spread
    receiver_cpu_s: Spread


def rate_rows(names: Mapping[str, str], measured: Rounds, native_bytes: int) -> dict[str, RateRow]:
    """Sums every arm up."""
    walls = {key: [run.wall_s for run in runs] for key, runs in measured.items()}
    cpus = {
        key: [run.sender_cpu_s + run.receiver_cpu_s for run in runs]
        for key, runs in measured.items()
    }
    return {
        key: RateRow(
            name=names[key],
            wall_s=Spread.of(walls[key]),
            gb_per_s=Spread.of([native_bytes / s / 1e9 for s in walls[key]]),
            # Equal bytes: a rate's ratio is the inverse of the times'.
            to_bare=ratios(walls["bare"], walls[key]),
            to_socket=ratios(walls["socket"], walls[key]),
            cpu_to_bare=ratios(cpus[key], cpus["bare"]),
            sender_cpu_s=Spread.of([run.sender_cpu_s for run in runs]),
            receiver_cpu_s=Spread.of([run.receiver_cpu_s for run in runs]),
        )
        for key, runs in measured.items()
    }


def rows_text(rows: Mapping[str, RateRow], wire_bytes: Mapping[str, int]) -> str:
    """The main table: medians, quartiles in parentheses."""
    header = (
        "first byte → installed", "wire MB", "ms", "fastest", "GB/s", "rate × bare gRPC",
        "rate × socket", "CPU ms send", "receive", "CPU × bare gRPC",
    )  # fmt: skip
    body = [
        (
            row.name,
            f"{wire_bytes[key] / 1e6:.1f}",
            row.wall_s.text(1e3, 1),
            f"{min(row.wall_s.runs) * 1e3:.1f}",
            f"{row.gb_per_s.median:.2f}",
            row.to_bare.text(),
            row.to_socket.text(),
            f"{row.sender_cpu_s.median * 1e3:.0f}",
            f"{row.receiver_cpu_s.median * 1e3:.0f}",
            f"{row.cpu_to_bare.median:.2f}",
        )
        for key, row in rows.items()
    ]
    return table(header, body)


def parts_text(parts: Mapping[str, Parts], bare: RateRow, native_bytes: int) -> str:
    """The parts, alone on one core, as GB of the cache's own bytes a second."""
    send, receive = (
        native_bytes / spread.median / 1e9 for spread in (bare.sender_cpu_s, bare.receiver_cpu_s)
    )
    lines = [
        f"{codec}: "
        + ", ".join(f"{name} {rate:.1f}" for name, rate in part.rates(native_bytes).items())
        for codec, part in parts.items()
    ]
    lines.append(f"bare gRPC with its copies: send {send:.1f}, receive {receive:.1f}")
    return "parts, GB/s on one core — " + "; ".join(lines)


def limits_text(native: Parts, rows: Mapping[str, RateRow]) -> str:
    """What the native handoff's time goes into, the busier side first."""
    handoff, bare = rows["native"], rows["bare"]
    wall_s = handoff.wall_s.median
    sides = {
        # The baseline's send has the one copy that joining is, its receive the one that installing is.
        "sender": Side(
            handoff.sender_cpu_s.median,
            bare.sender_cpu_s.median,
            native.digest_s,
            max(0.0, native.encode_join_s - native.copy_s),
        ),
        "receiver": Side(
            handoff.receiver_cpu_s.median,
            bare.receiver_cpu_s.median,
            native.digest_s,
            max(0.0, native.install_s - native.copy_s),
        ),
    }
    ordered = sorted(sides.items(), key=lambda item: -item[1].cpu_s)
    return "limits: " + "; ".join(side.text(name, wall_s) for name, side in ordered)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target.

    Attributes:
        name: what is compared.
        measured: by the median of the rounds.
        target: what it may be at most.
    """

    name: str
    measured: float
    target: float

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.measured <= self.target

    def text(self, why: str) -> str:
        """One line.

        Args:
            why: there is no verdict; empty if there is one.
        """
        word = f"no verdict: {why}" if why else "met" if self.met else "MISSED"
        return f"target: {self.name} {self.measured:.2f} ≤ {self.target:g}, {word}"


def verdicts(rows: Mapping[str, RateRow], native_bytes: int) -> tuple[Verdict, ...]:
    """Every target of a native handoff with digests."""
    tcp, grpc = rows["tcp"], rows["native"]
    cpu_s = tcp.sender_cpu_s.median + tcp.receiver_cpu_s.median
    return (
        Verdict("time over tcp by the socket's", 1 / tcp.to_socket.median, TIME_TO_SOCKET),
        Verdict("time over tcp by bare gRPC's", 1 / tcp.to_bare.median, TIME_TO_BARE),
        Verdict("CPU seconds a GB over tcp", cpu_s / native_bytes * 1e9, CPU_S_PER_GB),
        Verdict("time over gRPC by bare gRPC's", 1 / grpc.to_bare.median, TIME_TO_BARE),
    )
