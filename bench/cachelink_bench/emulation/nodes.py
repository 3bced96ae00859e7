"""Both daemons, one in each namespace of an emulated link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachelink_bench.emulation.namespaces import ADDRESSES, EmulatedLink
from cachelink_core.cli.demo.daemons import DaemonProcess
from cachelink_core.units import format_rate

RECEIVER_NAME: Final = "emulated"
"""Of the receiver in the sender's list."""


@dataclass(frozen=True, slots=True)
class EmulatedNodes:
    """Two daemons that take work.

    Attributes:
        sender_address: of its gRPC server; loopback within the sender's namespace.
        receiver_address: of its gRPC server, across the link.
    """

    sender_address: str
    receiver_address: str


@contextmanager
def emulated_nodes(
    link: EmulatedLink, options: Sequence[str], logs: Path
) -> Iterator[EmulatedNodes]:
    """Starts a receiver and a sender, and ends them with the ``with``.

    The receiver listens on the link without TLS or a token: nobody else is in its namespace.

    Args:
        link: between them.
        options: of both command lines, such as ``--model.name``.
        logs: folder for ``receiver.log`` and ``sender.log``.

    Raises:
        PeerGone: a daemon ended at its start.
        LinkTimeout: a daemon was not ready in time.
    """
    common = ["--listen.port", "0", "--http.port", "0", "--store.ttl", "12h", *options]
    open_bind = ["--listen.host", ADDRESSES["receiver"], "--allow-insecure-bind"]
    with (
        DaemonProcess(
            "receiver",
            "cachelink_receiver",
            [*open_bind, *common],
            logs / "receiver.log",
            link.within("receiver"),
        ) as receiver,
        # Its list names the receiver's port, which is known only later: it comes through a pipe.
        DaemonProcess(
            "sender",
            "cachelink_sender",
            ["--config", "/dev/stdin", *common],
            logs / "sender.log",
            link.within("sender"),
        ) as sender,
    ):
        receiver_address = receiver.wait_ready()["grpc"]
        sender.configure(
            {
                "receivers": {RECEIVER_NAME: receiver_address},
                # Deadlines of a push follow from the slowest rate to expect.
                "link_rate": format_rate(link.spec.rate_bits // 16),
            }
        )
        sender_address = sender.wait_ready()["grpc"]
        yield EmulatedNodes(sender_address, receiver_address)
        for daemon in (sender, receiver):
            daemon.terminate()
        for daemon in (sender, receiver):
            daemon.wait()
