"""``codec: auto`` and ``policy: auto`` through real daemons: chosen, predicted, took."""

from __future__ import annotations

import json
import threading

import pytest

from cachelink_core import errors
from cachelink_core.cli import main
from cachelink_core.planner import Measurement
from cachelink_core.planner.readings import unit_of
from cachelink_core.rpc.client import HeldCache, HeldHandoff, Sampling, TokenIds
from tests.loopback.nodes import BLOCK_TOKENS, pair_of
from tests.loopback.offers import IDS, Offer, slowly

GREEDY = Sampling(max_new_tokens=4, ignore_eos=True)
QUERY = TokenIds((5, 6))
LONG = tuple(3 + (31 * i) % 230 for i in range(24 * BLOCK_TOKENS))


@pytest.fixture
def fresh(engines):
    """A pair that has measured nothing yet."""
    blocks = {"block_tokens": 128}  # shorter ones would keep their quantized keys native
    with pair_of(engines("llama"), engines("llama", side="receiver"), sender_config=blocks) as pair:
        yield pair


def readings(client) -> dict[str, Measurement]:
    return {reading.name: reading for reading in client.ping().measurements}


def slow_link(pair, bytes_per_s: float) -> None:
    """As if large transfers had been this slow."""
    ratio = pair.sender_node.parts.measured
    ratio._note("local/link", bytes_per_s * 1e6, 1e6, 1e30)


def slow_prefill(node, token_s: float) -> None:
    """As if the model of a node took this long for a token."""
    node.parts.measured._slope.add(0, 10**6, token_s * 10**6)


def test_nodes_publish_what_they_measured(fresh):
    assert readings(fresh.ask_sender) == {}
    fresh.ask_sender.handoff(TokenIds(IDS), "local", codec="int8+zstd")
    fresh.ask_receiver.answer(TokenIds(IDS), QUERY, sampling=GREEDY).text()
    sender, receiver = readings(fresh.ask_sender), readings(fresh.ask_receiver)
    assert {
        "prefill_token",
        "encode:int8+zstd",
        "packed:int8+zstd",
        "local/link",
        "local/fixed",
        "local/transfer",
        "local/load:int8+zstd",
    } <= set(sender)
    assert {"prefill_token", "load:int8+zstd", "query", "answer", "decode_token"} <= set(receiver)
    for reading in (*sender.values(), *receiver.values()):
        assert reading.unit == unit_of(reading.name)
        assert reading.value >= 0.0
        assert reading.samples >= 1
    assert sender["local/link"].value > 1e5
    assert 0.5 < sender["packed:int8+zstd"].value <= 1.1


def test_auto_sends_by_the_fastest_way_and_its_receipt_says_what_came_of_it(fresh):
    slow_prefill(fresh.receiver_node, 1.0)
    slow_link(fresh, 1e5)
    fresh.ask_sender.prefill(TokenIds(LONG))
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="auto")
    plan = receipt.plan
    assert receipt.recommendation == "transfer"
    assert receipt.codec == plan.chosen == "int4+zstd"
    assert plan.took_s == pytest.approx(receipt.phases["total"])
    assert plan.predicted_s > 0.0
    assert {p.way for p in plan.predictions} >= {"text", "native", "int8", "int4"}
    assert "text: 384." in plan.why
    answer = fresh.ask_receiver.answer(HeldCache(receipt.cache_id), QUERY, sampling=GREEDY)
    answer.text()
    assert answer.final.path == "lossy"


@pytest.mark.parametrize(
    ("asked", "codec"),
    [({"least_trust": "exact"}, "native+zstd"), ({"max_error": 0.00195}, "bf16+zstd")],
)
def test_auto_keeps_to_what_is_asked_for(fresh, asked, codec):
    slow_prefill(fresh.receiver_node, 1.0)
    slow_link(fresh, 1e5)
    fresh.ask_sender.prefill(TokenIds(LONG))
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="auto", **asked)
    refused = {p.way for p in receipt.plan.predictions if p.excluded}
    assert receipt.codec.removesuffix("+zstd") == codec.removesuffix("+zstd")
    assert {"int4", "int4+zstd"} <= refused


