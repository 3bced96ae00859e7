"""Both daemons, one in each namespace of an emulated link."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachelink_bench.emulation.namespaces import ADDRESSES, EmulatedLink
from cachelink_core.cli.demo.daemons import STOP_DEADLINE_S, DaemonProcess
from cachelink_core.errors import LinkTimeout
from cachelink_core.units import format_rate

RECEIVER_NAME: Final = "emulated"
"""Of the receiver in the sender's list."""

_COMMON: Final = ("--listen.port", "0", "--http.port", "0", "--store.ttl", "12h")


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
    link: EmulatedLink,
    options: Sequence[str],
    logs: Path,
    *,
    sender_options: Sequence[str] = (),
    serial: bool = False,
) -> Iterator[EmulatedNodes]:
    """Starts a receiver and a sender, and ends them with the ``with``.

    Args:
        link: between them.
        options: of both command lines, such as ``--model.name``.
        logs: folder for ``receiver.log`` and ``sender.log``.
        sender_options: of the sender's command line alone.
        serial: whether they work one stage after another; the logs are then ``serial-…``.

    Raises:
        PeerGone: a daemon ended at its start.
        LinkTimeout: a daemon was not ready in time.
    """
    with (
        emulated_receiver(link, options, logs, serial=serial) as receiver,
        # Its list names the receiver's port, which is known only later: it comes through a pipe.
        emulated_sender(link, [*options, *sender_options], logs, serial=serial) as sender,
    ):
        receiver_address = receiver.wait_ready()["grpc"]
        introduce(sender, link, receiver_address)
        sender_address = sender.wait_ready()["grpc"]
        yield EmulatedNodes(sender_address, receiver_address)
        drain(sender, receiver)


def emulated_receiver(
    link: EmulatedLink, options: Sequence[str], logs: Path, *, serial: bool = False
) -> DaemonProcess:
    """Starts a receiver; whoever enters it ends it.

    It listens on the link without TLS or a token: nobody else is in its namespace.

    Args:
        link: at whose far end it runs.
        options: of its command line.
        logs: folder for its log.
        serial: start one that works one stage after another.
    """
    name, module, first = _program("receiver", "receiver", serial=serial)
    open_bind = ["--listen.host", ADDRESSES["receiver"], "--allow-insecure-bind"]
    return DaemonProcess(
        name,
        module,
        [*first, *open_bind, *_COMMON, *options],
        logs / f"{name}.log",
        link.within("receiver"),
    )


def emulated_sender(
    link: EmulatedLink,
    options: Sequence[str],
    logs: Path,
    name: str = "sender",
    *,
    serial: bool = False,
) -> DaemonProcess:
    """Starts a sender, which waits until it is introduced to its receiver.

    Args:
        link: at whose near end it runs.
        options: of its command line.
        logs: folder for its log.
        name: of the log, and in messages.
        serial: start one that works one stage after another.
    """
    name, module, first = _program("sender", name, serial=serial)
    return DaemonProcess(
        name,
        module,
        [*first, "--config", "/dev/stdin", *_COMMON, *options],
        logs / f"{name}.log",
        link.within("sender"),
    )


def _program(role: str, name: str, *, serial: bool) -> tuple[str, str, list[str]]:
    """Name, module and first arguments of a daemon."""
    if serial:
        return f"serial-{name}", "cachelink_bench.serial", [role]
    return name, f"cachelink_{role}", []


def introduce(sender: DaemonProcess, link: EmulatedLink, receiver_address: str) -> None:
    """Tells a sender where its receiver is; it goes on to get ready."""
    sender.configure(
        {
            "receivers": {RECEIVER_NAME: receiver_address},
            # Deadlines of a push follow from the slowest rate to expect.
            "link_rate": format_rate(link.spec.rate_bits // 16),
        }
    )


def drain(*daemons: DaemonProcess, deadline_s: float = STOP_DEADLINE_S) -> None:
    """Ends daemons as an operator would, all at once.

    One that does not end is aborted, and standard error says so and what it was doing: what was
    measured before that stands.

    Args:
        daemons: that take no more calls.
        deadline_s: for each.
    """
    for daemon in daemons:
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(deadline_s)
        except LinkTimeout as error:
            sys.stderr.write(f"{error}\n")
