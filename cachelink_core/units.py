"""Sizes, times and rates as people write them: ``8GB``, ``8GiB``, ``30s``, ``10Gbit/s``.

Decimal and binary prefixes mean what they say: ``1GB`` is 10⁹ bytes, ``1GiB`` is 2³⁰. Each parser has
a formatter whose text parses back to the same value.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final, TypeVar

from cachelink_core.errors import ConfigError

_SIZES: Final[dict[str, int]] = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
_FORMAT_ORDER: Final = ("TB", "TiB", "GB", "GiB", "MB", "MiB", "KB", "KiB")

_TIMES: Final[dict[str, Decimal]] = {
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
}
"""From the longest to the shortest, the order in which they may be combined."""

_BITS: Final[dict[str, int]] = {
    "bit": 1,
    "kbit": 10**3,
    "Mbit": 10**6,
    "Gbit": 10**9,
    "Tbit": 10**12,
}

_N = TypeVar("_N", int, float)
_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"
_QUANTITY: Final = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)")
_TIME_PART: Final = re.compile(rf"({_NUMBER})\s*([a-z]+)\s*")


def parse_size(value: object) -> int:
    """Reads a number of bytes: ``8GB``, ``1.5GiB``, ``512 MiB``, ``4096``.

    Raises:
        ConfigError: not a size, not a whole number of bytes, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _not_negative(value, "size", "8GB or 8GiB")
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = match[2] or "B" if match else ""
    if match is None or unit not in _SIZES:
        raise ConfigError(f"{value!r} is not a size such as 8GB or 8GiB")
    count = Decimal(match[1]) * _SIZES[unit]
    if count != count.to_integral_value():
        raise ConfigError(f"{value!r} is not a whole number of bytes: {count}")
    return int(count)


def format_size(size_bytes: int) -> str:
    """The shortest exact text of a size, as ``parse_size`` reads it."""
    for unit in _FORMAT_ORDER:
        if size_bytes and size_bytes % _SIZES[unit] == 0:
            return f"{size_bytes // _SIZES[unit]}{unit}"
    return f"{size_bytes}B"


def parse_duration(value: object) -> float:
    """Reads a time in seconds: ``30s``, ``2m``, ``500ms``, ``1h30m``; a bare number is seconds.

    Raises:
        ConfigError: not a time, infinite, or negative.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _not_negative(float(value), "time", "30s or 2m")
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(_NUMBER, text):
        return float(text)
    parts = _TIME_PART.findall(text)
    units = [unit for _, unit in parts]
    order = [unit for unit in _TIMES if unit in units]
    if not parts or units != order or _TIME_PART.sub("", text):
        raise ConfigError(f"{value!r} is not a time such as 30s, 2m, 500ms or 1h30m")
    return float(sum(Decimal(number) * _TIMES[unit] for number, unit in parts))


def format_duration(duration_s: float) -> str:
    """The text of a time in the longest unit that divides it, as ``parse_duration`` reads it."""
    exact = Decimal(repr(float(duration_s))).normalize()
    for unit, seconds in _TIMES.items():
        if exact and exact % seconds == 0:
            return f"{int(exact / seconds)}{unit}"
    return f"{exact:f}s"


def parse_rate(value: object) -> int:
    """Reads bytes a second: ``1GB/s``, ``10Gbit/s``, ``125000000``.

    Raises:
        ConfigError: not a rate, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _not_negative(value, "rate", "1GB/s or 10Gbit/s")
    match = (
        _QUANTITY.fullmatch(value.strip().removesuffix("/s")) if isinstance(value, str) else None
    )
    named = isinstance(value, str) and value.strip().endswith("/s")
    if match is None or bool(match[2]) != named or match[2] not in {"", *_SIZES, *_BITS}:
        raise ConfigError(f"{value!r} is not a rate such as 1GB/s or 10Gbit/s")
    count = Decimal(match[1])
    if match[2] in _BITS:
        return int(count * _BITS[match[2]] / 8)
    return int(count * _SIZES[match[2] or "B"])


def format_rate(bytes_per_s: int) -> str:
    """The shortest exact text of a rate, as ``parse_rate`` reads it."""
    return f"{format_size(bytes_per_s)}/s"


def _not_negative(value: _N, what: str, example: str) -> _N:
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{value!r} is not a {what} such as {example}")
    return value
