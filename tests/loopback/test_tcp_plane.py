"""The plane ``tcp`` between two daemons: exact, guarded, refused by name, and never in the way."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from cachelink_core import errors, limits
from cachelink_core.engine import chunks
from cachelink_core.rpc import frames, tcp_client, tcp_frames, tcp_server, tcp_tickets
from cachelink_core.rpc.client import HeldCache, ReceiverClient, SenderClient, TlsFiles, TokenIds
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2
from cachelink_core.rpc.status import from_info
from cachelink_core.rpc.tcp_client import TcpPush
from cachelink_core.rpc.tcp_socket import FrameSocket
from cachelink_core.rpc.tls import client_context
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.transfer_types import Endpoint
from tests.loopback.nodes import pair_of, receiver_of, sender_of
from tests.loopback.offers import IDS, Offer

CERTIFICATES = Path(__file__).parent / "certificates"
CA = CERTIFICATES / "ca.pem"


def tensors(pair, cache_id: str) -> list[torch.Tensor]:
    entry = pair.receiver_node.parts.store.find("default", cache_id)
    return [
        entry.cache.tensor(layer, kind, entry.cache.first_token(layer), len(entry.ids)).clone()
        for layer in range(len(entry.cache.layers))
        for kind in ("K", "V")
    ]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def both(request, engines):
    """One receiver, and two senders of one model that take different planes to it."""
    sending, receiving = engines(request.param), engines(request.param, side="receiver")
    with (
        pair_of(sending, receiving) as tcp,
        sender_of(
            sending, {"local": tcp.receiver.addresses["grpc"]}, data_planes=("grpc",)
        ) as other,
    ):
        yield tcp, other


@pytest.mark.parametrize("codec", ["native", "native+zstd", "int8", "int4", "int4+zstd"])
@pytest.mark.parametrize("tokens", [1, 16, 45, 149])
def test_both_planes_install_the_same_bits(both, codec, tokens):
    pair, other = both
    pair.clear()
    # No prefix of another one: a held cache that grows keeps the bits of its own schedule.
    ids = TokenIds(tuple(3 + (31 * i + tokens) % 230 for i in range(tokens)))
    receipt = pair.ask_sender.handoff(ids, "local", codec=codec)
    assert receipt.data_plane == "tcp"
    over_tcp = tensors(pair, receipt.cache_id)
    pair.ask_receiver.evict(receipt.cache_id)
    with SenderClient(other.addresses["grpc"]) as ask:
        again = ask.handoff(ids, "local", codec=codec)
    assert (again.data_plane, again.cache_id) == ("grpc", receipt.cache_id)
    assert (again.wire_bytes, again.chunk_count) == (receipt.wire_bytes, receipt.chunk_count)
    for ours, theirs in zip(over_tcp, tensors(pair, again.cache_id), strict=True):
        assert torch.equal(ours, theirs)


def test_many_short_rows_are_copied_instead(pair, monkeypatch):
    exact = pair.ask_sender.handoff(TokenIds(IDS), "local")
    in_place = tensors(pair, exact.cache_id)
    pair.ask_receiver.evict(exact.cache_id)
    monkeypatch.setattr(chunks, "MOST_VIEWS", 1)
    again = pair.ask_sender.handoff(TokenIds(IDS), "local")
    assert again.data_plane == "tcp"
    for ours, theirs in zip(in_place, tensors(pair, again.cache_id), strict=True):
        assert torch.equal(ours, theirs)


def test_a_receiver_may_offer_grpc_alone(engines):
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    alone = {"data": {"enabled": False}}
    with pair_of(sending, receiving, receiver_config=alone) as pair:
        assert "tcp" not in pair.receiver.addresses
        assert pair.ask_sender.handoff(TokenIds(IDS), "local").data_plane == "grpc"


def test_a_port_that_cannot_be_reached_costs_one_try(engines, caplog):
    with pair_of(engines("llama"), engines("llama", side="receiver")) as pair:
        pair.receiver._rpc._tcp.stop()
        for _ in range(2):
            receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
            assert receipt.data_plane == "grpc"
            pair.ask_receiver.evict(receipt.cache_id)
    assert sum("sending over grpc" in record.getMessage() for record in caplog.records) == 1


def tls_files(name: str) -> dict[str, Path]:
    return {"certificate": CERTIFICATES / f"{name}.pem", "key": CERTIFICATES / f"{name}.key"}


@pytest.mark.parametrize("codec", ["native", "int8"])
def test_under_tls_it_shows_and_checks_certificates(engines, codec):
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    with receiver_of(receiving, tls={**tls_files("server"), "ca": CA}) as receiver:
        address = receiver.addresses["grpc"]
        peer = {"address": address, "tls": {**tls_files("client"), "ca": CA}}
        with (
            sender_of(sending, {"local": peer}) as sender,
            SenderClient(sender.addresses["grpc"]) as ask,
        ):
            receipt = ask.handoff(TokenIds(IDS), "local", codec=codec)
        assert receipt.data_plane == "tcp"
        endpoint = Endpoint("tcp", receiver.addresses["tcp"], b"x")
        for files in (TlsFiles(), TlsFiles(ca=CERTIFICATES / "client.pem")):
            with pytest.raises(errors.PeerGone):
                TcpPush.connect(endpoint, address, client_context(files))
        # TLS 1.3 tells a client that its certificate is missing only when it reads.
        with (
            pytest.raises(errors.PeerGone),
            TcpPush.connect(endpoint, address, client_context(TlsFiles(ca=CA))) as link,
        ):
            link.push(iter([tcp_frames.encode_open("a", "b", b"x")]), deadline_s=5.0)
        with (
            pytest.raises(errors.PeerGone),
            TcpPush.connect(endpoint, address, None) as plain,
        ):
            plain.push(iter([tcp_frames.encode_open("a", "b", b"x")]), deadline_s=8.0)


@pytest.fixture
def offer(pair):
    found = Offer(pair)
    found.plane = "tcp"
    found.reserve()
    return found


def with_ticket(offer, ticket: bytes):
    messages = offer.messages()
    opening = tcp_frames.encode_open(
        offer.header.handoff_id, offer.reservation.receiver_epoch, ticket
    )
    with TcpPush.connect(offer.endpoint, offer.pair.transfer.address, None) as link:
        return link.push(iter([opening, *map(offer.tcp_frame, messages[1:])]), deadline_s=10.0)


def test_only_the_ticket_of_the_reservation_opens_it(pair, offer):
    other = Offer(pair, "int8")
    other.reserve()
    for wrong in (b"", b"x" * 32, other.endpoint.ticket):
        with pytest.raises(errors.Denied, match="ticket"):
            with_ticket(offer, wrong)
    receipt = offer.push(offer.messages())  # the reservation was not harmed
    assert receipt.state == "Installed"
    with pytest.raises(errors.Denied):
        offer.push(offer.messages())  # and a ticket is good once
    pair.transfer.abort(other.header.handoff_id, "test")


def test_a_ticket_is_the_tenants_who_reserved(engines):
    tokens = {"alpha": "a" * 24, "beta": "b" * 24}
    receiving = engines("llama", side="receiver")
    with receiver_of(receiving, auth={"tokens": tokens}) as receiver:
        address = receiver.addresses["grpc"]
        peer = {"local": {"address": address, "token": tokens["alpha"]}}
        with (
            sender_of(engines("llama"), peer) as sender,
            SenderClient(sender.addresses["grpc"]) as ask,
            ReceiverClient(address, token=tokens["alpha"]) as alpha,
            ReceiverClient(address, token=tokens["beta"]) as beta,
        ):
            receipt = ask.handoff(TokenIds(IDS), "local")
            assert receipt.data_plane == "tcp"
            assert [c.cache_id for c in alpha.caches().caches] == [receipt.cache_id]
            assert beta.caches().caches == ()


def raw_reply(pair, data: bytes) -> errors.CacheLinkError | None:
    """What a receiver says to raw bytes; None if it just ends the connection."""
    host, _, port = pair.receiver.addresses["tcp"].rpartition(":")
    with socket.create_connection((host, int(port)), 5.0) as connection:
        link = FrameSocket(connection)
        link.set_timeout(20.0)
        with contextlib.suppress(errors.PeerGone):
            link.send(tcp_frames.Outgoing(tcp_frames.FrameKind.CHUNK, b"", [data]))
        link.end_writing()
        try:
            header = link.read_header()
        except errors.PeerGone:
            return None
        if header is None:
            return None
        assert header.kind is tcp_frames.FrameKind.ERROR, header
        return from_info(common_pb2.ErrorInfo.FromString(link.read_payload(header)))


def test_no_flipped_bit_is_ever_accepted(pair):
    """Random single bits of a whole stream, headers of frames included; none is installed."""
    random.seed(20261130)
    seen = set()
    for trial in range(60):
        offer = Offer(pair, random.choice(["native", "int8"]), IDS[:20])
        offer.header = msgspec.structs.replace(offer.header, handoff_id=f"flip{trial}")
        offer.reserve()
        sent = [offer.tcp_frame(message) for message in offer.messages()]
        data = bytearray(b"".join(part for f in sent for part in (f.header, *f.parts)))
        bit = random.randrange(8 * len(data))
        data[bit // 8] ^= 1 << (bit % 8)
        error = raw_reply(pair, bytes(data))
        assert error is not None, f"bit {bit} of {8 * len(data)}"
        seen.add(type(error))
        pair.transfer.abort(f"flip{trial}", "test")
    assert errors.ChecksumMismatch in seen
    assert pair.ask_receiver.caches().caches == ()
    assert pair.receiver_node.parts.store.stats().reserved_bytes == 0


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: receiver.example\r\n\r\n", errors.RemoteProtocolError),
        (bytes(64), errors.RemoteProtocolError),
        (b"CLK\x09" + bytes(28), errors.RemoteProtocolError),
        (b"CLK\x01\xff\xff\xff\xff" + bytes(24), errors.WrongLength),
        (b"CLK\x02\x01" + bytes(28), errors.RemoteProtocolError),
        (b"CLK\x01\x03\x00\x00\x00" + bytes(24) + b"abc", errors.ChecksumMismatch),
        (b"CLK\x01\x03\x00\x00\x00" + bytes(24) + b"ab", errors.PeerGone),
        (b"CLK", errors.PeerGone),
    ],
    ids=["http", "zeros", "kind", "length", "chunk first", "digest", "cut payload", "cut header"],
)
def test_a_stranger_is_told_what_is_wrong(pair, data, error):
    assert type(raw_reply(pair, data)) is error


def test_a_chunk_that_is_announced_too_long_is_refused_before_it_is_read(pair, offer):
    messages = offer.messages()
    opening = offer.tcp_frame(messages[0])
    for length, error in ((2**32 - 1, errors.WrongLength), (limits.MIB, errors.WrongLength)):
        header = tcp_frames._HEADER.pack(
            b"CLK", tcp_frames.FrameKind.CHUNK, length, 0, 0, bytes(16)
        )
        data = opening.header + b"".join(opening.parts) + header
        assert type(raw_reply(pair, data)) is error
        offer = Offer(pair)
        offer.reserve()
        opening = offer.tcp_frame(offer.messages()[0])
    pair.transfer.abort(offer.header.handoff_id, "test")


def wait_for(condition, deadline_s: float = 5.0) -> bool:
    until_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.02)
    return bool(condition())


def streams() -> int:
    """Connections that receivers of this process serve, idle ones included."""
    return sum(thread.name == "tcp-stream" for thread in threading.enumerate())


@pytest.fixture
def idle(pair):
    """Connections that were there before the test."""
    return streams()


def test_an_abort_ends_a_silent_stream_at_once(pair, idle, offer):
    """The destination of an ended handoff is not held by a sender that says nothing more."""
    messages = [offer.tcp_frame(message) for message in offer.messages()]
    caught: list[BaseException] = []
    silent = threading.Event()

    def slow():
        yield from messages[:3]
        silent.wait(20.0)
        yield from messages[3:]

    def push():
        with TcpPush.connect(offer.endpoint, pair.transfer.address, None) as link:
            try:
                link.push(slow(), deadline_s=30.0)
            except errors.CacheLinkError as error:
                caught.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    assert wait_for(lambda: pair.transfer.status(offer.header.handoff_id).state == "Receiving")
    pair.transfer.abort(offer.header.handoff_id, "test")
    assert wait_for(lambda: streams() == idle)
    assert pair.receiver_node.parts.store.stats().reserved_bytes == 0
    silent.set()
    thread.join(10.0)
    assert [type(error) for error in caught] == [errors.HandoffAborted]


def test_waiting_costs_no_cpu(pair, offer):
    """Neither side spins while the other one is silent."""
    messages = [offer.tcp_frame(message) for message in offer.messages()]
    silent = threading.Event()

    def slow():
        yield from messages[:3]
        silent.wait(20.0)
        yield from messages[3:]

    found = []

    def push():
        with TcpPush.connect(offer.endpoint, pair.transfer.address, None) as link:
            found.append(link.push(slow(), deadline_s=30.0))

    thread = threading.Thread(target=push)
    thread.start()
    assert wait_for(lambda: pair.transfer.status(offer.header.handoff_id).state == "Receiving")
    began_s = time.process_time()
    time.sleep(1.0)
    spent_s = time.process_time() - began_s
    silent.set()
    thread.join(10.0)
    assert found[0].state == "Installed"
    assert spent_s < 0.3, f"{spent_s:.2f} s of CPU in a second of waiting"


def test_a_connection_that_says_nothing_is_ended(pair, monkeypatch):
    monkeypatch.setattr(limits, "CONNECT_DEADLINE_S", 0.3)
    host, _, port = pair.receiver.addresses["tcp"].rpartition(":")
    with socket.create_connection((host, int(port)), 5.0) as connection:
        connection.settimeout(5.0)
        data = b""
        while piece := connection.recv(4096):
            data += piece
    assert from_info(common_pb2.ErrorInfo.FromString(data[32:])).reason == "remote_protocol_error"


def test_more_connections_than_there_is_room_for_are_closed(pair, idle, monkeypatch):
    room = pair.receiver_node.parts.transfers.limit + 64
    host, _, port = pair.receiver.addresses["tcp"].rpartition(":")
    before = pair.ask_sender.handoff(TokenIds(IDS), "local", codec="int8")
    assert before.data_plane == "tcp"
    monkeypatch.setattr(limits, "CONNECT_DEADLINE_S", 60.0)
    # The last of them takes the place of the sender's idle connection.
    held = [socket.create_connection((host, int(port)), 5.0) for _ in range(room)]
    try:
        assert wait_for(lambda: streams() >= room)
        with socket.create_connection((host, int(port)), 5.0) as one_too_many:
            one_too_many.settimeout(3.0)
            assert one_too_many.recv(1) == b""
    finally:
        for connection in held:
            connection.close()
    assert wait_for(lambda: streams() <= idle)
    receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
    assert receipt.data_plane == "tcp"
    pair.ask_receiver.answer(HeldCache(receipt.cache_id), TokenIds((5,))).text()


def test_a_connection_serves_one_handoff_after_the_other(pair):
    pair.ask_sender.handoff(TokenIds(IDS), "local")
    before = streams()
    for codec in ("int8", "int4"):
        assert pair.ask_sender.handoff(TokenIds(IDS), "local", codec=codec).data_plane == "tcp"
    assert streams() == before


def test_an_idle_connection_that_the_receiver_closed_is_not_used(pair, monkeypatch):
    monkeypatch.setattr(tcp_server, "KEPT_S", 0.2)
    receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
    count = streams()
    assert wait_for(lambda: streams() < count)
    pair.ask_receiver.evict(receipt.cache_id)
    assert pair.ask_sender.handoff(TokenIds(IDS), "local").data_plane == "tcp"


def test_an_idle_connection_is_not_kept_for_too_long(pair, monkeypatch):
    receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
    kept = pair.sender_node._peers.client("local").connections
    assert wait_for(lambda: kept._kept)  # given back just after the receipt
    assert kept._kept[-1].fresh()
    monkeypatch.setattr(tcp_client, "KEPT_S", 0.0)
    assert kept.take() is None
    pair.ask_receiver.evict(receipt.cache_id)
    assert pair.ask_sender.handoff(TokenIds(IDS), "local").data_plane == "tcp"


def test_a_peer_that_drips_bytes_does_not_hold_its_place(pair, monkeypatch):
    """The limit is of the whole open, not of each read."""
    monkeypatch.setattr(limits, "CONNECT_DEADLINE_S", 0.6)
    host, _, port = pair.receiver.addresses["tcp"].rpartition(":")
    with socket.create_connection((host, int(port)), 5.0) as connection:
        connection.settimeout(0.1)
        began = time.monotonic()
        data = b""
        while time.monotonic() - began < 5.0:
            with contextlib.suppress(OSError):
                connection.sendall(b"C")
            try:
                piece = connection.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if not piece:
                break
            data += piece
        assert time.monotonic() - began < 4.0
    assert data[:4] == b"CLK\x05"


def test_a_plane_that_fails_is_left_alone_for_a_while(pair):
    """Nothing says in advance that a port leads to another receiver: the next handoff takes gRPC."""
    with receiver_of(pair.receiver_engine) as other:
        client = pair.sender_node._peers.client("local")
        client.connections.close()
        client.connections = tcp_client.IdleConnections()
        elsewhere = TcpPush.connect(Endpoint("tcp", other.addresses["tcp"]), client.address, None)
        elsewhere.reusable = True
        client.connections.keep(elsewhere)
        with pytest.raises(errors.Denied):
            pair.ask_sender.handoff(TokenIds(IDS), "local")
        receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
        assert receipt.data_plane == "grpc"
        client.tcp_retry_at_s = 0.0
        pair.ask_receiver.evict(receipt.cache_id)
        assert pair.ask_sender.handoff(TokenIds(IDS), "local").data_plane == "tcp"


def test_a_refused_handoff_leaves_no_encoder_behind(pair):
    """A codec's thread ends with its stream, not when the garbage is collected."""
    ids = TokenIds(tuple(3 + i % 200 for i in range(400)))
    pair.ask_sender.prefill(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cachelink_receiver.incoming.ChunkSink.take",
            lambda *_: (_ for _ in ()).throw(errors.CorruptChunk("made up")),
        )
        with pytest.raises(errors.CorruptChunk):
            pair.ask_sender.handoff(ids, "local", codec="int4")
    assert wait_for(lambda: not any(t.name == "encode" for t in threading.enumerate()), 3.0)


