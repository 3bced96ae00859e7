"""Every handoff that this receiver knows: those under way, and how the last ones ended."""

from __future__ import annotations

import threading

from cachelink_core.errors import (
    CacheLinkError,
    Draining,
    DuplicateHandoff,
    HandoffExpired,
    RemoteProtocolError,
    UnknownCache,
)
from cachelink_core.handoff import State
from cachelink_core.rpc.transfer_types import HandoffStatus
from cachelink_receiver.incoming import Incoming

_ENDED_KEPT = 1024
"""How many ended handoffs GetHandoff still knows."""


class HandoffTable:
    """Handoffs by id; nobody sees those of another tenant. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Incoming] = {}
        self._ended: dict[str, tuple[str, HandoffStatus]] = {}
        self._closed = False

    def close(self) -> None:
        """Takes no new ones from now on."""
        with self._lock:
            self._closed = True

    def check_free(self, handoff_id: str) -> None:
        """Checks an id before anything is allocated for it.

        Raises:
            DuplicateHandoff: it was used before.
        """
        with self._lock:
            if handoff_id in self._live or handoff_id in self._ended:
                raise DuplicateHandoff(f"handoff_id {handoff_id!r} was used before")

    def enlist(self, incoming: Incoming) -> None:
        """Adds an admitted handoff.

        Raises:
            Draining: the table is closed.
            DuplicateHandoff: another one took the id meanwhile.
        """
        handoff_id = incoming.header.handoff_id
        with self._lock:
            if self._closed:
                raise Draining("this receiver is shutting down")
            if handoff_id in self._live:
                raise DuplicateHandoff(f"handoff_id {handoff_id!r} is live")
            self._live[handoff_id] = incoming

    def retire(self, incoming: Incoming) -> bool:
        """Moves a handoff from the live ones to the ended ones; whether it was live."""
        header, session = incoming.header, incoming.session
        status = HandoffStatus(
            state=session.state.value, cache_id=session.cache_id, error=session.error
        )
        with self._lock:
            if self._live.pop(header.handoff_id, None) is None:
                return False
        self.note_ended(header.handoff_id, incoming.tenant, status)
        return True

    def note_ended(self, handoff_id: str, tenant: str, status: HandoffStatus) -> None:
        """Remembers how a handoff ended."""
        with self._lock:
            self._ended[handoff_id] = tenant, status
            while len(self._ended) > _ENDED_KEPT:
                self._ended.pop(next(iter(self._ended)))

    def live(self, handoff_id: str, tenant: str) -> Incoming | None:
        """A tenant's handoff that is under way, if there is one of that id."""
        with self._lock:
            incoming = self._live.get(handoff_id)
        return incoming if incoming is not None and incoming.tenant == tenant else None

    def ended(self, handoff_id: str, tenant: str) -> HandoffStatus:
        """How a tenant's handoff ended.

        Raises:
            UnknownCache: there was none of that id, or too long ago.
        """
        with self._lock:
            owner, status = self._ended.get(handoff_id, ("", None))
        if status is None or owner != tenant:
            raise UnknownCache(f"no handoff {handoff_id!r}")
        return status

    def must_be_live(self, handoff_id: str, tenant: str) -> Incoming:
        """A tenant's handoff that is under way.

        Raises:
            HandoffExpired: its lease has ended.
            RemoteProtocolError: it has ended in another way.
            UnknownCache: there was none of that id.
        """
        incoming = self.live(handoff_id, tenant)
        if incoming is not None:
            return incoming
        state = self.ended(handoff_id, tenant).state
        if state == State.EXPIRED.value:
            raise HandoffExpired(f"handoff {handoff_id!r} has expired")
        raise RemoteProtocolError(f"handoff {handoff_id!r} is {state}")

    def named(self, tenant: str, name: str) -> Incoming | None:
        """A tenant's handoff that is under way, by its id or by that of its cache."""
        for incoming in self.all_live():
            known = incoming.header.handoff_id, incoming.session.cache_id
            if incoming.tenant == tenant and name in known:
                return incoming
        return None

    def failure(self, tenant: str, name: str) -> CacheLinkError | None:
        """Why the last handoff of that name ended badly; None if it did not."""
        with self._lock:
            for handoff_id, (owner, status) in reversed(self._ended.items()):
                if owner == tenant and name in (handoff_id, status.cache_id):
                    return status.error
        return None

    def all_live(self) -> tuple[Incoming, ...]:
        """Every handoff that is under way."""
        with self._lock:
            return tuple(self._live.values())
