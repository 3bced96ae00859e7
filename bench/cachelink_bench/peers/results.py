"""From runs to one table for each size."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cachelink_bench.peers.payload import Size
from cachelink_bench.peers.rounds import Run
from cachelink_bench.peers.rows import SOCKET, Row
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread

_HEADER = (
    "first action → verified, in place", "n", "ms", "p95", "max", "× socket", "payload MB",
    "on the link MB", "CPU s/GB send", "receive", "server", "wrong",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One row at one size, from the runs whose content was right; all zeros if none was.

    Attributes:
        name: of the row.
        wall_s: the sender's first action → the receiver's word that all is verified and in place.
        p95_s: of these.
        max_s: of these.
        to_socket: each divided by the mean of the plain socket's runs before and after it.
        payload_bytes: that the way was given, or made, to send.
        device_bytes: median of what went over the link, headers and all.
        sender_cpu_s_per_gb: median CPU seconds of the sender a GB (1e9) of the cache's own bytes.
        receiver_cpu_s_per_gb: likewise.
        server_cpu_s_per_gb: likewise; 0 without a server.
        runs: how many were measured.
        wrong: runs after which something else lay there than was sent, or of which the receiver's
            check said so.
    """

    name: str
    wall_s: Spread
    p95_s: float
    max_s: float
    to_socket: Spread
    payload_bytes: int
    device_bytes: float
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float
    server_cpu_s_per_gb: float
    runs: int
    wrong: int


Results = dict[str, Result]
"""By key of the row, in the order of the table."""


def summed_up(rows: Iterable[Row], runs: Sequence[Run], size: Size) -> Results:
    """The results of one size; rows without a run are not among them."""
    results: Results = {}
    for row in (SOCKET, *rows):
        mine = [run for run in runs if run.row == row.key and run.mib == size.mib]
        if mine:
            right = [run for run in mine if is_right(run)]
            results[row.key] = _result(row, right, size, len(mine))
    return results


def is_right(run: Run) -> bool:
    """Whether the receiver had verified what was sent, and it was there."""
    return run.verified and run.right


def to_socket(run: Run) -> float:
    """Its time as a multiple of the plain socket's; 1 for a run of that itself."""
    return 2 * run.wall_s / (run.before_s + run.after_s) if run.before_s else 1.0


def results_text(size: Size, results: Mapping[str, Result]) -> str:
    """The table of one size: medians, quartiles in parentheses."""
    title = f"{size.mib:g} MiB: {size.tokens} tokens, {size.payload_bytes / 1e6:.1f} MB native"
    return f"{title}\n\n{table(_HEADER, [_cells(result) for result in results.values()])}"


def _result(row: Row, right: Sequence[Run], size: Size, count: int) -> Result:
    walls = [run.wall_s for run in right] or [0.0]
    gb = size.payload_bytes / 1e9

    def median(values: Iterable[float]) -> float:
        return statistics.median(list(values) or [0.0])

    return Result(
        name=row.name,
        wall_s=Spread.of(walls),
        p95_s=_p95(walls),
        max_s=max(walls),
        to_socket=Spread.of([to_socket(run) for run in right] or [0.0]),
        payload_bytes=max((run.payload_bytes for run in right), default=0),
        device_bytes=median(run.device_bytes for run in right),
        sender_cpu_s_per_gb=median(run.sender_cpu_s for run in right) / gb,
        receiver_cpu_s_per_gb=median(run.receiver_cpu_s for run in right) / gb,
        server_cpu_s_per_gb=median(run.server_cpu_s for run in right) / gb,
        runs=count,
        wrong=count - len(right),
    )


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if values[1:] else values[0]


def _cells(result: Result) -> tuple[str, ...]:
    if result.wrong == result.runs:
        blanks = ("-",) * (len(_HEADER) - 3)
        return (result.name, str(result.runs), *blanks, str(result.wrong))
    return (
        result.name,
        str(result.runs),
        result.wall_s.text(1e3, 1),
        f"{result.p95_s * 1e3:.1f}",
        f"{result.max_s * 1e3:.1f}",
        result.to_socket.text(),
        f"{result.payload_bytes / 1e6:.1f}",
        f"{result.device_bytes / 1e6:.1f}",
        f"{result.sender_cpu_s_per_gb:.2f}",
        f"{result.receiver_cpu_s_per_gb:.2f}",
        f"{result.server_cpu_s_per_gb:.2f}" if result.server_cpu_s_per_gb else "-",
        str(result.wrong),
    )
