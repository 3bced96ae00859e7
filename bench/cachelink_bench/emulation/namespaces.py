"""Two namespaces and a link between them, shaped at both ends; all of it is removed at the end.

    sender's namespace                                receiver's namespace
      link0 10.213.77.1  ──tbf──▶            ◀──tbf──  link0 10.213.77.2

The link is a veth pair, with netem where it shall delay or lose packets, or two TUN devices with a
delaying process between them where the kernel has no netem. Both ends are made within the
namespaces, so this machine's own network has nothing of them, and removing a namespace removes its
end, and with it the other one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from cachelink_bench.emulation.delay_line import MTU, delay_line
from cachelink_bench.emulation.spec import LinkSpec
from cachelink_bench.emulation.system_commands import check_tools, run_tool, try_tool
from cachelink_core.errors import ConfigError, InternalError

Side = Literal["sender", "receiver"]
SIDES: Final[tuple[Side, Side]] = ("sender", "receiver")

ADDRESSES: Final[dict[Side, str]] = {"sender": "10.213.77.1", "receiver": "10.213.77.2"}
"""They exist within the namespaces only."""

_PREFIX: Final = "cachelink"
_DEVICE: Final = "link0"
_QUEUE_S: Final = 0.05
"""A packet waits at most this long in the shaper, as in the buffer of a good switch."""

_KILL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """A link that is up.

    Attributes:
        spec: what it is like.
        namespaces: by side.
        shaper: what limits, delays or drops packets at each end.
    """

    spec: LinkSpec
    namespaces: dict[Side, str]
    shaper: str

    def within(self, side: Side) -> list[str]:
        """The words before a command that shall run on one side; it replaces them as a process."""
        return ["ip", "netns", "exec", self.namespaces[side]]


@contextmanager
def emulated_link(spec: LinkSpec) -> Iterator[EmulatedLink]:
    """Makes a link, and removes it at the end of the ``with``, however that comes.

    What still runs within its namespaces then is killed: nobody else can have put it there.

    Raises:
        ConfigError: not root, a tool is missing, or the kernel lacks what the link needs.
        InternalError: a tool failed.
    """
    check_tools()
    names: dict[Side, str] = {side: f"{_PREFIX}-{os.getpid()}-{side}" for side in SIDES}
    try:
        for name in names.values():
            run_tool("ip", "netns", "add", name)
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
            _set_buffers(spec, name)
        with _connected(spec, names) as shaper:
            yield EmulatedLink(spec, names, shaper)
    finally:
        with _undisturbed(), ExitStack() as each:  # one that fails does not keep the other
            for name in names.values():
                each.callback(remove_namespace, name)


def set_rate(link: EmulatedLink, spec: LinkSpec) -> None:
    """Gives a link that is up another rate; nothing may be under way on it.

    Args:
        link: without delay or loss, whose shapers are the token buckets alone.
        spec: with the new rate.

    Raises:
        InternalError: a tool failed.
    """
    for name in link.namespaces.values():
        _limit_rate(spec, name, "root", verb="replace")


def leftovers() -> list[str]:
    """Namespaces of this kind that exist, by whomever made."""
    listed = run_tool("ip", "netns", "list").splitlines()
    names = (line.split()[0] for line in listed if line.strip())
    return [name for name in names if name.startswith(f"{_PREFIX}-")]


def has_netem(name: str) -> bool:
    """Whether the kernel has netem, or loads it when asked.

    Args:
        name: of a namespace, on whose loopback it is tried.
    """
    place = ("dev", "lo", "root", "netem")
    if try_tool(["tc", "-n", name, "qdisc", "add", *place, "delay", "1ms"]).returncode:
        return False
    run_tool("tc", "-n", name, "qdisc", "delete", *place)
    return True


@contextmanager
def _connected(spec: LinkSpec, names: dict[Side, str]) -> Iterator[str]:
    """Connects the namespaces by what the kernel has; gives the shapers in words."""
    netem = spec.needs_netem and has_netem(names["sender"])
    if spec.loss_percent and not netem:
        raise ConfigError("--loss needs netem, which this kernel lacks (sch_netem)")
    shaper = f"tbf, burst {spec.burst_bytes // 1024} KiB"
    if spec.needs_netem and not netem:
        with delay_line([names[side] for side in SIDES], _DEVICE, spec.delay_s) as line:
            _bring_up(names, "mtu", str(MTU), "txqueuelen", "1000")
            for name in names.values():
                _limit_rate(spec, name, "root")
            line.carry()
            yield f"{shaper}; TUN delay line"
        return
    here, there = (names[side] for side in SIDES)
    run_tool(
        "ip", "-n", here, "link", "add", _DEVICE, "type", "veth",
        "peer", "name", _DEVICE, "netns", there,
    )  # fmt: skip
    _bring_up(names)
    for name in names.values():
        if netem:
            _delay(spec, name)
        _limit_rate(spec, name, *(("parent", "1:", "handle", "2:") if netem else ("root",)))
    yield f"{shaper}; netem" if netem else shaper


def _bring_up(names: dict[Side, str], *settings: str) -> None:
    for side, name in names.items():
        run_tool("ip", "-n", name, "address", "add", f"{ADDRESSES[side]}/30", "dev", _DEVICE)
        run_tool("ip", "-n", name, "link", "set", _DEVICE, *settings, "up")


def _set_buffers(spec: LinkSpec, name: str) -> None:
    """Lets TCP fill a long fat link: its limits are a namespace's own, so the host keeps its own.

    A connection that rested would also begin slowly again, which hides what a warm channel can do.
    """
    if not spec.socket_buffer_bytes:
        return
    settings = {
        "tcp_rmem": f"4096 131072 {spec.socket_buffer_bytes}",
        "tcp_wmem": f"4096 65536 {spec.socket_buffer_bytes}",
        "tcp_slow_start_after_idle": "0",
    }
    for setting, value in settings.items():
        place = f"/proc/sys/net/ipv4/{setting}"  # of the namespace that looks
        run_tool("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > {place}")


def _delay(spec: LinkSpec, name: str) -> None:
    run_tool(
        "tc", "-n", name, "qdisc", "add", "dev", _DEVICE, "root", "handle", "1:", "netem",
        "limit", "100000", "delay", f"{round(spec.delay_s * 1e6)}us",
        "loss", f"{spec.loss_percent:g}%",
    )  # fmt: skip


def _limit_rate(spec: LinkSpec, name: str, *place: str, verb: str = "add") -> None:
    run_tool(
        "tc", "-n", name, "qdisc", verb, "dev", _DEVICE, *place, "tbf",
        "rate", f"{spec.rate_bits}bit", "burst", str(spec.burst_bytes),
        "latency", f"{round(_QUEUE_S * 1e6)}us",
    )  # fmt: skip


def remove_namespace(name: str) -> None:
    """Ends what runs in a namespace and removes it; nothing, if it is not there.

    Raises:
        InternalError: a tool failed, or what runs there does not end.
    """
    if name not in leftovers():
        return
    deadline_s = time.monotonic() + _KILL_S
    while pids := try_tool(["ip", "netns", "pids", name]).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise InternalError(f"processes {', '.join(pids)} of namespace {name} do not end")
        time.sleep(0.02)
    run_tool("ip", "netns", "delete", name)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C and SIGTERM, as do the tools that are run meanwhile: they inherit it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    both = (signal.SIGINT, signal.SIGTERM)
    earlier = [signal.signal(number, signal.SIG_IGN) for number in both]
    try:
        yield
    finally:
        for number, handler in zip(both, earlier, strict=True):
            signal.signal(number, handler)
