"""Blocks stream while the prefill runs, and a slow receiver costs the sender no memory."""

from __future__ import annotations

import threading
import time

import pytest

from cachelink_core.handoff import HandoffSession, events
from cachelink_core.manifest import encode_header
from cachelink_core.rpc.client import TokenIds
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_sender.prefill_job import PrefillJob
from cachelink_sender.pump import Pump
from tests.loopback.nodes import BLOCK_TOKENS
from tests.loopback.offers import Offer

LONG = tuple(3 + (31 * i) % 230 for i in range(20 * BLOCK_TOKENS))


def test_a_block_is_sent_while_the_next_is_computed(pair):
    engine = pair.sender_engine
    prefill = engine.prefill

    def slow(cache, ids, block_tokens, on_block=None, cancelled=None):
        """The same prefill with a pause after each block, as a larger model would take it."""

        def paused(block):
            on_block(block)
            time.sleep(0.03)

        prefill(cache, ids, block_tokens, paused, cancelled)

    engine.prefill = slow
    try:
        receipt = pair.ask_sender.handoff(TokenIds(LONG), "local", stream=True)
    finally:
        del engine.prefill
    line = receipt.timeline
    blocks = len(LONG) // BLOCK_TOKENS
    stages = (
        line.prefilled_at_s,
        line.encoded_at_s,
        line.sent_at_s,
        line.verified_at_s,
        line.installed_at_s,
    )
    assert [len(stage) for stage in stages] == [blocks] * 5
    for ours in (line.prefilled_at_s, line.encoded_at_s, line.sent_at_s):
        assert list(ours) == sorted(ours)
    for block in range(blocks - 1):
        # On one clock: block i left before block i + 1 was computed.
        assert line.prefilled_at_s[block] <= line.encoded_at_s[block] <= line.sent_at_s[block]
        assert line.sent_at_s[block] < line.prefilled_at_s[block + 1]
    for block in range(blocks):
        assert line.verified_at_s[block] <= line.installed_at_s[block]
    # The receiver's clock counts from the same reply: all but the end came before the prefill's end.
    assert line.installed_at_s[blocks // 2] < line.prefilled_at_s[-1]


def test_not_streaming_prefills_first(pair):
    receipt = pair.ask_sender.handoff(TokenIds(LONG), "local", stream=False)
    assert max(receipt.timeline.prefilled_at_s) <= 0.0
    assert min(receipt.timeline.sent_at_s) > 0.0


class Stalled:
    """A receiver that takes frames ten times slower than they could be made."""

    def __init__(self, frames):
        self.taken = 0
        self._frames = frames

    def run(self, pause_s: float, most_ahead) -> None:
        for _ in self._frames:
            self.taken += 1
            most_ahead()
            time.sleep(pause_s)


@pytest.mark.parametrize("codec", ["native", "int4"])
def test_a_slow_receiver_holds_the_encoder_within_four_blocks(pair, codec):
    offer = Offer(pair, codec, LONG)
    engine = pair.sender_engine
    cache = engine.open_cache(len(LONG), 1, whole=True)
    engine.prefill(cache, LONG, BLOCK_TOKENS)
    job = PrefillJob(engine, cache, LONG, BLOCK_TOKENS)
    session = HandoffSession(offer.header, "epoch", 0.0)
    session.handle(events.Admit("name"), 0.0)
    pump = Pump(engine, offer.header, session, job, lambda: False)
    chunks_per_block = len(offer.header.layout.block_chunks(0))
    ahead = []
    receiver = Stalled(pump.frames())
    receiver.run(0.005, lambda: ahead.append(session.recorded_chunks - max(0, receiver.taken - 1)))
    assert session.recorded_chunks == offer.header.layout.chunk_count
    # The queue's bound and the one in each hand, whatever the size of the cache.
    assert max(ahead) <= 4 + 2
    assert max(ahead) <= 4 * chunks_per_block + 2


def test_cancelling_a_handoff_frees_both_sides(pair):
    engine = pair.sender_engine
    prefill = engine.prefill
    started = threading.Event()

    def slow(cache, ids, block_tokens, on_block=None, cancelled=None):
        def paused(block):
            on_block(block)
            started.set()
            time.sleep(0.05)

        prefill(cache, ids, block_tokens, paused, cancelled)

    engine.prefill = slow
    try:
        from cachelink_core.rpc.client import HandoffRequest

        stream = pair.ask_sender.handoff_events(HandoffRequest(TokenIds(LONG), "local"))
        next(stream)
        assert started.wait(5)
        stream.close()
        deadline_s = time.monotonic() + 5.0
        stores = [node.parts.store for node in (pair.sender_node, pair.receiver_node)]
        while any(s.stats().reserved_bytes for s in stores) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    finally:
        del engine.prefill
    assert [store.stats().reserved_bytes for store in stores] == [0, 0]
    assert [store.stats().entries for store in stores] == [0, 0]
    assert engine.model_tokens > 0


def test_two_handoffs_of_one_prefix_share_a_prefill(pair):
    counted = pair.sender_engine.model_tokens
    receipts = []
    threads = [
        threading.Thread(
            target=lambda codec=codec: receipts.append(
                pair.ask_sender.handoff(TokenIds(LONG), "local", codec=codec)
            )
        )
        for codec in ("native", "int8", "int4")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({receipt.cache_id for receipt in receipts}) == 3
    assert pair.sender_engine.model_tokens - counted == len(LONG)


def test_a_restarted_receiver_is_found_again(engines):
    from cachelink_core import errors
    from tests.loopback.nodes import receiver_of, sender_of

    with receiver_of(engines("llama", side="receiver")) as first:
        address = first.addresses["grpc"]
        port = int(address.rpartition(":")[2])
        with sender_of(engines("llama"), {"local": address}) as sender:
            from cachelink_core.rpc.client import SenderClient

            with SenderClient(sender.addresses["grpc"]) as ask:
                ask.handoff(TokenIds(LONG), "local")
                first.stop()
                with pytest.raises(errors.LinkError):
                    ask.handoff(TokenIds(LONG), "local")
                with receiver_of(engines("llama", side="receiver"), listen={"port": port}):
                    receipt = ask.handoff(TokenIds(LONG), "local")
                    assert not receipt.already_installed
                    assert receipt.prefilled_tokens == 0


def test_an_aborted_handoff_does_not_mix_with_the_next(pair):
    """Half of one cache, then another of the same size: nothing of the first is in the second."""
    half = Offer(pair, ids=tuple(5 for _ in LONG))
    half.reserve()
    messages = half.messages()
    from cachelink_core import errors

    with pytest.raises(errors.TruncatedStream):
        half.push(messages[: len(messages) // 2])
    whole = Offer(pair, ids=LONG)
    whole.reserve()
    receipt = whole.push(whole.messages())
    stored = pair.receiver_node.parts.store.find("default", receipt.cache_id)
    fresh = pair.sender_engine.open_cache(len(LONG), 1, whole=True)
    pair.sender_engine.prefill(fresh, LONG, BLOCK_TOKENS)
    import torch

    for layer in range(len(fresh.layers)):
        for kind in ("K", "V"):
            assert torch.equal(
                fresh.tensor(layer, kind, 0, len(LONG)),
                stored.cache.tensor(layer, kind, 0, len(LONG)),
            )


def test_reserving_with_wrong_bytes_leaves_the_channel_usable(pair):
    from cachelink_core import errors

    offer = Offer(pair)
    with TransferClient(pair.receiver.addresses["grpc"]) as client:
        with pytest.raises(errors.ManifestError):
            client.reserve(b"\x81")
        reservation = client.reserve(encode_header(offer.header))
        client.abort(reservation.handoff_id, "done")
