"""What ``cachelink-bench latency`` says: floors first, then totals with speed-ups, then phases."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from cachelink_bench.latency_arms import Run
from cachelink_bench.latency_limits import Limits
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread, ratios

SUM_TOLERANCE: Final = 0.02
NAMES: Final = {
    "native_blocks": "native, blocks",
    "native_one_shot": "native, one forward",
    "ridge": "Ridge",
    "ridge_residual": "Ridge + residual",
}
TRANSPORT: Final = ("ridge", "ridge_residual")
NATIVE: Final = ("native_blocks", "native_one_shot")


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm at one prefix length.

    Attributes:
        total_s: spread over the rounds.
        phases_s: medians.
        sum_error: median fraction by which a run's phases missed its total: one run that was
            interrupted between two clocks says nothing.
        model_tokens: that the receiver's model read in one run.
    """

    total_s: Spread
    phases_s: dict[str, float]
    sum_error: float
    model_tokens: int

    @classmethod
    def of(cls, runs: Sequence[Run]) -> ArmResult:
        """Sums up the rounds of one arm."""
        counted = {run.model_tokens for run in runs}
        assert len(counted) == 1, f"an arm read {sorted(counted)} tokens"
        timings = [run.timing for run in runs]
        phases = {
            name: statistics.median([timing.phases_s[name] for timing in timings])
            for name in timings[0].phases_s
        }
        return cls(
            Spread.of([timing.total_s for timing in timings]),
            phases,
            statistics.median([timing.sum_error for timing in timings]),
            counted.pop(),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One prefix length.

    Attributes:
        tokens: of the prefix.
        arms: by name.
        sender_prefill_s: the sender's own prefill; None if it was not measured.
    """

    tokens: int
    arms: dict[str, ArmResult]
    sender_prefill_s: Spread | None

    @classmethod
    def of(cls, tokens: int, runs: Mapping[str, Sequence[Run]], cold_s: Sequence[float]) -> Result:
        """Sums up all rounds."""
        arms = {name: ArmResult.of(of_arm) for name, of_arm in runs.items()}
        return cls(tokens, arms, Spread.of(cold_s) if cold_s else None)

    @property
    def phases_sum(self) -> bool:
        """Whether every arm's phases sum to its total within 2 %, in the median run."""
        return all(arm.sum_error <= SUM_TOLERANCE for arm in self.arms.values())

    def speedup(self, native: str, transport: str) -> Spread:
        """How many times as long the native arm took, round by round."""
        return ratios(self.arms[native].total_s.runs, self.arms[transport].total_s.runs)

    def cold_s(self, transport: str) -> float | None:
        """Sender's prefill and transport together: a sum of two medians."""
        if self.sender_prefill_s is None:
            return None
        return self.sender_prefill_s.median + self.arms[transport].total_s.median

    def break_even_gbps(self, transport: str, token_bytes: int) -> float | None:
        """Gb/s above which moving the source cache as well still beats the faster native arm.

        None where transport is slower even without a link.
        """
        native = min(self.arms[name].total_s.median for name in NATIVE)
        spare = native - self.arms[transport].total_s.median
        return 8e-9 * token_bytes * self.tokens / spare if spare > 0 else None

    def document(self, token_bytes: int) -> dict[str, object]:
        """Plain data for the result file."""
        return {
            "tokens": self.tokens,
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
            "speedup": {
                f"{transport} over {native}": asdict(self.speedup(native, transport))
                for transport in TRANSPORT
                for native in NATIVE
            },
            "cold": {
                "sender_prefill_s": asdict(self.sender_prefill_s)
                if self.sender_prefill_s
                else None,
                "total_s": {transport: self.cold_s(transport) for transport in TRANSPORT},
            },
            "break_even_gbps": {
                transport: self.break_even_gbps(transport, token_bytes) for transport in TRANSPORT
            },
        }


def limits_text(floors: Sequence[Limits], rates: Mapping[str, float]) -> str:
    """The theoretical limit: arithmetic over the measured GEMM rate."""
    rows = [
        (
            f"{floor.tokens:,}",
            f"{floor.prefill_flop / 1e12:.4g}",
            f"{floor.ridge_flop / 1e12:.4g}",
            f"{floor.residual_flop / 1e12:.4g}",
            f"{1e3 * floor.native_s:.2f}",
            f"{1e3 * floor.ridge_s:.2f}",
            f"{1e3 * floor.residual_s:.2f}",
            f"{floor.native_s / floor.residual_s:.1f}",
        )
        for floor in floors
    ]
    header = (
        "prefix",
        "prefill TFLOP",
        "Ridge TFLOP",
        "+ residual TFLOP",
        "native ms",
        "Ridge ms",
        "+ residual ms",
        "speed-up",
    )
    return (
        "## Theoretical limit\n\n"
        f"GEMM rate measured here: {rates['prefill'] / 1e12:.3g} TFLOP/s in the models' dtype, "
        f"{rates['map'] / 1e12:.3g} in the mapper's. Arithmetic alone, without the query.\n\n"
        + table(header, rows)
    )


def totals_text(results: Sequence[Result], token_bytes: int) -> str:
    """Totals to the first token, speed-ups over both native arms, cold, and break-even links."""
    header = ("prefix", *(f"{name} ms" for name in NAMES.values()))
    rows = [(f"{r.tokens:,}", *(r.arms[name].total_s.text(1e3) for name in NAMES)) for r in results]
    return "\n\n".join(
        (
            "## Time to the first token: medians (quartiles)",
            table(header, rows),
            "## Speed-up: native over transport, of the same round",
            _speedups(results),
            "## Cold: the sender's prefill included\n\n"
            "Sums of two medians; the sender reads the prefix in one forward.",
            _cold(results),
            "## Break-even link\n\n"
            f"A source token has {token_bytes:,} bytes. Above this rate moving them first, without "
            "overlap, still beats the faster native arm.",
            _break_even(results, token_bytes),
        )
    )


def phases_text(results: Sequence[Result]) -> str:
    """Median phases of each transport arm, and how far phases missed their totals."""
    blocks = []
    for arm in TRANSPORT:
        phases = list(results[0].arms[arm].phases_s)
        header = ("prefix", *(f"{name} ms" for name in phases), "sum off by")
        rows = [
            (
                f"{r.tokens:,}",
                *(f"{1e3 * r.arms[arm].phases_s[name]:.2f}" for name in phases),
                f"{100 * r.arms[arm].sum_error:.2f} %",
            )
            for r in results
        ]
        blocks.append(f"## Phases of {NAMES[arm]}: medians\n\n{table(header, rows)}")
    met = all(result.phases_sum for result in results)
    blocks.append(
        f"phases sum to their totals within {SUM_TOLERANCE:.0%} in every arm's median run: "
        f"{'yes' if met else 'NO'}"
    )
    return "\n\n".join(blocks)


def _speedups(results: Sequence[Result]) -> str:
    header = (
        "prefix",
        *(f"{NAMES[t]} vs {NAMES[n]}" for n in NATIVE for t in TRANSPORT),
        "tokens read: native",
        "transport",
    )
    rows = [
        (
            f"{r.tokens:,}",
            *(r.speedup(n, t).text() for n in NATIVE for t in TRANSPORT),
            f"{r.arms['native_one_shot'].model_tokens:,}",
            f"{r.arms['ridge'].model_tokens:,}",
        )
        for r in results
    ]
    return table(header, rows)


def _cold(results: Sequence[Result]) -> str:
    header = ("prefix", "sender's prefill ms", *(f"{NAMES[t]} ms" for t in TRANSPORT))
    rows = []
    for result in results:
        if result.sender_prefill_s is None:
            return "not measured"
        totals = [result.cold_s(transport) or 0.0 for transport in TRANSPORT]
        cells = (f"{1e3 * total:.2f}" for total in totals)
        rows.append((f"{result.tokens:,}", result.sender_prefill_s.text(1e3), *cells))
    return table(header, rows)


def _break_even(results: Sequence[Result], token_bytes: int) -> str:
    header = ("prefix", *(f"{NAMES[t]} Gb/s" for t in TRANSPORT))
    rows = [
        (f"{r.tokens:,}", *(_rate(r.break_even_gbps(t, token_bytes)) for t in TRANSPORT))
        for r in results
    ]
    return table(header, rows)


def _rate(gbps: float | None) -> str:
    return "never" if gbps is None else f"{gbps:.2f}"
