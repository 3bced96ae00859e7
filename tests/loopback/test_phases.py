"""Phases of one clock sum to their total, however short the work is."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cachelink_bench.serial.nodes import serial_receiver_daemon, serial_sender_daemon
from cachelink_core.rpc.client import Document, HeldCache, Question, Sampling
from tests.loopback.nodes import pair_of, tiny_engine

TEXTS = {"a few tokens": "Who?", "some blocks": "The road to Selwick is mended at midsummer. " * 12}
NODES = {
    "overlapped": {},
    "serial": {"make_sender": serial_sender_daemon, "make_receiver": serial_receiver_daemon},
}
ON_THE_SENDER = ("start", "prefill_wait", "reserve", "send", "tail")
ON_THE_RECEIVER = ("load", "install")
OF_AN_ANSWER = ("wait", "queue", "prefix", "prepare", "query_prefill", "decode", "finish")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    engines = [tiny_engine(folder, "llama") for _ in range(2)]
    with ExitStack() as stack:
        yield {name: stack.enter_context(pair_of(*engines, **how)) for name, how in NODES.items()}


def summed(phases, names, total):
    values = [phases.get(name, 0.0) for name in names]
    assert all(value >= 0 for value in values), phases
    assert sum(values) == pytest.approx(total, rel=0.02), phases


def check_handoff(phases):
    summed(phases, ON_THE_SENDER, phases["total"])
    summed(phases, ON_THE_RECEIVER, phases["check"] + phases["tail"])
    assert phases["check"] > 0
    assert phases["allocate"] <= phases["reserve"]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("codec", ["native", "int4+zstd"])
def test_a_handoff(pairs, nodes, text, codec):
    pair = pairs[nodes]
    for stream in (True, False):
        document = Document(TEXTS[text])
        fresh = pair.ask_sender.handoff(document, "local", codec=codec, stream=stream)
        check_handoff(fresh.phases)
        if not stream or nodes == "serial":
            read_s = fresh.phases["start"] + fresh.phases["prefill_wait"]
            assert read_s >= fresh.phases["prefill"]
        again = pair.ask_sender.handoff(document, "local", codec=codec)
        assert again.already_installed
        summed(again.phases, ON_THE_SENDER, again.phases["total"])
        pair.ask_receiver.evict(fresh.cache_id)
        held = HeldCache(fresh.sender_cache_id)
        check_handoff(pair.ask_sender.handoff(held, "local", codec=codec).phases)
        pair.clear()


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer(pairs, text):
    pair = pairs["overlapped"]
    receipt = pair.ask_sender.handoff(Document(TEXTS[text]), "local", codec="native")
    for context in (HeldCache(receipt.cache_id), Document(TEXTS[text])):
        for keep in (False, True):
            answer = pair.ask_receiver.answer(
                context,
                Question("Why?"),
                sampling=Sampling(max_new_tokens=3, ignore_eos=True),
                keep=keep,
            )
            list(answer)
            phases = answer.final.phases
            summed(phases, OF_AN_ANSWER, phases["total"])
            assert phases["device_wait"] <= phases["query_prefill"] + phases["decode"]
    pair.clear()