def test_tickets_of_one_tenant_push_out_no_other_s(monkeypatch):
    monkeypatch.setattr(tcp_tickets, "_MOST_TICKETS", 3)
    tickets = tcp_tickets.Tickets()
    kept = tickets.issue("theirs", "beta")
    for number in range(9):
        tickets.issue(f"h{number}", "alpha")
    assert tickets.redeem("theirs", kept) == "beta"


def test_stopping_the_receiver_ends_its_streams(engines):
    before = streams()
    with pair_of(engines("llama"), engines("llama", side="receiver")) as pair:
        offer = Offer(pair)
        offer.reserve()
        messages = [offer.tcp_frame(message) for message in offer.messages()]
        link = TcpPush.connect(offer.endpoint, pair.transfer.address, None)

        def stopped():
            yield from messages[:2]
            pair.receiver.stop()
            yield from messages[2:]

        with link, pytest.raises(errors.CacheLinkError):
            link.push(stopped(), deadline_s=20.0)
        assert wait_for(lambda: streams() <= before)


def test_a_frame_of_a_receiver_is_not_a_senders(pair, offer):
    messages = [offer.tcp_frame(message) for message in offer.messages()]
    wrong = tcp_frames.encode_message(
        tcp_frames.FrameKind.RECEIPT, common_pb2.ErrorInfo(reason="x")
    )
    with (
        TcpPush.connect(offer.endpoint, pair.transfer.address, None) as link,
        pytest.raises(errors.RemoteProtocolError, match="receipt"),
    ):
        link.push(iter([messages[0], wrong, *messages[1:]]), deadline_s=10.0)


