"""What an operator relies on: slots, tenants, metrics that move, readiness, and a drain."""

from __future__ import annotations

import json
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachelink_core import errors
from cachelink_core.rpc.client import (
    Document,
    HeldCache,
    Question,
    ReceiverClient,
    Sampling,
    SenderClient,
    TokenIds,
)
from tests.loopback.nodes import pair_of, receiver_of
from tests.loopback.offers import IDS, Offer

SHORT = Sampling(max_new_tokens=4, ignore_eos=True)


def test_with_every_slot_taken_control_calls_still_answer(engines):
    one = {"slots": {"transfers": 1, "answers": 1}}
    with pair_of(engines("llama"), engines("llama", side="receiver"), receiver_config=one) as pair:
        receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
        parts = pair.receiver_node.parts
        with parts.transfers.take(), parts.answers.take():
            began = time.monotonic()
            assert pair.ask_receiver.health()
            assert pair.ask_receiver.ping().transfers == 1
            assert len(pair.ask_receiver.caches().caches) == 1
            with pytest.raises(errors.SlotsTaken, match="1 of 1"):
                pair.ask_receiver.answer(HeldCache(receipt.cache_id), TokenIds((5,))).text()
            with pytest.raises(errors.SlotsTaken, match="1 of 1"):
                Offer(pair, "int8").reserve()
            assert time.monotonic() - began < 1.0
        pair.ask_receiver.answer(HeldCache(receipt.cache_id), TokenIds((5,)), sampling=SHORT).text()


def test_tenants_do_not_see_each_other(engines):
    tokens = {"alpha": "a" * 24, "beta": "b" * 24}
    with receiver_of(engines("llama", side="receiver"), auth={"tokens": tokens}) as receiver:
        address = receiver.addresses["grpc"]
        peer = {"local": {"address": address, "token": tokens["alpha"]}}
        from tests.loopback.nodes import sender_of

        with (
            sender_of(engines("llama"), peer) as sender,
            SenderClient(sender.addresses["grpc"]) as ask,
            ReceiverClient(address, token=tokens["alpha"]) as alpha,
            ReceiverClient(address, token=tokens["beta"]) as beta,
            ReceiverClient(address) as nobody,
        ):
            receipt = ask.handoff(TokenIds(IDS), "local")
            assert [c.cache_id for c in alpha.caches().caches] == [receipt.cache_id]
            assert beta.caches().caches == ()
            for client in (beta, nobody):
                with pytest.raises((errors.UnknownCache, errors.Unauthenticated)):
                    client.answer(HeldCache(receipt.cache_id), TokenIds((5,))).text()
            with pytest.raises(errors.UnknownCache):
                beta.evict(receipt.cache_id)
            with pytest.raises(errors.Unauthenticated):
                nobody.caches()
            assert len(alpha.caches().caches) == 1


