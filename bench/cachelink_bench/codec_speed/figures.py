"""From rounds to rates, and from rates to verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachelink_bench.codec_speed.measure import Arm, Sample
from cachelink_bench.report import table
from cachelink_bench.statistics import Spread

GB: Final = 1e9
LINK_GB_PER_S: Final = 1.25
"""10 Gb/s."""

MIN_ENCODE: Final = 0.9
MIN_DECODE: Final = 1.5
"""GB/s of bf16 that a compiled codec must reach on one core, RoPE included."""

GOAL: Final = LINK_GB_PER_S
"""At this rate of bf16 a quantized handoff is no slower than a native one at 10 Gb/s."""


@dataclass(frozen=True, slots=True)
class Row:
    """One arm over all rounds, in GB of the cache's own dtype a second and core.

    Attributes:
        subject: what was encoded.
        arm: how.
        encode: rate.
        decode: rate.
        wire_share: wire bytes over native bytes.
        encode_cores: that fill 10 Gb/s with wire bytes, at the median.
        decode_cores: that empty it.
    """

    subject: str
    arm: Arm
    encode: Spread
    decode: Spread
    wire_share: float
    encode_cores: float
    decode_cores: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rate beside what it should be.

    Attributes:
        name: of the rate.
        value: median, GB/s.
        limit: at least.
        met: whether it is.
        goal: whether this is no target: nobody promised it.
    """

    name: str
    value: float
    limit: float
    met: bool
    goal: bool

    def text(self, why: str) -> str:
        """One line.

        Args:
            why: there is no verdict; empty if there is one.
        """
        kind = "goal" if self.goal else "target"
        missed = "not reached" if self.goal else "MISSED"
        word = f"no verdict: {why}" if why else "met" if self.met else missed
        return f"{kind}: {self.name}: {self.value:.2f} GB/s, at least {self.limit:g}: {word}"


def make_row(
    subject: str, arm: Arm, samples: Sequence[Sample], native_bytes: int, wire_bytes: int
) -> Row:
    """Sums up one arm."""
    encode = Spread.of([native_bytes / sample.encode_s / GB for sample in samples])
    decode = Spread.of([native_bytes / sample.decode_s / GB for sample in samples])
    share = wire_bytes / native_bytes
    cores = (LINK_GB_PER_S / (rate.median * share) for rate in (encode, decode))
    return Row(subject, arm, encode, decode, share, *cores)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Targets and goals of compiled ``int8`` and ``int4`` with RoPE, on every subject."""
    found: list[Verdict] = []
    for row in rows:
        if row.arm.backend != "compiled" or not row.arm.rope or "+" in row.arm.codec:
            continue
        name = f"{row.subject} {row.arm.codec}"
        for what, rate, least in (
            ("encode", row.encode.median, MIN_ENCODE),
            ("decode", row.decode.median, MIN_DECODE),
        ):
            for goal, limit in ((False, least), (True, GOAL)):
                found.append(Verdict(f"{name} {what}", rate, limit, rate >= limit, goal))
    return found


def rows_table(rows: Sequence[Row], memcpy: Mapping[str, Spread]) -> str:
    """Every arm, beside a copy of the same bytes."""
    header = ("arm", "backend", "RoPE", "encode", "decode", "of memcpy", "wire share", "cores")
    lines: list[tuple[str, ...]] = []
    for subject, copy in memcpy.items():
        lines.append((f"{subject}: memcpy", "", "", copy.text(), copy.text(), "1", "1", ""))
        for row in (row for row in rows if row.subject == subject):
            # Encoding native makes views of the cache: nothing is moved, and a rate says nothing.
            views = row.arm.codec == "native"
            encode = "-" if views else row.encode.text()
            of_copy, cores = (
                f"{'-' if views else f'{first:.2f}'}/{second:.2f}"
                for first, second in (
                    (row.encode.median / copy.median, row.decode.median / copy.median),
                    (row.encode_cores, row.decode_cores),
                )
            )
            rope = "yes" if row.arm.rope else "no"
            rates = encode, row.decode.text(), of_copy
            share = f"{row.wire_share:.3f}"
            lines.append((row.arm.codec, row.arm.backend, rope, *rates, share, cores))
    return table(header, lines)
