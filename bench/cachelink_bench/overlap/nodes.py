"""Senders and receivers in their namespaces, every process pinned to the one core of its side."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachelink_bench.emulation.namespaces import ADDRESSES, EmulatedLink, Side
from cachelink_bench.overlap.task import Nodes
from cachelink_core.cli.demo.daemons import DaemonProcess
from cachelink_core.errors import CacheLinkError, ConfigError

Command = tuple[str, ...]
"""A module to run as a daemon, and the first of its arguments."""

OVERLAP_DAEMONS: Final[dict[Side, Command]] = {
    "sender": ("cachelink_sender",),
    "receiver": ("cachelink_receiver",),
}
SERIAL_DAEMONS: Final[dict[Side, Command]] = {
    "sender": ("cachelink_bench.serial", "sender"),
    "receiver": ("cachelink_bench.serial", "receiver"),
}
_LINK_RATE: Final = "100KB/s"
"""The slowest link to expect, from which the deadlines of a push follow."""


@dataclass(frozen=True, slots=True)
class Cores:
    """One core for each side; whatever runs on a side runs there."""

    sender: int
    receiver: int

    @classmethod
    def pick(cls) -> Cores:
        """The first two that this process may use.

        Raises:
            ConfigError: there is only one, or nothing to pin processes with.
        """
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise ConfigError("overlap needs two cores, one for each side; this machine has one")
        if shutil.which("taskset") is None:
            raise ConfigError("overlap needs taskset, which is not here (Debian: util-linux)")
        return cls(cores[0], cores[1])

    def of(self, side: Side) -> int:
        """Core of a side."""
        return self.sender if side == "sender" else self.receiver


@contextmanager
def pinned_nodes(
    link: EmulatedLink,
    cores: Cores,
    daemons: Mapping[Side, Command],
    sender_options: Sequence[str],
    receiver_options: Mapping[str, Sequence[str]],
    plane: str,
    logs: Path,
) -> Iterator[Nodes]:
    """Starts a sender and any number of receivers; leaving the ``with`` ends them.

    Args:
        link: between the sides.
        cores: to pin them to.
        daemons: what runs on each side.
        sender_options: of the sender's command line.
        receiver_options: of each receiver's, by its name in the sender's list.
        plane: the data plane to use; empty for what the daemons choose.
        logs: folder for standard errors.

    When anything in the ``with`` fails, the ends of all logs go to standard error.

    Raises:
        PeerGone: a daemon ended at its start.
        LinkTimeout: a daemon was not ready in time.
    """
    ports = ["--listen.port", "0", "--http.port", "0", "--model.threads", "1"]
    open_bind = ["--listen.host", ADDRESSES["receiver"], "--allow-insecure-bind"]

    def start(name: str, side: Side, options: Sequence[str]) -> DaemonProcess:
        module, *first = daemons[side]
        within = [*link.within(side), "taskset", "--cpu-list", str(cores.of(side))]
        log = logs / f"{module}-{name}.log"
        return stack.enter_context(
            DaemonProcess(name, module, [*first, *ports, *options], log, within)
        )

    with ExitStack() as stack:
        receivers = {
            name: start(name, "receiver", [*open_bind, *options])
            for name, options in receiver_options.items()
        }
        sender = start("sender", "sender", ["--config", "/dev/stdin", *sender_options])
        addresses = {name: each.wait_ready()["grpc"] for name, each in receivers.items()}
        planes = {"data_planes": [plane]} if plane else {}
        sender.configure({"receivers": addresses, "link_rate": _LINK_RATE, **planes})
        try:
            yield Nodes(sender.wait_ready()["grpc"], addresses)
        except CacheLinkError:
            for daemon in (sender, *receivers.values()):
                sys.stderr.write(f"-- the end of {daemon.name}'s log:\n{daemon.tail()}\n")
            raise
        for daemon in (sender, *receivers.values()):
            daemon.terminate()
        for daemon in (sender, *receivers.values()):
            daemon.wait()
