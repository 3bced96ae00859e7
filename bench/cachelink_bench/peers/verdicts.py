"""What CacheLink's rows have to reach beside the others, and whether they did.

Ratios of two ways are formed within a round, both as multiples of the plain socket's runs around
them, at the largest size that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachelink_bench.peers.results import Result, is_right, to_socket
from cachelink_bench.peers.rounds import Run
from cachelink_bench.statistics import Spread

LINK_BOUND_BITS: Final = 1_000_000_000
"""Up to this rate the link decides the time of every way, and CPU is what is left to compare."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison.

    Attributes:
        what: is compared.
        value: that was measured.
        target: to reach.
        most: whether the target is an upper bound; a lower one otherwise.
    """

    what: str
    value: float
    target: float
    most: bool = True

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.value <= self.target if self.most else self.value >= self.target

    def text(self, *, quiet: bool) -> str:
        """One line; without a judgement where the machine was not quiet."""
        bound = "at most" if self.most else "at least"
        judged = ("met" if self.met else "MISSED") if quiet else "no verdict: not quiet"
        return f"{self.what}: {self.value:.2f}, target {bound} {self.target:g}: {judged}"


def judge(
    runs: Sequence[Run], results: Mapping[str, Result], mib: float, rate_bits: int
) -> list[Verdict]:
    """Every comparison that the rows of one size allow.

    Args:
        runs: all.
        results: of the size.
        mib: the size.
        rate_bits: of the link; 0 for loopback.
    """
    verdicts: list[Verdict] = []
    for plane in ("grpc", "tcp"):
        key = f"native@{plane}"
        if key not in results or results[key].wrong:
            continue
        bound = 0 < rate_bits <= LINK_BOUND_BITS
        verdicts += _link_bound(results[key], plane) if bound else _cpu_bound(results[key], plane)
        if not bound and plane == "grpc":
            mine = [run for run in runs if run.mib == mib]
            verdicts += _beside_peers(mine, results, key)
    return verdicts


def _link_bound(result: Result, plane: str) -> Iterator[Verdict]:
    yield Verdict(f"{result.name}, time × socket", result.to_socket.median, 1.02)
    yield Verdict(f"{result.name}, CPU s/GB", _cpu(result), {"grpc": 2.3, "tcp": 0.7}[plane])


def _cpu_bound(result: Result, plane: str) -> Iterator[Verdict]:
    if plane == "tcp":
        yield Verdict(f"{result.name}, time × socket", result.to_socket.median, 1.1)
        yield Verdict(f"{result.name}, CPU s/GB", _cpu(result), 0.6)


def _beside_peers(
    runs: Sequence[Run], results: Mapping[str, Result], key: str
) -> Iterator[Verdict]:
    for peer, make in _BESIDE.items():
        if peer in results and (both := _by_round(runs, key, peer)):
            yield make(results[key].name, results[peer].name, both)


def _at_most(ours: str, theirs: str, both: Sequence[tuple[float, float]]) -> Verdict:
    ratio = Spread.of([mine / peer for mine, peer in both]).median
    return Verdict(f"{ours}, time / that of {theirs}", ratio, 1.3)


def _faster(ours: str, theirs: str, both: Sequence[tuple[float, float]]) -> Verdict:
    ratio = Spread.of([peer / mine for mine, peer in both]).median
    return Verdict(f"{theirs}, time / that of {ours}", ratio, 2.0, most=False)


_BESIDE: Final[dict[str, Callable[[str, str, Sequence[tuple[float, float]]], Verdict]]] = {
    "mooncake": _at_most,
    "lmcache": _faster,
}


def _by_round(runs: Sequence[Run], *keys: str) -> list[tuple[float, float]]:
    """Multiples of the socket of two rows, of every round that has both right."""
    first, second = (
        {run.round: to_socket(run) for run in runs if run.row == key and is_right(run)}
        for key in keys
    )
    return [(first[number], second[number]) for number in sorted(first.keys() & second.keys())]


def _cpu(result: Result) -> float:
    return result.sender_cpu_s_per_gb + result.receiver_cpu_s_per_gb
