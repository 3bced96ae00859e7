"""Who may send which handoff on a plane whose connections carry no token."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import OrderedDict
from typing import Final

from cachelink_core.errors import Denied

_MOST_TICKETS: Final = 4_096
"""Tickets that are kept: a handoff that was reserved and never opened leaves one behind."""


class Tickets:
    """Who may send which handoff. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def issue(self, handoff_id: str, tenant: str) -> bytes:
        """A ticket for one stream.

        When there are too many, the tenant's own oldest one is forgotten, or if it has none the oldest.
        """
        ticket = secrets.token_bytes(32)
        with self._lock:
            if len(self._issued) >= _MOST_TICKETS:
                own = (name for name, (_, holder) in self._issued.items() if holder == tenant)
                del self._issued[next(own, next(iter(self._issued)))]
            self._issued[handoff_id] = ticket, tenant
        return ticket

    def redeem(self, handoff_id: str, ticket: bytes) -> str:
        """The tenant whose ticket it is; it is good once.

        Raises:
            Denied: it is not the ticket of that handoff.
        """
        with self._lock:
            issued, tenant = self._issued.get(handoff_id, (b"", ""))
            if not issued or not hmac.compare_digest(issued, ticket):
                raise Denied(f"no ticket, or not the one of handoff {handoff_id!r}")
            del self._issued[handoff_id]
        return tenant
