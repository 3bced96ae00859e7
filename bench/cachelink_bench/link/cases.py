"""The links on which a handoff is held against iperf3, and what it has to reach there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from cachelink_bench.emulation.spec import LinkSpec
from cachelink_core.errors import ConfigError
from cachelink_core.limits import MIB

Subject = Literal["smollm2", "wide", "tiny"]
"""Whose cache is moved: a real model's, a wide one's of random weights, or a few bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One link and what goes over it.

    Attributes:
        name: of the option.
        link: its properties.
        subject: whose cache is moved.
        tokens: of the cache; 0 for all that the model's window leaves beside a question.
        rounds: measured; each has a run of every plane, between two of iperf3.
        target: share of iperf3's rate.
    """

    name: str
    link: LinkSpec
    subject: Subject
    tokens: int
    rounds: int
    target: float


CASES: Final = {
    case.name: case
    for case in (
        Case("1gbit", LinkSpec("1gbit", 10**9), "smollm2", 0, 7, 0.98),
        Case(
            "10gbit",
            # With the kernel's default buffers TCP itself leaves a third of this link idle.
            LinkSpec(
                "10gbit", 10**10, most_burst_bytes=1_000_000, socket_buffer_bytes=16 * MIB
            ),
            "wide",
            8192,
            9,
            0.90,
        ),
        Case(
            "50ms",
            LinkSpec("1gbit", 10**9, delay_s=0.025, socket_buffer_bytes=32 * MIB),
            "wide",
            2048,
            7,
            0.90,
        ),
    )
}  # fmt: skip
"""By name."""

SMOKE: Final = Case("smoke", LinkSpec("100mbit", 10**8), "tiny", 4096, 1, 0.0)
"""Shows that it runs; its figures say nothing."""


def pick(names: str, rounds: int | None) -> tuple[Case, ...]:
    """The cases of an option.

    Args:
        names: separated by commas.
        rounds: instead of their own; None for their own.

    Raises:
        ConfigError: there is none of that name, or fewer than one round.
    """
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        raise ConfigError(f"--cases has {unknown[0]!r}; there are {', '.join(CASES)}")
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; the least is 1")
    picked = (CASES[name] for name in wanted)
    return tuple(case if rounds is None else replace(case, rounds=rounds) for case in picked)
