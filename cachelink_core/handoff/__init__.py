"""The handoff protocol as tables and values, without IO."""

from cachelink_core.handoff.session import HandoffSession, chunk_digest
from cachelink_core.handoff.states import FINAL, TRANSITIONS, EventKind, State, diagram

__all__ = [
    "FINAL",
    "TRANSITIONS",
    "EventKind",
    "HandoffSession",
    "State",
    "chunk_digest",
    "diagram",
]
