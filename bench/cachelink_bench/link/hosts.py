"""The daemons of one case: a receiver, and one sender for each data plane, on one link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cachelink_bench.emulation.namespaces import EmulatedLink
from cachelink_bench.emulation.nodes import (
    RECEIVER_NAME,
    drain,
    emulated_receiver,
    emulated_sender,
    introduce,
)
from cachelink_bench.link.caller import Caller, Hold, Move, Moved
from cachelink_core.errors import InternalError

Plane = Literal["grpc", "tcp"]
PLANES: Final[tuple[Plane, ...]] = ("grpc", "tcp")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Daemons that are ready, and the client beside the senders.

    Attributes:
        caller: the client.
        receiver: address of the receiver.
        receiver_pid: of its process.
        senders: plane → address and process id of its sender.
    """

    caller: Caller
    receiver: str
    receiver_pid: int
    senders: dict[Plane, tuple[str, int]]

    def hold(self, plane: Plane, ids: tuple[int, ...]) -> str:
        """Has a plane's sender hold a cache; returns its name there.

        Raises:
            CacheLinkError: the sender cannot.
        """
        return self.caller.hold(Hold(self.senders[plane][0], ids))

    def move(self, plane: Plane, cache_id: str, *, compare: bool = False) -> Moved:
        """Moves a held cache once.

        Args:
            plane: to move it by.
            cache_id: of the cache, at that plane's sender.
            compare: whether both ends are asked the same afterwards.

        Raises:
            CacheLinkError: it failed, or the answers differ.
        """
        sender, pid = self.senders[plane]
        pids = pid, self.receiver_pid
        order = Move(sender, self.receiver, RECEIVER_NAME, cache_id, pids, compare)
        moved = self.caller.move(order)
        if moved.plane != plane:
            raise InternalError(f"the chunks went by {moved.plane!r}, not by {plane!r}")
        return moved


@contextmanager
def started(
    link: EmulatedLink,
    planes: Sequence[Plane],
    options: Sequence[str],
    *,
    captures: Path,
    logs: Path,
) -> Iterator[Hosts]:
    """Starts everything, and ends it with the ``with``.

    Args:
        link: between sender and receiver.
        planes: each gets a sender of its own.
        options: of all command lines.
        captures: folder in which the senders find what was read before.
        logs: folder for the daemons' logs.

    Raises:
        CacheLinkError: a daemon did not become ready.
    """
    with ExitStack() as stack:
        receiver = stack.enter_context(emulated_receiver(link, options, logs))
        senders = {
            plane: stack.enter_context(
                emulated_sender(link, [*options, *_own(plane, captures)], logs, f"sender-{plane}")
            )
            for plane in planes
        }
        receiver_address = receiver.wait_ready()["grpc"]
        for sender in senders.values():
            introduce(sender, link, receiver_address)
        addresses = {
            plane: (sender.wait_ready()["grpc"], sender.pid) for plane, sender in senders.items()
        }
        with Caller(link.within("sender")) as caller:
            yield Hosts(caller, receiver_address, receiver.pid, addresses)
        drain(receiver, *senders.values())


def _own(plane: Plane, captures: Path) -> list[str]:
    return ["--data-planes", plane, "--capture-dir", str(captures)]
