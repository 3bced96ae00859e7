"""What an emulated link shall be like."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from cachelink_core.errors import ConfigError
from cachelink_core.units import parse_duration

_RATE: Final = re.compile(r"(?P<count>[0-9]+(?:\.[0-9]+)?)(?P<unit>[kmg])bit", re.IGNORECASE)
_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9}

MIN_RATE_BITS: Final = 10**6
MAX_RATE_BITS: Final = 100 * 10**9
MAX_DELAY_S: Final = 1.0

_LEAST_BURST_BYTES: Final = 128 * 1024
"""A segmentation-offloaded packet of 64 KiB must fit into the bucket, or tbf cuts it up."""

_BURST_S: Final = 0.002
"""The bucket holds what the link carries in this time: the kernel's timer is not finer by much."""


class LinkSpec(msgspec.Struct, frozen=True):
    """A link, the same in both directions.

    Attributes:
        rate: as given, such as ``1gbit``.
        rate_bits: a second.
        delay_s: added one way.
        loss_percent: of packets.
        most_burst_bytes: limit of the token bucket; 0 for none.
        socket_buffer_bytes: what TCP may grow its buffers to at both ends; 0 for the kernel's default.
    """

    rate: str
    rate_bits: int
    delay_s: float = 0.0
    loss_percent: float = 0.0
    most_burst_bytes: int = 0
    socket_buffer_bytes: int = 0

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket."""
        wanted = int(self.rate_bits / 8 * _BURST_S)
        if self.most_burst_bytes:
            wanted = min(wanted, self.most_burst_bytes)
        return max(_LEAST_BURST_BYTES, wanted)

    @property
    def needs_netem(self) -> bool:
        """Whether a token bucket alone is not enough."""
        return self.delay_s > 0 or self.loss_percent > 0


def parse_link(rate: str, delay: str = "0s", loss: str = "0") -> LinkSpec:
    """Reads the options of a link.

    Args:
        rate: such as ``1gbit`` or ``10mbit``.
        delay: one way, such as ``0.2ms``.
        loss: percent of packets, with or without the sign.

    Raises:
        ConfigError: one of them is no such value, or beyond what makes sense.
    """
    match = _RATE.fullmatch(rate)
    bits = int(float(match["count"]) * _UNITS[match["unit"].lower()]) if match else 0
    if not MIN_RATE_BITS <= bits <= MAX_RATE_BITS:
        raise ConfigError(f"--emulate is {rate!r}, not a rate from 1mbit to 100gbit")
    try:
        delay_s = parse_duration(delay)
    except ConfigError as error:
        raise ConfigError(f"--delay: {error}") from error
    if delay_s > MAX_DELAY_S:
        raise ConfigError(f"--delay is {delay!r}; the most is {MAX_DELAY_S:g} s")
    try:
        percent = float(loss.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0.0 <= percent < 100.0:
        raise ConfigError(f"--loss is {loss!r}, not a percentage from 0 to below 100")
    return LinkSpec(rate.lower(), bits, delay_s, percent)
