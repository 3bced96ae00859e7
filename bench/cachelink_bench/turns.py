"""In which order the arms of a benchmark take turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def turned(items: Iterable[T], turn: int) -> list[T]:
    """The same items, beginning ``turn`` places later: with the rounds each comes first in turn."""
    order = list(items)
    at = turn % len(order)
    return order[at:] + order[:at]
