"""A peer that stops without a word is noticed.

``grpc.http2.ping_timeout_ms`` is an undocumented argument of gRPC. Without it a stopped process is
noticed after a minute, whatever the keepalive timeout; this test is what tells when it is renamed.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest

from cachelink_core import errors
from cachelink_core.manifest import encode_header
from cachelink_core.rpc import frames
from cachelink_core.rpc.channel import Keepalive, open_channel
from cachelink_core.rpc.server import Listen, build_server
from cachelink_core.rpc.slots import Slots
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.testing import handoffs
from cachelink_core.testing.scripted_nodes import ScriptedReceiver

FAST = Keepalive(time_ms=1_000, timeout_ms=1_000)
HEADER = handoffs.header()

SERVE = """
import sys
from cachelink_core.rpc.channel import Keepalive
from cachelink_core.rpc.server import Listen, build_server
from cachelink_core.rpc.slots import Slots
from cachelink_core.testing.scripted_nodes import ScriptedReceiver
server = build_server(Listen(keepalive=Keepalive(1_000, 1_000)), transfers=Slots("t", 2),
                      answers=Slots("a", 1), receiver=ScriptedReceiver("receiver"))
server.start()
print(server.address, flush=True)
sys.stdin.read()
server.stop(0)
"""

PUSH = """
import sys, threading
from cachelink_core.manifest import encode_header
from cachelink_core.rpc import frames
from cachelink_core.rpc.channel import Keepalive
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.testing import handoffs
client = TransferClient(sys.argv[1], keepalive=Keepalive(1_000, 1_000))
client.reserve(encode_header(handoffs.header()))
def sent():
    yield frames.encode_open("handoff-1", handoffs.RECEIVER_EPOCH)
    print("open", flush=True)
    threading.Event().wait(60)
client.push(sent(), deadline_s=60.0)
"""


def started(*arguments: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ended(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate(timeout=10)


def test_a_stopped_receiver_is_noticed_by_its_sender():
    process = started(SERVE)
    hold = threading.Event()
    try:
        address = process.stdout.readline().strip()
        with TransferClient(address, keepalive=FAST) as client:
            client.reserve(encode_header(HEADER))

            def sent():
                yield frames.encode_open(HEADER.handoff_id, handoffs.RECEIVER_EPOCH)
                process.send_signal(signal.SIGSTOP)
                hold.wait(60)

            began_s = time.monotonic()
            with pytest.raises(errors.PeerGone):
                client.push(sent(), deadline_s=60.0)
            assert time.monotonic() - began_s < 15
    finally:
        hold.set()
        ended(process)


def test_a_stopped_sender_is_noticed_by_its_receiver():
    receiver = ScriptedReceiver("receiver")
    server = build_server(
        Listen(keepalive=FAST),
        transfers=Slots("transfers", 2),
        answers=Slots("answers", 1),
        receiver=receiver,
    )
    server.start()
    process = started(PUSH, server.address)
    try:
        assert process.stdout.readline() == "open\n"
        process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        assert receiver.pushed.wait(30)
        assert time.monotonic() - began_s < 15
        assert isinstance(receiver.ended_with, errors.PeerGone | errors.TruncatedStream)
    finally:
        ended(process)
        server.stop(0.0)


def test_a_killed_sender_is_noticed_at_once():
    receiver = ScriptedReceiver("receiver")
    server = build_server(
        Listen(), transfers=Slots("transfers", 2), answers=Slots("answers", 1), receiver=receiver
    )
    server.start()
    process = started(PUSH, server.address)
    try:
        assert process.stdout.readline() == "open\n"
        process.kill()
        assert receiver.pushed.wait(5)
        assert isinstance(receiver.ended_with, errors.PeerGone | errors.TruncatedStream)
    finally:
        ended(process)
        server.stop(0.0)


def test_a_connection_that_rests_stays():
    server = build_server(
        Listen(keepalive=FAST),
        transfers=Slots("transfers", 2),
        answers=Slots("answers", 1),
        receiver=ScriptedReceiver("receiver"),
    )
    server.start()
    states: list[grpc.ChannelConnectivity] = []
    try:
        channel = open_channel(server.address, None, keepalive=FAST)
        with channel:
            grpc.channel_ready_future(channel).result(10)
            channel.subscribe(states.append)
            time.sleep(5)  # five pings; the third one used to end it
    finally:
        server.stop(0.0)
    assert states == [grpc.ChannelConnectivity.READY]
