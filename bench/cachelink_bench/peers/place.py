"""What a process of a pair is told at its start, and what its two ends can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

Side = Literal["sender", "receiver", "server"]


class Place(msgspec.Struct, frozen=True):
    """One process of a pair.

    Attributes:
        module: of its ends: it has classes ``Sender`` and ``Receiver``, and may have ``Server``.
        side: which end.
        host: the address to listen at.
        most_bytes: of the largest payload.
        token_bytes: of one token of the cache.
        options: of the row.
        model: name of the model, for an end that is a real node.
        block_tokens: the prefill schedule.
        window: tokens that the model's window is widened to.
        to: what the receiving end said where it is; for the sender.
        server: what the server said where it is; for both other ends.
    """

    module: str
    side: Side
    host: str
    most_bytes: int
    token_bytes: int
    options: dict[str, str] = {}
    model: str = ""
    block_tokens: int = 0
    window: int = 0
    to: Any = None
    server: Any = None


class Prepared(msgspec.Struct, frozen=True):
    """A run that may begin.

    Attributes:
        digest: of what must lie at the receiver afterwards.
        payload_bytes: that are sent.
    """

    digest: str
    payload_bytes: int


class Sent(msgspec.Struct, frozen=True):
    """A run that has ended, as the sending end saw it.

    Attributes:
        wall_s: the sender's first action → the receiver's word that all is verified and in place.
        verified: what that word was.
        name: of what the receiver holds now, where it holds several things.
    """

    wall_s: float
    verified: bool
    name: str = ""


class Sending(Protocol):
    """The sending end."""

    def load(self, stem: Path) -> None:
        """Takes the payload of one size from the files that ``payload.py`` wrote."""

    def prepare(self, run: int, options: dict[str, str]) -> Prepared:
        """Makes run number ``run`` ready; not timed."""

    def send(self) -> Sent:
        """Moves what was prepared."""

    def close(self) -> None:
        """Closes connections."""


class Receiving(Protocol):
    """The receiving end.

    Attributes:
        address: what the sender needs to find it, as JSON has it.
    """

    address: Any

    def expect(self, prepared: Prepared, options: dict[str, str]) -> None:
        """Clears the destination and learns what must arrive; not timed."""

    def found(self, name: str) -> str:
        """Digest of what lies there now; not timed."""

    def close(self) -> None:
        """Closes connections."""
