"""What one invocation measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from cachelink_bench.emulation.spec import LinkSpec
from cachelink_core.errors import ConfigError
from cachelink_core.limits import MIB

SIZES: Final = (16.0, 64.0, 256.0)
ROUNDS: Final = (20, 12, 8)
"""Of each size: small ones are short, and vary more."""

_MOST_S: Final = 30.0
"""Of one run at the link's rate: every deadline within a pair is twice that."""


class Plan(msgspec.Struct, frozen=True):
    """As resolved.

    Attributes:
        sizes: in MiB.
        rounds: of each size.
        rows: keys.
        planes: data planes of CacheLink's rows.
        seed: of the order.
        model: whose cache is moved.
        base_tokens: of the captured cache.
        block_tokens: the prefill schedule.
        start_deadline_s: for each process.
        link: to emulate; None for loopback.
    """

    sizes: tuple[float, ...]
    rounds: tuple[int, ...]
    rows: tuple[str, ...]
    planes: tuple[str, ...]
    seed: int
    model: str
    base_tokens: int
    block_tokens: int
    start_deadline_s: float
    link: LinkSpec | None = None

    @property
    def rate_bits(self) -> int:
        """Of the link; 0 for loopback."""
        return self.link.rate_bits if self.link else 0

    def check(self) -> None:
        """Checks what can be checked before anything is started.

        Raises:
            ConfigError: sizes or rounds make no sense, or a run would outlast the deadlines.
        """
        if not self.sizes or min(self.sizes) <= 0:
            raise ConfigError(f"--sizes is {_listed(self.sizes)}; each must be above 0 MiB")
        if len(self.rounds) != len(self.sizes) or min(self.rounds) < 1:
            raise ConfigError(
                f"--rounds is {_listed(self.rounds)}, --sizes is {_listed(self.sizes)}; "
                "give one number of rounds, at least 1, or one for each size"
            )
        if self.link and max(self.sizes) * MIB * 8 / self.link.rate_bits > _MOST_S:
            raise ConfigError(
                f"--emulate is {self.link.rate!r}: {max(self.sizes):g} MiB would take more than "
                f"{_MOST_S:g} s each time; give smaller --sizes"
            )


def numbers(text: str, option: str) -> tuple[float, ...]:
    """The numbers of a list that commas separate.

    Raises:
        ConfigError: something else is among them.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, not a list of numbers") from error


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