def test_auto_sends_nothing_where_reading_again_is_faster(fresh):
    slow_prefill(fresh.receiver_node, 1e-6)
    slow_link(fresh, 1e3)
    fresh.ask_sender.prefill(TokenIds(LONG))
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="auto")
    assert receipt.recommendation == "re_read"
    assert receipt.sender_cache_id
    assert (receipt.cache_id, receipt.wire_bytes, receipt.plan.chosen) == ("", 0, "text")
    assert "mostly link" in receipt.plan.why
    assert fresh.ask_receiver.caches().caches == ()
    metrics = fresh.sender_node.parts.metrics
    assert metrics.value("cachelink_handoffs_total", outcome="re_read") == 1
    many = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="auto", questions=10**7)
    assert many.recommendation == "transfer"


def test_auto_before_anything_was_measured_says_so(fresh):
    receipt = fresh.ask_sender.handoff(TokenIds(IDS), "local", codec="auto")
    assert receipt.codec == "native"
    assert receipt.plan.predicted_s is None
    assert "nothing to predict from yet" in receipt.plan.why
    again = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="auto")
    assert again.plan.chosen
    assert again.plan.predicted_s is not None
    assert "the receiver's prefill: as the sender's" in again.plan.assumed


def test_the_senders_default_codec_may_be_auto(engines):
    with pair_of(
        engines("llama"), engines("llama", side="receiver"), sender_config={"codec": "auto"}
    ) as pair:
        assert pair.ask_sender.handoff(TokenIds(IDS), "local").plan is not None
        assert pair.ask_sender.handoff(TokenIds(IDS), "local", codec="int8").plan is None


@pytest.mark.parametrize(
    ("codec", "asked", "said"),
    [
        ("int4", {"least_trust": "exact"}, "codec int4: trust is lossy, asked for exact"),
        ("int4", {"max_error": 0.001}, "codec int4: error is 0.00697 nats"),
    ],
)
def test_a_named_codec_that_is_not_good_enough_is_refused(pair, codec, asked, said):
    with pytest.raises(errors.InsufficientTrust, match=said):
        pair.ask_sender.handoff(TokenIds(IDS), "local", codec=codec, **asked)
    assert pair.ask_receiver.caches().caches == ()


def test_a_mapped_cache_cannot_promise_an_error(pair):
    with pytest.raises(errors.InsufficientTrust, match="error is unknown"):
        pair.ask_sender.handoff(TokenIds(IDS), "local", codec="auto", mapper="any", max_error=0.5)


# --- answers -------------------------------------------------------------------------------------


def auto(pair, context, **asked):
    answer = pair.ask_receiver.answer(context, QUERY, sampling=GREEDY, policy="auto", **asked)
    answer.text()
    return answer.final


def test_an_installed_cache_is_taken_at_once(fresh):
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="int8")
    slow_prefill(fresh.receiver_node, 0.01)
    final = auto(fresh, HeldCache(receipt.cache_id))
    assert (final.path, final.plan.chosen) == ("lossy", "int8")
    assert final.plan.took_s == final.first_token_s
    assert {p.way for p in final.plan.predictions} == {"int8", "text"}


@pytest.mark.parametrize("asked", [{"least_trust": "exact"}, {"max_error": 0.001}])
def test_a_cache_that_is_not_good_enough_is_read_again(fresh, asked):
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="int8")
    final = auto(fresh, HeldCache(receipt.cache_id), **asked)
    assert (final.path, final.plan.chosen) == ("recompute", "text")
    with pytest.raises(errors.InsufficientTrust):
        fresh.ask_receiver.answer(HeldCache(receipt.cache_id), QUERY, **asked).text()


def arriving(pair, pause_s: float) -> tuple[Offer, threading.Thread]:
    offer = Offer(pair, ids=LONG)
    offer.reserve()
    messages = slowly(offer.messages(), pause_s)
    sender = threading.Thread(target=lambda: offer.push(messages, deadline_s=60.0))
    sender.start()
    return offer, sender


def test_a_cache_that_will_soon_be_here_is_waited_for(fresh):
    slow_prefill(fresh.receiver_node, 1.0)
    offer, sender = arriving(fresh, 0.02)
    final = auto(fresh, HeldHandoff(offer.header.handoff_id))
    sender.join(30)
    assert (final.path, final.plan.chosen) == ("exact", "native")
    assert final.phases["wait"] > 0.0


def test_a_cache_that_comes_too_slowly_is_read_again_meanwhile(fresh):
    slow_prefill(fresh.receiver_node, 1e-5)
    offer, sender = arriving(fresh, 0.4)
    final = auto(fresh, HeldHandoff(offer.header.handoff_id), wait_s=60.0)
    assert (final.path, final.plan.chosen) == ("recompute", "text")
    assert final.first_token_s < 6.0
    sender.join(60)
    assert auto(fresh, HeldHandoff(offer.header.handoff_id)).path == "exact"


