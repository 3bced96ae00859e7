"""The data plane over real gRPC on loopback, with real sessions and no model."""

import threading
import time

import grpc
import pytest

from cachelink_core import errors, limits
from cachelink_core.handoff import State
from cachelink_core.manifest import digest, encode_header
from cachelink_core.rpc import frames
from cachelink_core.rpc.auth import Tokens
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.rpc.pb.cachelink.v1.transfer_pb2_grpc import TransferServiceStub
from cachelink_core.rpc.server import Listen, build_server
from cachelink_core.rpc.slots import Slots
from cachelink_core.rpc.transfer_client import TransferClient, push_deadline_s
from cachelink_core.testing import handoffs
from cachelink_core.testing.scripted_nodes import ScriptedReceiver

HEADER = handoffs.header()


def stream(header=HEADER, *, commit: bool = True, pause_s: float = 0.0):
    """The frames of an honest sender."""
    yield frames.encode_open(header.handoff_id, handoffs.RECEIVER_EPOCH)
    for chunk in handoffs.chunks(header):
        time.sleep(pause_s)
        yield frames.encode_chunk(chunk.block, chunk.run, chunk.digest, [chunk.payload])
    if commit:
        yield frames.encode_commit(handoffs.commit(header).seal)


class Pair:
    """A served receiver and a client of it."""

    def __init__(self, *, stall_s: float = 5.0, slots: int = 2, listen: Listen | None = None):
        self.receiver = ScriptedReceiver("receiver")
        self.transfers = Slots("transfers", slots)
        self.server = build_server(
            listen or Listen(),
            transfers=self.transfers,
            answers=Slots("answers", 1),
            receiver=self.receiver,
            stall_s=stall_s,
        )
        self.server.start()
        self.client = TransferClient(self.server.address)

    def reserve(self, header=HEADER):
        return self.client.reserve(encode_header(header))

    def push(self, sent=None, **options):
        return self.client.push(sent or stream(), **{"deadline_s": 20.0, **options})

    def close(self):
        self.client.close()
        self.server.stop(0.0)


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def test_a_handoff_arrives_byte_for_byte(pair):
    reservation = pair.reserve()
    assert (reservation.handoff_id, reservation.cache_id) == ("handoff-1", "cache-1")
    assert reservation.receiver_epoch == handoffs.RECEIVER_EPOCH
    assert reservation.endpoints[0].scheme == "grpc"
    receipt = pair.push()
    assert receipt.state == "Installed"
    assert receipt.trust == "exact"
    assert receipt.chunk_count == HEADER.layout.chunk_count
    assert receipt.wire_bytes == HEADER.layout.encoded_bytes
    for block, run in HEADER.layout.chunks():
        assert pair.receiver.payloads[block, run] == handoffs.payload(HEADER, block, run)


def test_generated_code_alone_can_hand_over(pair):
    """What a stranger would do who has only the proto files."""
    with grpc.insecure_channel(pair.server.address) as channel:
        stub = TransferServiceStub(channel)
        manifest = encode_header(HEADER)
        stub.Reserve(
            pb.ReserveRequest(manifest=manifest, manifest_digest=digest(manifest)), timeout=5
        )
        messages = [pb.PushChunksRequest.FromString(frame) for frame in stream()]
        receipt = stub.PushChunks(iter(messages), timeout=5)
    assert receipt.state == "Installed"


def test_status_heartbeat_and_abort(pair):
    pair.reserve()
    status = pair.client.status("handoff-1")
    assert (status.state, status.cache_id, status.error) == ("Admitted", "cache-1", None)
    assert pair.client.heartbeat("handoff-1", handoffs.RECEIVER_EPOCH) == HEADER.lease_s
    assert pair.client.abort("handoff-1", "changed my mind") == 7
    status = pair.client.status("handoff-1")
    assert status.state == "Failed"
    assert isinstance(status.error, errors.HandoffAborted)
    assert str(status.error) == "changed my mind"
    with pytest.raises(errors.UnknownCache, match="'other'"):
        pair.client.status("other")


def test_a_refusal_arrives_as_its_own_class(pair):
    pair.receiver.fails_with = errors.BudgetExceeded("needs 10 bytes; 5 are free")
    with pytest.raises(errors.BudgetExceeded, match="10 bytes; 5"):
        pair.reserve()


