"""Types of single options: sizes, times and rates with their units, addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from typing_extensions import TypeAliasType

from cachelink_core import limits, units
from cachelink_core.errors import ConfigError

_T = TypeVar("_T")

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


def written(text: str) -> Any:
    """A default in the words of the file; validation turns it into the option's type."""
    return text


def _reported(parse: Callable[[object], _T]) -> Callable[[object], _T]:
    """A parser whose errors pydantic collects, with the option's name."""

    def parse_or_value_error(value: object) -> _T:
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return parse_or_value_error


def _address(text: str) -> str:
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65_536:
        raise ValueError(f"{text!r} is not an address such as 10.0.0.7:7411 or [::1]:7411")
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Named aliases, so that --help says ``--store.budget Size`` and not ``int``.
Size = TypeAliasType(
    "Size",
    Annotated[
        int,
        BeforeValidator(_reported(units.parse_size)),
        PlainSerializer(units.format_size, return_type=str, when_used="json"),
    ],
)
Duration = TypeAliasType(
    "Duration",
    Annotated[
        float,
        BeforeValidator(_reported(units.parse_duration)),
        PlainSerializer(units.format_duration, return_type=str, when_used="json"),
    ],
)
Rate = TypeAliasType(
    "Rate",
    Annotated[
        int,
        BeforeValidator(_reported(units.parse_rate)),
        PlainSerializer(units.format_rate, return_type=str, when_used="json"),
    ],
)
Address = TypeAliasType("Address", Annotated[str, AfterValidator(_address)])
Port = TypeAliasType("Port", Annotated[int, Field(ge=0, le=65_535)])
Name = TypeAliasType(
    "Name", Annotated[str, Field(pattern=rf"^[A-Za-z0-9._-]{{1,{limits.MAX_ID_CHARS}}}$")]
)