def test_a_reservation_whose_sender_never_comes_is_not_waited_for_longer_than_reading_takes(fresh):
    slow_prefill(fresh.receiver_node, 0.3 / len(LONG))
    offer = Offer(fresh, ids=LONG)
    offer.reserve()
    final = auto(fresh, HeldHandoff(offer.header.handoff_id), wait_s=60.0)
    assert final.path == "recompute"
    assert 0.1 < final.phases["wait"] < 6.0


@pytest.fixture
def in_line(engines):
    """A pair whose receiver answers one question to a cache after the other."""
    with pair_of(
        engines("llama"),
        engines("llama", side="receiver"),
        sender_config={"block_tokens": 128},
        receiver_config={"overlap": "wait"},
    ) as pair:
        yield pair


def test_a_cache_with_a_long_line_before_it_is_read_again(in_line):
    """Answers to one cache go one after the other; reading does not stand in that line."""
    fresh = in_line
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="int8")
    parts = fresh.receiver_node.parts
    slow_prefill(fresh.receiver_node, 1e-5)
    parts.measured._note("answer", 5.0 * 1e6, 1e6, 1e30)
    context = HeldCache(receipt.cache_id)
    with parts.store.lease("default", receipt.cache_id):
        final = auto(fresh, context)
    assert (final.path, final.plan.chosen) == ("recompute", "text")
    assert "mostly turn 5." in final.plan.why
    assert auto(fresh, context).path == "lossy"


def test_a_cache_that_is_gone_is_read_again_by_its_header(fresh):
    receipt = fresh.ask_sender.handoff(TokenIds(LONG), "local")
    fresh.ask_receiver.evict(receipt.cache_id)
    final = auto(fresh, HeldCache(receipt.cache_id))
    assert (final.path, final.plan.chosen) == ("recompute", "text")
    assert final.plan.why == "the cache is gone"
    with pytest.raises(errors.UnknownCache):
        auto(fresh, HeldCache("never"))


# --- the tool ------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    """Runs a command; returns its JSON."""

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(each) for each in arguments])
        captured = capsys.readouterr()
        assert (left.value.code, captured.err) == (0, "")
        return json.loads(captured.out)

    return run


def test_plan_probes_live_nodes_or_reads_what_ping_printed(fresh, run, tmp_path):
    fresh.ask_sender.handoff(TokenIds(LONG), "local", codec="int8")
    fresh.ask_receiver.answer(TokenIds(LONG), QUERY, sampling=GREEDY).text()
    nodes = (
        "--sender", fresh.sender.addresses["grpc"],
        "--receiver", fresh.receiver.addresses["grpc"],
    )  # fmt: skip
    live = run("plan", "--tokens", 300, *nodes, "--json")
    ping = run("ping", *nodes, "--json")
    assert {m["name"] for m in ping["sender"]["measurements"]} >= {"local/link", "encode:int8"}
    stored = tmp_path / "ping.json"
    stored.write_text(json.dumps(ping))
    again = run("plan", "--tokens", 300, "--measurements", stored, "--json")
    assert again["plan"] == live["plan"]
    assert live["plan"]["chosen"]
    measured = {m["name"]: m["value"] for m in ping["sender"]["measurements"]}
    assert live["link_bytes_per_s"] == measured["local/link"]


def test_the_tool_hands_over_and_answers_by_plan(fresh, run, tmp_path):
    slow_prefill(fresh.receiver_node, 1.0)
    ids = ",".join(str(each) for each in LONG)
    handed = run(
        "handoff", "--token-ids", ids, "--sender", fresh.sender.addresses["grpc"],
        "--codec", "auto", "--least-trust", "lossy", "--questions", 3, "--json",
    )  # fmt: skip
    assert handed["recommendation"] == "transfer"
    answered = run(
        "answer", "--token-ids", "5,6", "--cache", handed["cache_id"],
        "--node", fresh.receiver.addresses["grpc"],
        "--policy", "auto", "--max-error", 1.0, "--max-new-tokens", 2, "--json",
    )  # fmt: skip
    plan = answered["final"]["plan"]
    assert plan["chosen"] == handed["codec"]
    assert plan["took_s"] > 0.0