def test_an_altered_header_is_refused_before_it_is_looked_at(pair):
    manifest = encode_header(HEADER)
    altered = bytearray(manifest)
    altered[-1] ^= 1
    with grpc.insecure_channel(pair.server.address) as channel:
        request = pb.ReserveRequest(manifest=bytes(altered), manifest_digest=digest(manifest))
        with pytest.raises(grpc.RpcError) as caught:
            TransferServiceStub(channel).Reserve(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert pair.receiver.sessions == {}


def test_a_refusal_in_mid_stream_arrives_at_once(pair):
    pair.reserve()
    wrong = frames.encode_chunk(9, 9, bytes(16), [b"x"])
    hold = threading.Event()

    def sent():
        yield from list(stream(commit=False))[:2]
        yield wrong
        hold.wait(10)  # a sender that is still encoding

    began_s = time.monotonic()
    with pytest.raises(errors.UnexpectedChunk, match="block 9, run 9"):
        pair.push(sent())
    assert time.monotonic() - began_s < 5
    hold.set()


def test_a_malformed_frame_is_the_senders_fault(pair):
    pair.reserve()
    with pytest.raises(errors.RemoteProtocolError):
        pair.push(iter([b"\xff\xff\xff"]))


def test_an_end_without_commit_is_no_success(pair):
    pair.reserve()
    with pytest.raises(errors.TruncatedStream):
        pair.push(stream(commit=False))
    assert pair.receiver.sessions["handoff-1"].state is State.RECEIVING


def test_what_the_frames_raise_comes_back_as_it_was(pair):
    class Broken(Exception):
        pass

    def sent():
        yield from list(stream())[:2]
        raise Broken("the encoder")

    pair.reserve()
    with pytest.raises(Broken, match="the encoder"):
        pair.push(sent())
    assert pair.receiver.pushed.wait(5)
    assert isinstance(pair.receiver.ended_with, errors.PeerGone | errors.TruncatedStream)
    assert pair.receiver.sessions["handoff-1"].state is not State.INSTALLED


@pytest.mark.parametrize("frame", [bytearray(b"x"), memoryview(b"x"), None])
def test_a_frame_that_is_not_bytes_fails_at_once_instead_of_hanging(pair, frame):
    pair.reserve()
    began_s = time.monotonic()
    with pytest.raises(errors.LocalProtocolError, match=f"{type(frame).__name__}, not bytes"):
        pair.push(iter([frame]))
    assert time.monotonic() - began_s < 5


def test_the_deadline_ends_a_stream(pair):
    pair.reserve()
    with pytest.raises(errors.LinkTimeout):
        pair.push(stream(pause_s=0.3), deadline_s=0.5)
    assert pair.receiver.pushed.wait(5)
    assert pair.receiver.sessions["handoff-1"].state is not State.INSTALLED


def test_a_caller_can_give_up(pair):
    pair.reserve()
    gone = threading.Event()
    threading.Timer(0.3, gone.set).start()
    began_s = time.monotonic()
    with pytest.raises(errors.HandoffAborted):
        pair.push(stream(pause_s=0.5), cancelled=gone.is_set)
    assert time.monotonic() - began_s < 2


def test_a_receiver_that_takes_nothing_is_given_up():
    header = handoffs.header(
        4096, layers=[handoffs.LayerGeometry(kv_heads=8, head_dim=128)] * 2, block_tokens=256
    )
    pair = Pair()
    pair.receiver.chunk_s = 3.0
    pair.reserve(header)
    stalls = []
    began_s = time.monotonic()
    with pytest.raises(errors.LinkTimeout, match=r"took no frame for 0\.5 s"):
        pair.push(stream(header), stall_s=0.5, on_stall=lambda: stalls.append(1))
    assert time.monotonic() - began_s < 2.5
    assert stalls == [1]
    pair.close()


def test_a_slow_encoder_is_not_taken_for_a_stall(pair):
    pair.reserve()
    assert pair.push(stream(pause_s=0.3), stall_s=0.15).state == "Installed"


def test_a_silent_sender_is_given_up_by_the_receiver():
    pair = Pair(stall_s=0.5)
    pair.reserve()
    hold = threading.Event()

    def sent():
        yield from list(stream())[:2]
        hold.wait(20)

    with pytest.raises(errors.CacheLinkError):
        pair.push(sent(), deadline_s=15.0)
    assert pair.receiver.pushed.wait(5)
    assert isinstance(pair.receiver.ended_with, errors.LinkTimeout)
    assert "0.5 s" in str(pair.receiver.ended_with)
    hold.set()
    pair.close()


def test_one_stream_too_many_is_refused_and_control_calls_still_answer():
    pair = Pair(slots=1)
    pair.reserve()
    hold, opened = threading.Event(), threading.Event()

    def sent():
        yield frames.encode_open(HEADER.handoff_id, handoffs.RECEIVER_EPOCH)
        opened.set()
        hold.wait(20)
        yield from list(stream())[1:]

    receipts = []
    first = threading.Thread(target=lambda: receipts.append(pair.push(sent())))
    first.start()
    assert opened.wait(5)
    time.sleep(0.2)
    for attempt in (pair.push, pair.reserve):
        with pytest.raises(errors.SlotsTaken, match="1 of 1 transfers"):
            attempt()
    began_s = time.monotonic()
    assert pair.client.status("handoff-1").state == "Receiving"
    assert time.monotonic() - began_s < 1
    hold.set()
    first.join(10)
    assert [receipt.state for receipt in receipts] == ["Installed"]
    assert pair.transfers.in_use == 0
    pair.close()


def test_draining_refuses_new_work_and_lets_running_work_end():
    pair = Pair()
    pair.reserve()
    receipts = []
    running = threading.Thread(target=lambda: receipts.append(pair.push(stream(pause_s=0.1))))
    running.start()
    deadline_s = time.monotonic() + 5
    while pair.transfers.in_use == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    pair.transfers.close()
    with pytest.raises(errors.Draining):
        pair.reserve()
    assert pair.transfers.wait_idle(10.0)
    assert pair.server.stop(5.0)
    running.join(10)
    assert [receipt.state for receipt in receipts] == ["Installed"]
    pair.close()


def test_a_restarted_receiver_is_found_again():
    pair = Pair()
    port = pair.server.port
    pair.reserve()
    pair.server.stop(0.0)
    with pytest.raises(errors.LinkError):
        pair.client.status("handoff-1", deadline_s=2.0)
    again = Pair(listen=Listen(address=f"127.0.0.1:{port}"))
    assert pair.reserve().cache_id == "cache-1"
    again.close()
    pair.close()


def test_nobody_there_is_told_within_the_connect_deadline():
    pair = Pair()
    pair.server.stop(0.0)
    began_s = time.monotonic()
    with pytest.raises(errors.PeerGone, match=pair.server.address):
        pair.reserve()
    assert time.monotonic() - began_s < limits.CONNECT_DEADLINE_S + 2
    pair.close()


def test_a_bug_in_a_handler_is_not_shown_to_the_peer(pair, caplog):
    pair.receiver.fails_with = ValueError("secret path /etc/x")
    with pytest.raises(errors.InternalError) as caught:
        pair.reserve()
    assert "secret" not in str(caught.value)
    assert "secret path" in caplog.text


def test_tokens_decide_the_tenant():
    tokens = Tokens({"a" * 20: "acme", "b" * 20: "bolt"})
    pair = Pair(listen=Listen(tokens=tokens))
    with pytest.raises(errors.Unauthenticated):
        pair.reserve()
    with TransferClient(pair.server.address, token="c" * 20) as stranger:
        with pytest.raises(errors.Denied) as caught:
            stranger.reserve(encode_header(HEADER))
        assert type(caught.value) is errors.Denied
        with pytest.raises(errors.Denied):
            stranger.push(stream(), deadline_s=5.0)
    with TransferClient(pair.server.address, token="b" * 20) as known:
        with pytest.raises(errors.UnknownCache, match="tenant 'bolt'"):
            known.status("other")
        known.reserve(encode_header(HEADER))
        assert known.push(stream(), deadline_s=5.0).state == "Installed"
    pair.close()


def test_the_deadline_of_a_known_size():
    assert push_deadline_s(10**9, 125e6) == 5.0 + 32.0