def test_a_receiver_that_talks_nonsense_is_named():
    """The sending end does not trust the receiving one either."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        replies = [b"", b"\x00" * 32, b"CLK\x02\x01" + bytes(28), b"CLK\x04\x01\0\0\0" + bytes(24)]
        expected = [errors.PeerGone, errors.RemoteProtocolError, errors.RemoteProtocolError]
        expected.append(errors.PeerGone)

        def serve():
            for reply in replies:
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for error in expected:
            with (
                TcpPush.connect(Endpoint("tcp", address), address, None) as link,
                pytest.raises(errors.CacheLinkError) as caught,
            ):
                link.push(iter([tcp_frames.encode_open("a", "b", b"")]), deadline_s=10.0)
            assert type(caught.value) is error
        thread.join(5.0)


def test_an_endpoint_that_is_no_address_is_no_connection():
    for address in ("", ":", "host", ":http", ":99999", "127.0.0.1:0"):
        with pytest.raises(errors.PeerGone):
            TcpPush.connect(Endpoint("tcp", address), "127.0.0.1:1", None)


def test_frames_of_both_planes_carry_the_same(pair, offer):
    for message in offer.messages():
        frame = offer.tcp_frame(message)
        assert len(frame.header) == tcp_frames.HEADER_BYTES
        header = tcp_frames.decode_header(frame.header)
        assert header.payload_bytes == sum(memoryview(part).nbytes for part in frame.parts)
        event = frames.decode_frame(message)
        if header.kind is tcp_frames.FrameKind.CHUNK:
            assert (header.block, header.run, header.digest) == (
                event.block,
                event.run,
                event.digest,
            )
    pair.transfer.abort(offer.header.handoff_id, "test")


def test_the_client_of_a_receiver_keeps_what_open_plane_needs():
    with TransferClient("127.0.0.1:1") as client:
        assert (client.tls, client.tcp_retry_at_s) == (None, 0.0)
