"""Handoffs that are under way at a node, as its answers see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cachelink_core.codec_spec import Trust
from cachelink_core.engine.base import Prefix
from cachelink_core.errors import CacheLinkError
from cachelink_core.rpc.handlers import Call


@dataclass(frozen=True, slots=True)
class Arriving:
    """A handoff under way.

    Attributes:
        prefix: what it brings.
        trust: what it will be worth.
        codec: it comes in.
        left_s: seconds until it is installed, as far as its progress tells.
    """

    prefix: Prefix
    trust: Trust
    codec: str
    left_s: float


class Arrivals(Protocol):
    """The handoffs that are under way at this node."""

    def wait(self, tenant: str, name: str, wait_s: float, call: Call) -> bool:
        """Waits for a handoff by handoff id or cache id to end, however it ends.

        Returns:
            Whether one of that name was or is under way here.

        Raises:
            StillInTransfer: it has not ended within ``wait_s``.
        """

    def arriving(self, tenant: str, name: str) -> Arriving | None:
        """The handoff of that handoff id or cache id, if it is under way."""

    def failure(self, tenant: str, name: str) -> CacheLinkError | None:
        """Why a handoff of that name ended badly, if one did."""


class NoArrivals:
    """For a node that receives nothing."""

    def wait(self, tenant: str, name: str, wait_s: float, call: Call) -> bool:  # noqa: ARG002
        """Nothing is under way."""
        return False

    def arriving(self, tenant: str, name: str) -> Arriving | None:  # noqa: ARG002
        """Nothing is under way."""
        return None

    def failure(self, tenant: str, name: str) -> CacheLinkError | None:  # noqa: ARG002
        """Nothing has failed."""
        return None
