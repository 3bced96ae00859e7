"""Captured caches between lives of a sender: read back bit for bit, never trusted, within a budget."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import pytest
import torch

from cachelink_core.errors import ConfigError
from cachelink_core.rpc.client import HeldCache, ReceiverClient, Sampling, SenderClient, TokenIds
from cachelink_sender.captures import Captures
from tests.loopback.nodes import BLOCK_TOKENS, receiver_of, sender_of

IDS = tuple(4 + (29 * i) % 230 for i in range(5 * BLOCK_TOKENS + 3))


@pytest.fixture(scope="module")
def receiver(engines):
    with receiver_of(engines("llama", side="receiver")) as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def empty(receiver):
    yield
    with ReceiverClient(receiver.addresses["grpc"]) as client:
        for cache in client.caches().caches:
            client.evict(cache.cache_id)


@contextmanager
def life(engines, receiver, folder, family="llama", **config):
    """One life of a sender, with its client."""
    config = {"capture_dir": folder, **config}
    with (
        sender_of(engines(family), {"local": receiver.addresses["grpc"]}, **config) as sender,
        SenderClient(sender.addresses["grpc"]) as client,
    ):
        yield sender, client


def files(folder) -> list:
    return sorted(folder.rglob("*.safetensors"))


def test_a_prefix_is_read_once_in_two_lives(engines, receiver, tmp_path):
    engine = engines("llama")
    with life(engines, receiver, tmp_path) as (_, client):
        receipt = client.prefill(TokenIds(IDS))
        assert (receipt.prefix_origin, receipt.prefilled_tokens) == ("prefilled", len(IDS))
        assert len(files(tmp_path)) == 1  # there when the receipt is
        again = client.handoff(TokenIds(IDS), "local")
        assert (again.prefix_origin, again.prefilled_tokens) == ("held", 0)
        theirs = tensors(receiver.node, again.cache_id)
        receiver.node.parts.store.evict("default", again.cache_id)
    counted = engine.model_tokens
    with life(engines, receiver, tmp_path) as (sender, client):
        counted = engine.model_tokens  # the self-check reads too
        handed = client.handoff(TokenIds(IDS), "local")
        assert (handed.prefix_origin, handed.prefilled_tokens) == ("captured", 0)
        assert handed.phases["prefill"] == 0
        assert engine.model_tokens == counted
        assert_equal(tensors(sender.node, handed.sender_cache_id), theirs)
        assert_equal(tensors(receiver.node, handed.cache_id), theirs)
        held = client.prefill(TokenIds(IDS))
        assert held.prefix_origin == "held"


def tensors(node, cache_id: str) -> list[torch.Tensor]:
    stored = node.parts.store.find("default", cache_id)
    return [
        stored.cache.tensor(layer, kind, stored.cache.first_token(layer), len(IDS)).clone()
        for layer in range(len(stored.cache.layers))
        for kind in ("K", "V")
    ]


def assert_equal(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_answer_from_a_captured_cache_is_the_same(engines, receiver, tmp_path, family):
    """Of a model with sliding layers too, of which the file holds the windows alone."""

    def answer(client):
        said = client.answer(
            HeldCache(client.prefill(TokenIds(IDS)).cache_id),
            TokenIds((7, 9, 11)),
            sampling=Sampling(max_new_tokens=12, ignore_eos=True),
        )
        return [token for delta in said for token in delta.token_ids], said.final

    with life(engines, receiver, tmp_path, family) as (_, client):
        first, _ = answer(client)
    with life(engines, receiver, tmp_path, family) as (_, client):
        second, final = answer(client)
        assert final.path == "exact"
        longer = client.prefill(TokenIds((*IDS, 9, 9)))  # a captured beginning is grown like any
        assert longer.prefilled_tokens == 2
    assert first == second


def test_a_damaged_file_is_named_and_the_prefix_read_again(engines, receiver, tmp_path, caplog):
    with life(engines, receiver, tmp_path) as (_, client):
        whole = client.prefill(TokenIds(IDS))
        expected = tensors_of_life(client, whole, receiver)
    (path,) = files(tmp_path)
    good = path.read_bytes()
    for damaged in (changed(good, len(good) // 2), good[: len(good) // 2], b"", b"no cache"):
        path.write_bytes(damaged)
        receiver.node.parts.store.close()
        caplog.clear()
        with life(engines, receiver, tmp_path) as (_, client):
            receipt = client.prefill(TokenIds(IDS))
            assert (receipt.prefix_origin, receipt.prefilled_tokens) == ("prefilled", len(IDS))
            assert_equal(tensors_of_life(client, receipt, receiver), expected)
        assert path.name in caplog.text
        assert restored(path, engines)


def tensors_of_life(client, receipt, receiver) -> list[torch.Tensor]:
    handed = client.handoff(HeldCache(receipt.sender_cache_id), "local")
    return tensors(receiver.node, handed.cache_id)


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def restored(path, engines) -> bool:
    """Whether the file was written anew and verifies."""
    engine = engines("llama")
    captures = Captures(path.parents[1], 10**9, engine=engine, block_tokens=BLOCK_TOKENS)
    return captures.restore(path.stem, IDS, engine.open_cache(len(IDS), 0, whole=True))


def test_another_models_files_are_neither_read_nor_touched(engines, receiver, tmp_path):
    with life(engines, receiver, tmp_path, "qwen3") as (_, client):
        client.prefill(TokenIds(IDS))
    (theirs,) = files(tmp_path)
    stranger = tmp_path / "notes.safetensors"
    stranger.write_bytes(b"not ours")
    before = theirs.read_bytes()
    with life(engines, receiver, tmp_path) as (_, client):
        receipt = client.prefill(TokenIds(IDS))
        assert receipt.prefix_origin == "prefilled"
    assert theirs.read_bytes() == before
    assert stranger.read_bytes() == b"not ours"
    assert len(files(tmp_path)) == 3


def test_a_file_under_another_name_is_not_taken_for_its_cache(engines, receiver, tmp_path, caplog):
    other = (*IDS[:-1], 9)
    with life(engines, receiver, tmp_path) as (_, client):
        client.prefill(TokenIds(IDS))
        (path,) = files(tmp_path)
        name = client.prefill(TokenIds(other)).cache_id
    path.replace(path.with_name(f"{name}.safetensors"))
    with life(engines, receiver, tmp_path) as (_, client):
        receipt = client.prefill(TokenIds(other))
        assert receipt.prefilled_tokens == len(IDS)
    assert "its token_ids is" in caplog.text


def test_the_budget_holds_and_the_longest_unused_goes(engines, receiver, tmp_path):
    prefixes = [(first, *IDS) for first in (5, 6, 7, 8)]
    with life(engines, receiver, tmp_path / "measure") as (_, client):
        client.prefill(TokenIds(prefixes[0]))
    (one,) = files(tmp_path / "measure")
    budget = int(2.9 * one.stat().st_size)
    folder = tmp_path / "captures"
    with life(engines, receiver, folder, capture_budget=str(budget)) as (_, client):
        names = []
        for age, prefix in enumerate(prefixes[:2]):
            names.append(client.prefill(TokenIds(prefix)).cache_id)
            os.utime(path_of(folder, names[-1]), (1000 + age, 1000 + age))
    with life(engines, receiver, folder, capture_budget=str(budget)) as (_, client):
        assert client.prefill(TokenIds(prefixes[0])).prefix_origin == "captured"
        names.append(client.prefill(TokenIds(prefixes[2])).cache_id)
        assert sum(path.stat().st_size for path in files(folder)) <= budget
        assert not path_of(folder, names[1]).exists()  # the first was used since
        assert path_of(folder, names[0]).exists()
        assert path_of(folder, names[2]).exists()
    with life(engines, receiver, tmp_path / "none", capture_budget="1kB") as (_, client):
        client.prefill(TokenIds(IDS))
        assert files(tmp_path / "none") == []


def path_of(folder, name: str):
    (below,) = (path for path in folder.iterdir() if path.is_dir())
    return below / f"{name}.safetensors"


def test_what_a_killed_process_left_half_written_is_removed_later(engines, tmp_path):
    def captures():
        return Captures(tmp_path, 10**9, engine=engines("llama"), block_tokens=BLOCK_TOKENS)

    torn = captures().folder / ".0123.safetensors.abc"
    torn.write_bytes(b"half")
    captures()
    assert torn.exists()  # perhaps another process is writing it
    os.utime(torn, (0, time.time() - 7200))
    captures()
    assert not torn.exists()


def test_a_streaming_handoff_is_captured_before_the_sender_ends(engines, receiver, tmp_path):
    with life(engines, receiver, tmp_path) as (_, client):
        client.handoff(TokenIds(IDS), "local")
    assert len(files(tmp_path)) == 1


def test_tenants_do_not_share_captures(engines, receiver, tmp_path):
    tokens = {name: {"value": name * 4} for name in ("alice", "robert")}
    with life(engines, receiver, tmp_path, auth={"tokens": tokens}) as (sender, _):
        address = sender.addresses["grpc"]
        with SenderClient(address, token="alice" * 4) as alice:
            alice.prefill(TokenIds(IDS))
    with life(engines, receiver, tmp_path, auth={"tokens": tokens}) as (sender, _):
        address = sender.addresses["grpc"]
        with SenderClient(address, token="robert" * 4) as robert:
            assert robert.prefill(TokenIds(IDS)).prefix_origin == "prefilled"
        with SenderClient(address, token="alice" * 4) as alice:
            assert alice.prefill(TokenIds(IDS)).prefix_origin == "captured"


def test_a_folder_that_cannot_be_made_is_a_config_error(engines, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"capture_dir is .*file/below"):
        Captures(tmp_path / "file" / "below", 1, engine=engines("llama"), block_tokens=16)


def test_without_the_option_nothing_is_written(engines, receiver, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with life(engines, receiver, None) as (_, client):
        client.prefill(TokenIds(IDS))
    assert list(tmp_path.rglob("*")) == []
