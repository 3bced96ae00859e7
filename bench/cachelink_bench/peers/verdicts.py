"""What CacheLink's native rows have to reach beside the others, and whether they did.

Ratios of two ways are formed within a round, both as multiples of the plain socket's runs around
them, at the largest size that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachelink_bench.peers.results import Results, is_right, to_socket
from cachelink_bench.peers.rounds import Run
from cachelink_bench.peers.rows import SOCKET, Row
from cachelink_bench.peers.running import Measured
from cachelink_bench.statistics import Spread

LINK_BOUND_BITS: Final = 1_000_000_000
"""Up to this rate the link decides the time of every way, and CPU is what is left to compare."""

FRAMED: Final = "framed"
"""The raw copy that digests while more arrives. ``socket`` digests all bytes after the last one, on
the clock, so the faster of the two is what a raw copy with digests takes."""

PEERS: Final = {
    "NIXL": ("nixl", "nixl-default"),
    "Mooncake": ("mooncake", "mooncake-1mib"),
    "LMCache": ("lmcache",),
}
"""Each peer's rows; the fastest of them stands for it."""

_TIME_TO_PEER: Final[dict[str, dict[str, float | None]]] = {
    "tcp": dict.fromkeys(PEERS, 1.0),
    "grpc": {"NIXL": None, "Mooncake": 1.3, "LMCache": 0.5},
}
"""By plane, at most; gRPC's copies leave it behind NIXL, which is shown without a target."""

_TIME_TO_RAW: Final = 1.1
_CPU_S_PER_GB: Final = 0.6

_TIME_LINK_BOUND: Final = 1.02
"""To anything, where the link decides."""
_CPU_LINK_BOUND: Final = {"grpc": 2.3, "tcp": 0.7}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison.

    Attributes:
        what: is compared.
        value: that was measured; None if it could not be judged.
        target: at most; None for a ratio that is only shown.
        why: it could not be judged.
    """

    what: str
    value: float | None
    target: float | None
    why: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without a value or a target."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target

    @property
    def binding(self) -> bool:
        """Whether a strict run needs it to be met."""
        return self.target is not None or bool(self.why)

    def text(self, why: str) -> str:
        """One line.

        Args:
            why: the run gives no verdict; empty if it does.
        """
        if self.value is None:
            return f"{self.what}: not judged: {self.why}"
        if self.target is None:
            return f"{self.what}: {self.value:.2f}, no target"
        word = f"no verdict: {why}" if why else "met" if self.met else "MISSED"
        return f"{self.what}: {self.value:.2f}, target at most {self.target:g}: {word}"


def judge(measured: Measured, results: Results, mib: float, rate_bits: int) -> list[Verdict]:
    """Every comparison of the native rows, those included that cannot be made.

    Args:
        measured: rows, runs, and who was left out.
        results: of the size.
        mib: the size.
        rate_bits: of the link; 0 for loopback.
    """
    judging = _Judging(measured, results, mib, bound=0 < rate_bits <= LINK_BOUND_BITS)
    natives = [row for row in measured.rows if row.key.startswith("native@")]
    return [verdict for row in natives for verdict in judging.of(row, row.key.partition("@")[2])]


class _Judging:
    """The comparisons at one size."""

    def __init__(self, measured: Measured, results: Results, mib: float, *, bound: bool) -> None:
        self._rows = {row.key: row for row in (SOCKET, *measured.rows)}
        self._left_out = measured.left_out
        self._runs = [run for run in measured.runs if run.mib == mib]
        self._results, self._bound = results, bound

    def of(self, row: Row, plane: str) -> Iterator[Verdict]:
        """Those of one of CacheLink's rows."""
        if why := self._unfit(row.key):
            yield Verdict(row.name, None, None, why)
            return
        if self._bound or plane == "tcp":
            yield self._beside_raw(row)
            result = self._results[row.key]
            cpu_s = result.sender_cpu_s_per_gb + result.receiver_cpu_s_per_gb
            target = _CPU_LINK_BOUND[plane] if self._bound else _CPU_S_PER_GB
            yield Verdict(f"{row.name}, CPU s/GB", cpu_s, target)
        for peer, keys in PEERS.items():
            target_or_none = _TIME_LINK_BOUND if self._bound else _TIME_TO_PEER[plane][peer]
            yield self._beside_peer(row, peer, keys, target_or_none)

    def _beside_raw(self, row: Row) -> Verdict:
        what, target = f"{row.name}, time ÷ ", _TIME_LINK_BOUND if self._bound else _TIME_TO_RAW
        if why := self._unfit(FRAMED):
            return Verdict(f"{what}raw copy", None, target, f"{FRAMED}: {why}")
        fastest = self._fastest([SOCKET.key, FRAMED])
        return Verdict(what + self._results[fastest].name, self._ratio(row.key, fastest), target)

    def _beside_peer(
        self, row: Row, peer: str, keys: Sequence[str], target: float | None
    ) -> Verdict:
        unfit = {key: self._unfit(key) for key in keys}
        fit = [key for key, why in unfit.items() if not why]
        if not fit:
            reasons = "; ".join(f"{key}: {why}" for key, why in unfit.items())
            return Verdict(f"{row.name}, time ÷ {peer}", None, target, reasons)
        fastest = self._fastest(fit)
        what = f"{row.name}, time ÷ {self._results[fastest].name}"
        return Verdict(what, self._ratio(row.key, fastest), target)

    def _unfit(self, key: str) -> str:
        """Why nothing can be compared with a row; empty if it can."""
        row = self._rows.get(key)
        if row is None:
            return "not among --rows"
        if row.name in self._left_out:
            return self._left_out[row.name]
        result = self._results.get(key)
        if result is None:
            return "not measured at this size"
        return f"{result.wrong} of {result.runs} runs were wrong" if result.wrong else ""

    def _fastest(self, keys: Sequence[str]) -> str:
        return min(keys, key=lambda key: self._results[key].to_socket.median)

    def _ratio(self, ours: str, theirs: str) -> float:
        """Median over the rounds of one row's time by another's."""
        mine, other = (_multiples(self._runs, key) for key in (ours, theirs))
        return Spread.of(
            [mine[number] / other[number] for number in sorted(mine.keys() & other.keys())]
        ).median


def _multiples(runs: Sequence[Run], key: str) -> dict[int, float]:
    """Multiples of the socket of a row, by round."""
    return {run.round: to_socket(run) for run in runs if run.row == key and is_right(run)}
