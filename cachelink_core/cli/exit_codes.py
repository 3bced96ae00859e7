"""What ``cachelink`` exits with, as one table.

A failure's code follows from the gRPC status name of its error (``errors.CacheLinkError.status``),
so an error that a node raised and one that was raised here exit alike.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from cachelink_core.errors import CacheLinkError


class ExitCode(IntEnum):
    """Every exit code."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    NOT_FOUND = 4
    UNREACHABLE = 5
    EXHAUSTED = 6
    DATA_LOSS = 7
    DENIED = 8
    INTERRUPTED = 130


MEANINGS: Final[dict[ExitCode, str]] = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "failed, or a check of the demonstration did not hold",
    ExitCode.USAGE: "wrong usage, or an argument that the node refuses",
    ExitCode.REFUSED: "refused: the two nodes do not fit, or this state does not allow it",
    ExitCode.NOT_FOUND: "no such cache, handoff or file",
    ExitCode.UNREACHABLE: "unreachable, or a deadline passed",
    ExitCode.EXHAUSTED: "a budget, slot or headroom is used up",
    ExitCode.DATA_LOSS: "bytes are lost or corrupt",
    ExitCode.DENIED: "not allowed",
    ExitCode.INTERRUPTED: "interrupted",
}

BY_STATUS: Final[dict[str, ExitCode]] = {
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "FAILED_PRECONDITION": ExitCode.REFUSED,
    "ALREADY_EXISTS": ExitCode.REFUSED,
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "UNAVAILABLE": ExitCode.UNREACHABLE,
    "DEADLINE_EXCEEDED": ExitCode.UNREACHABLE,
    "RESOURCE_EXHAUSTED": ExitCode.EXHAUSTED,
    "DATA_LOSS": ExitCode.DATA_LOSS,
    "PERMISSION_DENIED": ExitCode.DENIED,
    "UNAUTHENTICATED": ExitCode.DENIED,
    "CANCELLED": ExitCode.FAILED,
    "ABORTED": ExitCode.FAILED,
    "INTERNAL": ExitCode.FAILED,
}


def exit_code(error: CacheLinkError) -> ExitCode:
    """The exit code of a failure."""
    return BY_STATUS[error.status]


def epilog() -> str:
    """The table for ``cachelink --help``; the backspace keeps its lines apart."""
    lines = [f"{code.value:>3}  {text}" for code, text in MEANINGS.items()]
    return "\n".join(["\b", "Exit codes:", *lines])