def test_every_metric_moves(engines):
    """One life with everything in it: each declared metric changes on one of the two nodes."""
    with pair_of(
        engines("llama"), engines("llama", side="receiver"),
        receiver_config={"store": {"budget": "4MB"}},
    ) as pair:  # fmt: skip
        registries = [pair.sender.metrics, pair.receiver.metrics]
        before = [samples(metrics) for metrics in registries]
        for codec in ("native", "int8+zstd"):
            receipt = pair.ask_sender.handoff(TokenIds(IDS), "local", codec=codec)
        context = HeldCache(receipt.cache_id)
        pair.ask_receiver.answer(context, TokenIds((5, 6)), sampling=SHORT).text()
        pair.ask_receiver.answer(Document("abc"), Question("?"), sampling=SHORT).text()
        future = Offer(pair)
        with pytest.raises(errors.UnsupportedVersion):
            future.reserve(future.changed(min_reader_version=9))
        offer = Offer(pair, "int4")
        offer.reserve()
        messages = offer.messages()
        with pytest.raises(errors.MissingChunk):
            offer.push([messages[0], messages[-1]])
        expiring = Offer(pair, "int4+zstd", lease_s=1.0)
        expiring.reserve()
        running = pair.ask_receiver.answer(
            context, TokenIds((5, 6)), sampling=Sampling(max_new_tokens=60, ignore_eos=True)
        )
        next(running)
        during = samples(pair.receiver.metrics)
        running.cancel()
        pair.ask_receiver.evict(receipt.cache_id)
        with pytest.raises(errors.UnknownCache):
            pair.ask_receiver.answer(context, Question("?")).text()
        fallback = pair.ask_receiver.answer(
            context, Question("?"), on_failure="recompute", sampling=SHORT
        )
        fallback.text()
        time.sleep(1.6)
        with pair.receiver_node.parts.transfers.take():
            busy = samples(pair.receiver.metrics)
        pair.sender.drain()
        after = [samples(metrics) for metrics in registries]
        still = set(pair.receiver.metrics.names())
        for old, new in (*zip(before, after, strict=True), (before[1], during), (before[1], busy)):
            still -= {name for name in still if changed(name, old, new)}
        assert still <= {
            # Constant by nature.
            "cachelink_build_info",
            "cachelink_cache_budget_bytes",
            # Nothing translates yet: no pair of different models is configured here.
            "cachelink_map_seconds",
            # No codec was compiled.
            "cachelink_codec_compile_seconds",
        }


def samples(metrics) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def changed(name: str, old: dict[str, float], new: dict[str, float]) -> bool:
    base = name.removesuffix("_total")
    return any(
        value != old.get(key)
        for key, value in new.items()
        if key.startswith((f"{name}[", f"{base}_count[", f"{base}_sum[", f"{name}_total["))
    )


def test_metrics_health_and_readiness_over_http(pair):
    base = f"http://{pair.receiver.addresses['http']}"

    def get(path: str) -> tuple[int, bytes]:
        with urllib.request.urlopen(base + path, timeout=5) as reply:
            return reply.status, reply.read()

    assert get("/healthz")[0] == 200
    assert json.loads(get("/readyz")[1])["ready"] is True
    text = get("/metrics")[1].decode()
    assert "cachelink_handoffs_total" in text
    with grpc.insecure_channel(pair.receiver.addresses["grpc"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "cachelink.v1.TransferService", "cachelink.v1.ReceiverService"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_draining_refuses_new_work_and_finishes_what_runs(engines):
    with pair_of(engines("llama"), engines("llama", side="receiver")) as pair:
        receipt = pair.ask_sender.handoff(TokenIds(IDS), "local")
        running = pair.ask_receiver.answer(
            HeldCache(receipt.cache_id),
            TokenIds((5,)),
            sampling=Sampling(max_new_tokens=40, ignore_eos=True),
        )
        next(running)
        pair.receiver.drain()
        assert not pair.ask_receiver.health()
        assert pair.receiver.readiness.missing() == ("draining",)
        with pytest.raises(errors.Draining):
            pair.ask_receiver.answer(HeldCache(receipt.cache_id), TokenIds((5,))).text()
        with pytest.raises(errors.Draining):
            pair.ask_sender.handoff(TokenIds(IDS), "local", codec="int8")
        assert len([t for delta in running for t in delta.token_ids]) == 39
        assert pair.receiver.wait_idle(5.0)


def test_a_self_check_that_fails_keeps_the_daemon_from_starting(engines, monkeypatch):
    engine = engines("llama", side="receiver")
    wrong = engine.rotate_into

    def shifted(layer, content, start, out):
        wrong(layer, content, start + 1, out)

    prefill = engine.prefill

    def scrambled(cache, ids, block_tokens, on_block=None, cancelled=None):
        prefill(cache, ids, block_tokens, on_block, cancelled)
        cache.set_length(cache.length - 1)

    monkeypatch.setattr(engine, "rotate_into", shifted)
    monkeypatch.setattr(engine, "prefill", scrambled)
    with pytest.raises(errors.InternalError, match="self-check"), receiver_of(engine):
        pass
