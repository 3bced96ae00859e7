"""From rounds to shares of the link, and whether they suffice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cachelink_bench.link.cases import Case
from cachelink_bench.link.rounds import Measured
from cachelink_bench.link.socket_pair import NAME as SOCKET
from cachelink_bench.report import QUIET_LOAD, table
from cachelink_bench.statistics import Spread

FORMAT = "cachelink link 1"
MET, MISSED = "met", "MISSED"


class Row(msgspec.Struct, frozen=True):
    """One data plane in one case.

    Attributes:
        case: its name.
        plane: ``grpc`` or ``tcp``, or ``socket`` for the plain copy beside them.
        payload_bytes: of one handoff.
        gbit_per_s: payload bits from the first payload frame to Installed.
        iperf_gbit_per_s: mean of the runs of iperf3 before and after each handoff's round.
        share: the first divided by the second, round by round.
        allocate_s: allocation and pre-faulting of the destination, before the clock starts.
        tail_s: last frame received to Installed.
        sender_cpu_s_per_gb: of its process while the clock runs.
        receiver_cpu_s_per_gb: likewise; the pre-faulting came before.
        target: of the share.
        verdict: in words.
    """

    case: str
    plane: str
    payload_bytes: int
    gbit_per_s: Spread
    iperf_gbit_per_s: Spread
    share: Spread
    allocate_s: Spread
    tail_s: Spread
    sender_cpu_s_per_gb: Spread
    receiver_cpu_s_per_gb: Spread
    target: float
    verdict: str

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without a verdict."""
        return {MET: True, MISSED: False}.get(self.verdict)


class Document(msgspec.Struct, frozen=True):
    """The result.

    Attributes:
        format: of this document.
        date: of the run, UTC.
        command: that makes the same runs.
        environment: versions and machine.
        planes: that were measured.
        cases: name → what was measured, every single run.
        rows: the table.
    """

    format: str
    date: str
    command: str
    environment: dict[str, object]
    planes: tuple[str, ...]
    cases: dict[str, Measured]
    rows: tuple[Row, ...]


def make_rows(case: Case, measured: Measured) -> tuple[Row, ...]:
    """Sums a case up, one row a plane."""
    return tuple(_row(case, measured, plane) for plane in measured.rounds[0].moved)


def _row(case: Case, measured: Measured, plane: str) -> Row:
    runs = [each.moved[plane] for each in measured.rounds]
    iperf = [(each.before_gbit + each.after_gbit) / 2 for each in measured.rounds]
    rates = [run.payload_bytes * 8 / run.seconds / 1e9 for run in runs]
    gigabytes = runs[0].payload_bytes / 1e9
    share = Spread.of([rate / best for rate, best in zip(rates, iperf, strict=True)])
    return Row(
        case=case.name,
        plane=plane,
        payload_bytes=runs[0].payload_bytes,
        gbit_per_s=Spread.of(rates),
        iperf_gbit_per_s=Spread.of(iperf),
        share=share,
        allocate_s=Spread.of([run.allocate_s for run in runs]),
        tail_s=Spread.of([run.tail_s for run in runs]),
        sender_cpu_s_per_gb=Spread.of([run.sender_cpu_s / gigabytes for run in runs]),
        receiver_cpu_s_per_gb=Spread.of([run.receiver_cpu_s / gigabytes for run in runs]),
        target=case.target,
        verdict=_verdict(case, plane, share, measured.load_average),
    )


def _verdict(case: Case, plane: str, share: Spread, load: float) -> str:
    if plane == SOCKET:
        return "-"
    if not case.target:
        return "none: a smoke run"
    if load > QUIET_LOAD:
        return f"none: NOT QUIET, load {load:.2f}"
    return MET if share.median >= case.target else MISSED


def rows_text(rows: Sequence[Row]) -> str:
    """The table: medians, quartiles in parentheses."""
    header = (
        "case, plane", "MB", "Gb/s", "iperf3", "share", "target", "verdict", "allocate ms",
        "tail ms", "CPU s/GB send", "receive",
    )  # fmt: skip
    body = [
        (
            f"{row.case}, {row.plane}",
            f"{row.payload_bytes / 1e6:.1f}",
            row.gbit_per_s.text(digits=3),
            f"{row.iperf_gbit_per_s.median:.3f}",
            row.share.text(digits=3),
            f"{row.target:.2f}",
            row.verdict,
            f"{row.allocate_s.median * 1e3:.0f}",
            f"{row.tail_s.median * 1e3:.1f}",
            f"{row.sender_cpu_s_per_gb.median:.2f}",
            f"{row.receiver_cpu_s_per_gb.median:.2f}",
        )
        for row in rows
    ]
    return table(header, body)


def conditions_text(cases: Mapping[str, Measured]) -> str:
    """One line a case: the link as it was found, and how quiet the machine was."""
    return "\n".join(
        f"{name}: {found.shaper}; echo {found.round_trip_s * 1e3:.2f} ms; {found.tokens} tokens; "
        f"load average {found.load_before:.2f} when the command began, "
        f"{found.load_average:.2f} when the first round did"
        for name, found in cases.items()
    )
