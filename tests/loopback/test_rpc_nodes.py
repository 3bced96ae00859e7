"""The services for people and programs, over real gRPC on loopback, with both clients."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cachelink_core import errors
from cachelink_core.identity import FieldDiff
from cachelink_core.rpc.auth import Tokens
from cachelink_core.rpc.client import (
    AsyncReceiverClient,
    AsyncSenderClient,
    Conversation,
    Document,
    HandoffRequest,
    HeldCache,
    HeldHandoff,
    Message,
    Progress,
    Question,
    Receipt,
    ReceiverClient,
    Sampling,
    SenderClient,
    TlsFiles,
    TokenIds,
    VerbatimText,
)
from cachelink_core.rpc.server import Listen, RpcServer, build_server
from cachelink_core.rpc.slots import Slots
from cachelink_core.testing import handoffs
from cachelink_core.testing.scripted_nodes import ScriptedReceiver, ScriptedSender

ASKED = HeldCache("cache-1"), Question("why?")
CERTIFICATES = Path(__file__).parent / "certificates"


class Nodes:
    """A sender and a receiver, both served, with answer slots for two."""

    def __init__(self, **listen):
        self.sender, self.receiver = ScriptedSender("sender"), ScriptedReceiver("receiver")
        self.answers = Slots("answers", 2)
        self.listen = Listen(**listen)
        self.servers = [self._serve(sender=self.sender), self._serve(receiver=self.receiver)]
        self.sender_address, self.receiver_address = (s.address for s in self.servers)

    def _serve(self, **handlers) -> RpcServer:
        transfers = Slots("transfers", 2)
        server = build_server(self.listen, transfers=transfers, answers=self.answers, **handlers)
        server.start()
        return server

    def close(self):
        for server in self.servers:
            server.stop(0.0)


@pytest.fixture
def nodes():
    nodes = Nodes()
    yield nodes
    nodes.close()


def test_an_answer_streams_and_ends_with_its_final(nodes):
    with ReceiverClient(nodes.receiver_address) as client:
        answer = client.answer(*ASKED)
        assert answer.final is None
        deltas = list(answer)
    assert [delta.text for delta in deltas] == ["one ", "two ", "three"]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)]
    assert (answer.final.path, answer.final.finish_reason) == ("exact", "stop")
    assert dict(answer.final.phases) == {"total": 0.5}
    assert list(answer) == []


@pytest.mark.parametrize(
    ("context", "query"),
    [
        (HeldCache("c"), Question("q")),
        (HeldHandoff("h"), VerbatimText("t")),
        (Document("d"), TokenIds((1, 2**32 - 1))),
        (Document("d", chat=False), TokenIds(())),
        (TokenIds((7, 8)), Conversation((Message("user", "hi"), Message("assistant", "yes")))),
        (Conversation((Message("system", "be brief"),)), Question("")),
    ],
)
def test_a_request_arrives_as_it_was_made(nodes, context, query):
    sampling = Sampling(7, 0.5, 3, 0.9, 1.1, 2**64 - 1, ("a", "b"), ignore_eos=True, logprobs=2)
    with SenderClient(nodes.sender_address) as client:
        client.answer(
            context,
            query,
            sampling=sampling,
            least_trust="lossy",
            on_failure="recompute",
            keep=True,
            wait_s=1.5,
            policy="auto",
            max_error=0.25,
        ).text()
    ((request, call),) = nodes.sender.answered
    assert (request.context, request.query, request.sampling) == (context, query, sampling)
    assert (request.least_trust, request.on_failure) == ("lossy", "recompute")
    assert (request.keep, request.wait_s) == (True, 1.5)
    assert (request.policy, request.max_error) == ("auto", 0.25)
    assert call.tenant == "default"
    assert call.peer.startswith("ipv4:127.0.0.1:")


def test_absent_fields_mean_greedy_decoding(nodes):
    with ReceiverClient(nodes.receiver_address) as client:
        client.answer(*ASKED).text()
    assert nodes.receiver.answered[0][0].sampling == Sampling()


def test_a_failure_before_the_first_token_is_raised_on_reading(nodes):
    nodes.receiver.fails_with = errors.InsufficientTrust("trust is 'lossy'; asked for 'exact'")
    with ReceiverClient(nodes.receiver_address) as client:
        answer = client.answer(*ASKED)
        with pytest.raises(errors.InsufficientTrust, match="'lossy'; asked for 'exact'"):
            answer.text()
    assert answer.final is None


def test_cancelling_an_answer_stops_the_node_within_a_token(nodes):
    nodes.receiver.words, nodes.receiver.word_s = ("word ",) * 1000, 0.02
    with ReceiverClient(nodes.receiver_address) as client:
        answer = client.answer(*ASKED)
        for _ in range(3):
            next(answer)
        answer.cancel()
        assert list(answer) == []
        assert answer.final is None
        assert nodes.receiver.stopped.wait(2)
        steps = nodes.receiver.steps
        time.sleep(0.1)
        assert nodes.receiver.steps == steps < 50
    assert _soon(lambda: nodes.answers.in_use == 0)


def test_a_client_that_goes_away_stops_the_node(nodes):
    nodes.receiver.words, nodes.receiver.word_s = ("word ",) * 1000, 0.02
    with ReceiverClient(nodes.receiver_address) as client:
        next(client.answer(*ASKED))
    assert nodes.receiver.stopped.wait(2)


def test_leaving_the_block_of_an_answer_cancels_it(nodes):
    nodes.receiver.words, nodes.receiver.word_s = ("word ",) * 1000, 0.02
    with ReceiverClient(nodes.receiver_address) as client:
        with client.answer(*ASKED) as answer:
            next(answer)
        assert nodes.receiver.stopped.wait(2)


def test_the_deadline_of_an_answer(nodes):
    nodes.receiver.words, nodes.receiver.word_s = ("word ",) * 1000, 0.02
    with ReceiverClient(nodes.receiver_address) as client, pytest.raises(errors.LinkTimeout):
        client.answer(*ASKED, deadline_s=0.3).text()
    assert nodes.receiver.stopped.wait(2)


def test_one_answer_too_many_is_refused_and_health_still_answers(nodes):
    nodes.receiver.words, nodes.receiver.word_s = ("word ",) * 1000, 0.02
    with ReceiverClient(nodes.receiver_address) as client:
        running = [client.answer(*ASKED) for _ in range(2)]
        for answer in running:
            next(answer)
        with pytest.raises(errors.SlotsTaken, match="2 of 2 answers"):
            client.answer(*ASKED).text()
        began_s = time.monotonic()
        assert client.health() is False  # not set yet
        assert client.ping().role == "receiver"
        assert time.monotonic() - began_s < 1
        for answer in running:
            answer.cancel()


def test_a_handoff_reports_progress_and_returns_its_receipt(nodes):
    seen: list[Progress] = []
    with SenderClient(nodes.sender_address) as client:
        receipt = client.handoff(
            Document("text"),
            "near",
            codec="int4+zstd",
            stream=False,
            lease_s=9.0,
            mapper="any",
            least_trust="lossy",
            max_error=0.25,
            questions=7,
            on_progress=seen.append,
        )
        events = list(client.handoff_events(HandoffRequest(HeldCache("c"), "near")))
    assert [progress.prefilled_tokens for progress in seen] == [16, 32]
    assert (receipt.handoff_id, receipt.cache_id, receipt.trust) == (
        "handoff-1",
        "cache-1",
        "lossy",
    )
    assert isinstance(events[-1], Receipt)
    first, second = nodes.sender.requested
    assert first == HandoffRequest(
        Document("text"), "near", "int4+zstd", False, 9.0, "any", "lossy", 0.25, 7
    )
    assert second == HandoffRequest(HeldCache("c"), "near")


def test_a_prefill_stays_at_the_sender(nodes):
    with SenderClient(nodes.sender_address) as client:
        assert client.prefill(TokenIds((1, 2, 3))).handoff_id == ""
    assert nodes.sender.requested == [TokenIds((1, 2, 3))]


def test_closing_the_events_of_a_handoff_cancels_it(nodes):
    nodes.sender.word_s = 0.3
    with SenderClient(nodes.sender_address) as client:
        events = client.handoff_events(HandoffRequest(Document("d"), "near"))
        next(events)
        events.close()
        assert nodes.sender.stopped.wait(3)


def test_a_failed_handoff_names_every_field(nodes):
    diffs = [FieldDiff(f"layers[{index}]", "8", "4") for index in range(3)]
    nodes.sender.fails_with = errors.IdentityMismatch(diffs)
    client = SenderClient(nodes.sender_address)
    with client, pytest.raises(errors.IdentityMismatch) as caught:
        client.handoff(Document("d"), "near")
    assert [diff.field for diff in caught.value.diffs] == ["layers[0]", "layers[1]", "layers[2]"]


def test_caches_evict_and_ping(nodes):
    with ReceiverClient(nodes.receiver_address) as client:
        listed = client.caches()
        assert (listed.used_bytes, listed.reserved_bytes, listed.budget_bytes) == (10, 20, 30)
        (cache,) = listed.caches
        assert (cache.cache_id, cache.trust, cache.pins) == ("cache-of-default", "lossy", 2)
        assert client.evict(cache.cache_id) == 10
        with pytest.raises(errors.UnknownCache):
            client.evict("other")
        info = client.ping()
    assert info.identity == handoffs.identity()
    assert info == nodes.receiver.info(None)


def test_health_follows_the_node_and_a_drain_is_final(nodes):
    with ReceiverClient(nodes.receiver_address) as client:
        server = nodes.servers[1]
        assert not client.health()
        server.set_serving(serving=True)
        assert client.health()
        assert client.health("cachelink.v1.TransferService")
        assert client.health("cachelink.v1.ReceiverService")
        with pytest.raises(errors.UnknownCache):  # NOT_FOUND, as grpc.health.v1 says
            client.health("cachelink.v1.SenderService")
        server.enter_graceful_shutdown()
        server.set_serving(serving=True)
        assert not client.health()
        assert client.ping().role == "receiver"


def test_health_watches_hold_no_thread(nodes):
    with grpc.insecure_channel(nodes.receiver_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=20) for _ in range(30)]
        for watch in watches:
            next(watch)
        with ReceiverClient(nodes.receiver_address) as client:
            assert client.ping(deadline_s=2.0).role == "receiver"
        for watch in watches:
            watch.cancel()


def test_reflection_lists_the_services(nodes):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(nodes.receiver_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
    names = {service.name for service in reply.list_services_response.service}
    assert {"cachelink.v1.ReceiverService", "cachelink.v1.TransferService"} <= names


def test_tokens_guard_everything_but_health():
    nodes = Nodes(tokens=Tokens({"a" * 20: "acme"}))
    with ReceiverClient(nodes.receiver_address) as stranger:
        assert stranger.health() is False
        for call in (stranger.ping, stranger.caches, stranger.answer(*ASKED).text):
            with pytest.raises(errors.Unauthenticated):
                call()
    with ReceiverClient(nodes.receiver_address, token="a" * 20) as known:
        assert known.caches().caches[0].cache_id == "cache-of-acme"
        known.answer(*ASKED).text()
    assert [call.tenant for _, call in nodes.receiver.answered] == ["acme"]
    nodes.close()


def test_the_asynchronous_client_has_the_same_verbs(nodes):
    async def use() -> None:
        async with AsyncReceiverClient(nodes.receiver_address) as client:
            answer = client.answer(*ASKED)
            assert [delta.text async for delta in answer] == ["one ", "two ", "three"]
            assert answer.final.path == "exact"
            assert (await client.caches()).budget_bytes == 30
            assert await client.evict("cache-of-default") == 10
            assert (await client.ping()).role == "receiver"
            assert await client.health() is False
            with pytest.raises(errors.UnknownCache):
                await client.evict("other")
        async with AsyncSenderClient(nodes.sender_address) as client:
            seen: list[Progress] = []
            receipt = await client.handoff(Document("d"), "near", on_progress=seen.append)
            assert receipt.cache_id == "cache-1"
            assert len(seen) == 2
            assert (await client.prefill(Document("d"))).handoff_id == ""
            nodes.sender.fails_with = errors.Denied("receiver 'far' is not listed")
            with pytest.raises(errors.Denied, match="'far'"):
                await client.handoff(Document("d"), "far")

    asyncio.run(use())


def test_the_asynchronous_answer_can_be_cancelled(nodes):
    nodes.receiver.words, nodes.receiver.word_s = ("word ",) * 1000, 0.02

    async def use() -> None:
        async with AsyncReceiverClient(nodes.receiver_address) as client:
            async with client.answer(*ASKED) as answer:
                await anext(answer)
            assert [delta async for delta in answer] == []
            assert await asyncio.to_thread(nodes.receiver.stopped.wait, 2)

    asyncio.run(use())


def test_mutual_tls_lets_in_who_has_a_certificate():
    files = {
        name: TlsFiles(
            CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{name}.key", CERTIFICATES / "ca.pem"
        )
        for name in ("server", "client")
    }
    nodes = Nodes(tls=files["server"])
    with ReceiverClient(nodes.receiver_address, tls=files["client"]) as client:
        assert client.ping().role == "receiver"
    for tls in (None, TlsFiles(ca=CERTIFICATES / "ca.pem")):
        stranger = ReceiverClient(nodes.receiver_address, tls=tls)
        with stranger, pytest.raises(errors.PeerGone):
            stranger.ping(deadline_s=5.0)
    nodes.close()


def test_a_missing_certificate_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"absent\.pem"):
        ReceiverClient("127.0.0.1:1", tls=TlsFiles(ca=tmp_path / "absent.pem"))
    with pytest.raises(errors.ConfigError, match="give both or neither"):
        TlsFiles(certificate=tmp_path / "only.pem")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0", ":0"])
def test_an_address_that_others_reach_needs_tls_or_tokens(address):
    with pytest.raises(errors.ConfigError, match="allow_insecure"):
        Listen(address).check()
    Listen(address, allow_insecure=True).check()
    Listen(address, tokens=Tokens({"a" * 20: "acme"})).check()
    Listen(address, tls=TlsFiles()).check()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.8.8.8:0"])
def test_loopback_needs_nothing(address):
    Listen(address).check()


def test_a_taken_port_is_an_error_and_not_a_shared_one(nodes):
    listen = Listen(nodes.receiver_address)
    with pytest.raises(errors.ConfigError, match=nodes.receiver_address):
        build_server(listen, transfers=Slots("t", 1), answers=Slots("a", 1))


@pytest.mark.parametrize(("token", "tenant"), [("short", "t"), ("é" * 20, "t"), ("a" * 20, "")])
def test_tokens_that_cannot_be_meant(token, tenant):
    with pytest.raises(errors.ConfigError, match="tokens") as caught:
        Tokens({token: tenant})
    assert token not in str(caught.value)


def _soon(condition, deadline_s: float = 2.0) -> bool:
    until_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.01)
    return condition()
