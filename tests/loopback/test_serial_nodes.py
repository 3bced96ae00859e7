"""The serial nodes move the same cache as the shipped ones, but one stage after another."""

from __future__ import annotations

import pytest

from cachelink_bench.serial.__main__ import main
from cachelink_bench.serial.nodes import serial_receiver_daemon, serial_sender_daemon
from cachelink_bench.serial.versions import is_serial
from cachelink_core.errors import ChecksumMismatch
from cachelink_core.rpc.client import Document, HeldCache, Question, Sampling
from tests.loopback.nodes import pair_of, tiny_engine
from tests.loopback.offers import Offer

TEXT = "The harbour pilot of Pelmouth keeps nine brass lamps in a shed with a green door. " * 12


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    return tiny_engine(folder, "llama"), tiny_engine(folder, "llama")


@pytest.fixture(scope="module")
def serial(engines):
    makes = {"make_sender": serial_sender_daemon, "make_receiver": serial_receiver_daemon}
    with pair_of(*engines, **makes) as pair:
        yield pair


@pytest.fixture(scope="module")
def shipped(engines):
    with pair_of(*engines) as pair:
        yield pair


def handed_over(pair, codec):
    receipt = pair.ask_sender.handoff(Document(TEXT), "local", codec=codec, stream=True)
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    with pair.ask_receiver.answer(
        HeldCache(receipt.cache_id), Question("Who?"), sampling=sampling
    ) as answer:
        ids = [token for delta in answer for token in delta.token_ids]
    pair.clear()
    return receipt, ids


@pytest.mark.parametrize("codec", ["native", "native+zstd", "int8", "int4+zstd"])
def test_no_stage_begins_before_the_last_one_ended(serial, shipped, codec):
    receipt, ids = handed_over(serial, codec)
    usual, usual_ids = handed_over(shipped, codec)
    assert ids == usual_ids
    assert receipt.wire_bytes == usual.wire_bytes
    times = receipt.timeline
    assert len(times.sent_at_s) > 10
    assert max(times.prefilled_at_s) <= 0.0  # the reservation came after it
    assert max(times.encoded_at_s) <= min(times.sent_at_s)
    phases = receipt.phases
    # Nothing was verified or decoded before the last frame: the receiver's tail has all of it.
    assert phases["load_busy"] <= phases["load"] <= phases["tail"] + 0.01
    # A test that can fail: the shipped sender encodes while it sends.
    assert max(usual.timeline.encoded_at_s) > min(usual.timeline.sent_at_s)


def test_a_chunk_that_is_damaged_is_found_at_the_commit_and_nothing_stays(serial):
    offer = Offer(serial)
    offer.reserve()
    first, second, *rest = offer.messages()
    damaged = second[:-1] + bytes([second[-1] ^ 1])
    with pytest.raises(ChecksumMismatch):
        offer.push([first, damaged, *rest])
    listed = serial.ask_receiver.caches()
    assert listed.caches == ()
    assert listed.reserved_bytes == 0


def test_they_say_what_they_are(serial, shipped):
    for client in (serial.ask_sender, serial.ask_receiver):
        assert is_serial(client.ping().version)
    for client in (shipped.ask_sender, shipped.ask_receiver):
        assert not is_serial(client.ping().version)


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["both"], 2), (["--help"], 0)])
def test_a_role_is_needed(capsys, argv, status):
    assert main(argv) == status
    assert "sender|receiver" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_the_options_are_those_of_the_daemons(capsys, role):
    with pytest.raises(SystemExit, match="0"):
        main([role, "--print-config"])
    assert "link_rate" in capsys.readouterr().out or role == "receiver"
