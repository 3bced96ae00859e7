"""Packing ``none``: the wire bytes are the payload."""

from __future__ import annotations

from collections.abc import Sequence

from cachelink_core.codecs.base import Packing
from cachelink_core.codecs.native import check_length


class NoPacking(Packing):
    """Changes nothing and copies nothing."""

    def pack(self, parts: Sequence[memoryview], item_bytes: int) -> list[memoryview]:  # noqa: ARG002
        """The parts themselves."""
        return list(parts)

    def unpack(self, wire: memoryview, raw_bytes: int, item_bytes: int) -> memoryview:  # noqa: ARG002
        """The wire bytes themselves."""
        check_length(wire, raw_bytes)
        return wire
