"""What a link really does: its rate by iperf3, and its echo time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Final

from cachelink_bench.emulation.namespaces import ADDRESSES, EmulatedLink
from cachelink_bench.emulation.system_commands import run_tool, try_tool
from cachelink_core.errors import InternalError

IPERF_S: Final = 3
_START_S: Final = 5.0
_PORT: Final = 5201

_ECHO: Final = """
import socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server((sys.argv[2], int(sys.argv[3])))
    server.settimeout(10)
    print("ready", flush=True)
    peer = server.accept()[0]
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(1):
        peer.sendall(data)
else:
    peer = socket.create_connection((sys.argv[2], int(sys.argv[3])), 10)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        times.append(time.perf_counter() - began)
    print(min(times))
"""


def iperf_gbit(link: EmulatedLink, seconds: int = IPERF_S, *, payload_bytes: int = 0) -> float:
    """Gb/s that iperf3 receives from the sender's side at the receiver's.

    Args:
        link: that carries them.
        seconds: of the run.
        payload_bytes: to send instead, however long it takes; 0 for as much as the seconds give.

    Raises:
        InternalError: iperf3 failed.
    """
    address = ADDRESSES["receiver"]
    serve = [*link.within("receiver"), "iperf3", "-s", "-1", "-B", address, "-p", str(_PORT)]
    much = ["-n", str(payload_bytes)] if payload_bytes else ["-t", str(seconds)]
    ask = [*link.within("sender"), "iperf3", "-c", address, "-p", str(_PORT), *much]
    most_s = seconds + 30.0 + 16 * payload_bytes * 8 / link.spec.rate_bits
    with subprocess.Popen(serve, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            deadline_s = time.monotonic() + _START_S
            while True:
                done = try_tool([*ask, "-J"], most_s)
                rate = _received_gbit(done.stdout)
                if isinstance(rate, float):
                    return rate
                if time.monotonic() > deadline_s:
                    raise InternalError(f"iperf3: {rate}")
                time.sleep(0.1)  # the server does not listen yet
        finally:
            server.kill()


def _received_gbit(output: str) -> float | str:
    """The rate, or why there is none. With ``-J`` iperf3 exits 0 for some errors too."""
    try:
        report = json.loads(output)
        return float(report["end"]["sum_received"]["bits_per_second"]) / 1e9
    except json.JSONDecodeError:
        return f"no report but {output[:80]!r}"
    except KeyError:
        return str(report.get("error", "a report without a rate"))


def echo_s(link: EmulatedLink) -> float:
    """The shortest of fifty round trips of one byte over TCP.

    Raises:
        InternalError: no echo came.
    """
    place = [ADDRESSES["receiver"], str(_PORT + 1)]
    serve = [*link.within("receiver"), sys.executable, "-c", _ECHO, "serve", *place]
    ask = [*link.within("sender"), sys.executable, "-c", _ECHO, "ask", *place]
    with subprocess.Popen(serve, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None, "it is a pipe"
            server.stdout.readline()
            return float(run_tool(*ask))
        finally:
            server.kill()
