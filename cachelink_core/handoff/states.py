"""The states of a handoff and every transition between them.

Two rules hold here. Everything that decides a transition is in ``TRANSITIONS``; nothing elsewhere
sets a state. And this file knows neither which side it runs on nor what time it is: sender and
receiver walk the same table, and time enters as an event.

The diagram in proto/README.md is drawn from the same table (``diagram``), by ``make protos``; a test
compares it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where a handoff stands. The last four are final."""

    OFFERED = "Offered"
    ADMITTED = "Admitted"
    RECEIVING = "Receiving"
    VERIFIED = "Verified"
    MAPPED = "Mapped"
    INSTALLED = "Installed"
    REFUSED = "Refused"
    FAILED = "Failed"
    EXPIRED = "Expired"

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self in FINAL


class EventKind(StrEnum):
    """What can happen to a handoff."""

    ADMIT = "admit"
    REFUSE = "refuse"
    OPEN = "open"
    CHUNK = "chunk"
    BREAK = "break"
    COMMIT = "commit"
    MAP = "map"
    INSTALL = "install"
    FAIL = "fail"
    ABORT = "abort"
    EXPIRE = "expire"


FINAL: Final = frozenset({State.INSTALLED, State.REFUSED, State.FAILED, State.EXPIRED})

_ENDINGS: Final = {
    EventKind.FAIL: State.FAILED,
    EventKind.ABORT: State.FAILED,
    EventKind.EXPIRE: State.EXPIRED,
}

TRANSITIONS: Final[dict[State, dict[EventKind, State]]] = {
    State.OFFERED: {
        EventKind.ADMIT: State.ADMITTED,
        EventKind.REFUSE: State.REFUSED,
        **_ENDINGS,
    },
    State.ADMITTED: {EventKind.OPEN: State.RECEIVING, **_ENDINGS},
    State.RECEIVING: {
        EventKind.CHUNK: State.RECEIVING,
        # A broken stream leaves the verified blocks; the sender may reserve again and go on.
        EventKind.BREAK: State.ADMITTED,
        EventKind.COMMIT: State.VERIFIED,
        **_ENDINGS,
    },
    # Every digest fits. An exact or lossy cache has nothing to translate and goes on at once.
    State.VERIFIED: {EventKind.MAP: State.MAPPED, **_ENDINGS},
    State.MAPPED: {EventKind.INSTALL: State.INSTALLED, **_ENDINGS},
    State.INSTALLED: {},
    State.REFUSED: {},
    State.FAILED: {},
    State.EXPIRED: {},
}


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.OFFERED}"]
    for state, moves in TRANSITIONS.items():
        by_target: dict[State, list[str]] = {}
        for event, target in moves.items():
            by_target.setdefault(target, []).append(event.value)
        lines += [f"    {state} --> {to}: {', '.join(names)}" for to, names in by_target.items()]
    lines += [f"    {state} --> [*]" for state in State if state.final]
    return "\n".join(lines)
