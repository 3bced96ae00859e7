"""A link that takes its time, for kernels without netem: two TUN devices and a process between.

What one namespace sends comes out of its TUN device as packets; this process holds each for the
delay and writes it to the other's device. A token bucket at each device shapes what goes in, as it
does on a veth pair. Packets are 60 kB, so that Python keeps up with a gigabit.

The delay is never shorter than asked for, and longer by what waking up takes, about a tenth of a
millisecond; reports have the echo time that was measured.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachelink_core.errors import ConfigError, InternalError

MTU: Final = 60_000

_TUN: Final = Path("/dev/net/tun")
_NETNS: Final = Path("/var/run/netns")
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000
_CLONE_NEWNET: Final = 0x40000000
_PACKET_BYTES: Final = 65_536
_BATCH: Final = 64
"""Packets taken from one device before the other one has its turn."""

_END_S: Final = 5.0


@contextmanager
def delay_line(namespaces: Sequence[str], device: str, delay_s: float) -> Iterator[Line]:
    """Starts the process; its devices are there in the ``with``, and go with it.

    Args:
        namespaces: the two of them, by name.
        device: name of the TUN device in each.
        delay_s: one way.

    Raises:
        ConfigError: this machine has no TUN devices.
        InternalError: they could not be made.
    """
    if not _TUN.exists():
        raise ConfigError(f"--delay needs netem or TUN devices, and this machine has no {_TUN}")
    command = [sys.executable, "-m", __name__, device, repr(delay_s), *namespaces]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            said = process.stdout.readline().decode(errors="replace").strip()
            if said != "ready":
                raise InternalError(f"the delay line did not start: {said}")
            yield Line(process)
        finally:
            process.stdin.close()  # which ends it
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


class Line:
    """A delay line whose devices are there."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def carry(self) -> None:
        """Begins to carry packets; the devices must be up."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()


class _Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Takes what the source has sent."""
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, _PACKET_BYTES)
            except BlockingIOError:
                return
            self._held.append((time.monotonic() + self._delay_s, packet))

    def give(self) -> float | None:
        """Gives what is due to the target; returns the seconds until more is."""
        while self._held:
            left_s = self._held[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            packet = self._held.popleft()[1]
            try:
                os.write(self._target, packet)
            except OSError as error:
                # A full queue drops a packet, as a switch would.
                if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.EIO):
                    raise
        return None


def _carry(devices: tuple[int, int], delay_s: float) -> None:
    """Carries packets both ways until standard input ends."""
    one, other = devices
    both = (_Direction(one, other, delay_s), _Direction(other, one, delay_s))
    control = sys.stdin.fileno()
    waits: list[float | None] = [None, None]
    while True:
        due = [wait for wait in waits if wait is not None]
        ready, _, _ = select.select([one, other, control], [], [], min(due, default=None))
        if control in ready:
            return
        for direction in both:
            if direction.source in ready:
                direction.take()
        waits = [direction.give() for direction in both]


def _open_device(namespace: str, device: str) -> int:
    """Makes a TUN device within a namespace; it is there as long as the file is open."""
    with (_NETNS / namespace).open("rb") as place:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    opened = os.open(_TUN, os.O_RDWR)
    fcntl.ioctl(opened, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI))
    os.set_blocking(opened, False)
    return opened


def main(argv: Sequence[str]) -> int:
    """Runs the line: device, delay in seconds, two namespaces."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever winds down still needs the link
    device, delay_s, one, other = argv
    try:
        devices = (_open_device(one, device), _open_device(other, device))
    except OSError as error:
        print(error, flush=True)
        return 1
    print("ready", flush=True)
    if os.read(sys.stdin.fileno(), 1):
        gc.disable()
        _carry(devices, float(delay_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
