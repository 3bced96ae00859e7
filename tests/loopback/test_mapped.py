"""Another model's cache through artifact, two daemons and Answer: a planted pair, so exactness shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from cachelink_core import errors
from cachelink_core.codec_spec import NATIVE, NO_PACKING
from cachelink_core.engine.base import Finish, Sampling
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.mapped_chunks import MappedInstaller
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.rpc.client import HeldCache, TokenIds
from cachelink_core.rpc.client import Sampling as AskSampling
from cachelink_core.testing.planted_pair import analytic_state, plant
from cachelink_core.testing.tiny_models import tiny_model
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer
from cachelink_core.transport.artifact import load_mapper, save_mapper
from cachelink_core.transport.card import GateRecord
from tests.loopback.nodes import BLOCK_TOKENS, pair_of

QUERY = (7, 9, 11)
IDS = tuple(3 + (13 * i * i + i) % 240 for i in range(4 * BLOCK_TOKENS + 3))
TOKENS = 32
D = "cd" * 32


@dataclass
class Planted:
    sender: TransformersEngine
    receiver: TransformersEngine
    mapper: Path
    backward: Path


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def planted(request, tmp_path_factory) -> Planted:
    folder = tmp_path_factory.mktemp(request.param)
    bias = {"key_bias": 30.0} if request.param == "qwen2" else {}
    original = tiny_model(request.param, **bias)
    twin = plant(original, seed=3)
    for name, model in (("original", original), ("twin", twin.model)):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    engines = [
        load_engine(str(folder / name), device="cpu", cache_dir=folder / "cache")
        for name in ("original", "twin")
    ]
    state = analytic_state(twin, engines[0].identity, engines[1].identity)
    save_mapper(folder / "mapper", state)
    card = msgspec.structs.replace(
        state.card, sender=state.card.receiver, receiver=state.card.sender
    )
    save_mapper(folder / "backward", type(state)(card, state.tensors))
    return Planted(*engines, folder / "mapper", folder / "backward")


@pytest.fixture
def mapped_pair(planted):
    config = {"mappers": [str(planted.mapper)], "allow_failed_gate": True}
    with pair_of(planted.sender, planted.receiver, receiver_config=config) as pair:
        yield pair


def in_process(planted: Planted) -> tuple[list[int], object]:
    """The same translation without daemons: the reference that must be met bit for bit."""
    mapper = load_mapper(planted.mapper, dtype=planted.receiver.torch_dtype)
    header = make_header(
        planted.sender, IDS, NATIVE, NO_PACKING,
        sender_epoch=mint_id(), block_tokens=BLOCK_TOKENS, mapper=mapper.card.digest,
    )  # fmt: skip
    own = planted.sender.open_cache(len(IDS), 1, whole=True)
    planted.sender.prefill(own, IDS, BLOCK_TOKENS)
    cache = planted.receiver.open_cache(len(IDS), 64, whole=False)
    encoder = ChunkEncoder(planted.sender, header, own)
    installer = MappedInstaller(planted.receiver, header, cache, mapper)
    for block, run in header.layout.chunks():
        installer.install(block, run, memoryview(b"".join(encoder.encode(block, run))))
    installer.finish()
    return greedy(planted.receiver, cache), cache


def greedy(engine, cache) -> list[int]:
    sampling = Sampling(max_new_tokens=TOKENS, ignore_eos=True)
    for item in engine.answer(cache, IDS, QUERY, sampling):
        if isinstance(item, Finish):
            cache.truncate(len(IDS))
            return list(item.generated_ids)
    raise AssertionError("no end")


def test_a_mapped_handoff_equals_the_translation_in_process(planted, mapped_pair):
    pair = mapped_pair
    expected, cache = in_process(planted)
    counted = planted.receiver.model_tokens
    receipt = pair.ask_sender.handoff(TokenIds(IDS), "local", mapper="any")
    assert receipt.trust == "mapped"
    assert planted.receiver.model_tokens == counted, "the receiver never reads the prefix"
    stored = pair.receiver_node.parts.store.find("default", receipt.cache_id)
    for layer in range(len(stored.cache.layers)):
        for kind in ("K", "V"):
            assert torch.equal(
                stored.cache.tensor(layer, kind, 0, len(IDS)),
                cache.tensor(layer, kind, 0, len(IDS)),
            )
    answer = pair.ask_receiver.answer(
        HeldCache(receipt.cache_id),
        TokenIds(QUERY),
        sampling=AskSampling(max_new_tokens=TOKENS, ignore_eos=True),
    )
    ids = [token for delta in answer for token in delta.token_ids]
    assert ids == expected
    assert answer.final.path == "mapped"
    assert "gate was never run" in answer.final.path_reason
    assert answer.final.model_tokens == len(QUERY) + TOKENS - 1
    assert planted.receiver.model_tokens - counted == len(QUERY) + TOKENS - 1
    native = planted.receiver.open_cache(len(IDS), 64, whole=True)
    planted.receiver.prefill(native, IDS, BLOCK_TOKENS)
    assert greedy(planted.receiver, native) == expected, "the map is exact: same tokens as native"


@pytest.mark.parametrize("codec", ["int8", "int4+zstd"])
def test_a_mapped_cache_travels_quantized_too(planted, mapped_pair, codec):
    receipt = mapped_pair.ask_sender.handoff(TokenIds(IDS), "local", mapper="any", codec=codec)
    assert receipt.trust == "mapped"
    with pytest.raises(errors.InsufficientTrust):
        mapped_pair.ask_receiver.answer(
            HeldCache(receipt.cache_id), TokenIds(QUERY), least_trust="lossy"
        ).text()


def test_without_a_mapper_the_models_are_refused_by_name(planted, mapped_pair):
    with pytest.raises(errors.IdentityMismatch, match="weights_digest"):
        mapped_pair.ask_sender.handoff(TokenIds(IDS), "local")
    with pytest.raises(errors.IncompatiblePeer, match=D):
        mapped_pair.ask_sender.handoff(TokenIds(IDS), "local", mapper=D)


def test_a_mapper_of_the_reverse_direction_does_not_start(planted):
    config = {"mappers": [str(planted.backward)], "allow_failed_gate": True}
    with (
        pytest.raises(errors.ConfigError, match=r"another receiver.*weights_digest"),
        pair_of(planted.sender, planted.receiver, receiver_config=config),
    ):
        pass


def test_a_sender_that_no_mapper_reads_is_refused_by_name(planted):
    config = {"mappers": [str(planted.mapper)], "allow_failed_gate": True}
    with (
        pair_of(planted.receiver, planted.receiver, receiver_config=config) as pair,
        pytest.raises(errors.IdentityMismatch, match=r"sender.weights_digest"),
    ):
        pair.ask_sender.handoff(TokenIds(IDS), "local", mapper="any")


@pytest.mark.parametrize("passed", [True, False])
def test_the_gate_decides(planted, tmp_path, passed):
    from cachelink_core.transport.artifact import load_state

    state = load_state(planted.mapper)
    gate = GateRecord(
        passed=passed, threshold=0.5, tokens=100, text="held out", text_digest=D,
        kl={"own": 0.0, "mapped": 0.1, "mismatched": 3.0, "zeroed": 2.0},
    )  # fmt: skip
    save_mapper(
        tmp_path, type(state)(msgspec.structs.replace(state.card, gate=gate), state.tensors)
    )
    config = {"mappers": [str(tmp_path)]}
    with pair_of(planted.sender, planted.receiver, receiver_config=config) as pair:
        if not passed:
            with pytest.raises(errors.IncompatiblePeer, match=r"FAILED.*allow_failed_gate"):
                pair.ask_sender.handoff(TokenIds(IDS), "local", mapper="any")
            return
        receipt = pair.ask_sender.handoff(TokenIds(IDS), "local", mapper="any")
        answer = pair.ask_receiver.answer(HeldCache(receipt.cache_id), TokenIds(QUERY))
        answer.text()
        assert "gate passed" in answer.final.path_reason


def test_a_changed_byte_of_the_artifact_is_named(planted, tmp_path):
    for source in planted.mapper.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    tensors = tmp_path / "mapper.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-3] ^= 1
    tensors.write_bytes(bytes(data))
    config = {"mappers": [str(tmp_path)], "allow_failed_gate": True}
    with (
        pytest.raises(errors.ChecksumMismatch, match=r"ridge|position0"),
        pair_of(planted.sender, planted.receiver, receiver_config=config),
    ):
        pass


def test_nan_in_a_block_falls_back_to_reading_with_the_reason(planted, mapped_pair):
    pair = mapped_pair
    prefill = planted.sender.prefill

    def poisoned(cache, ids, block_tokens, on_block=None, cancelled=None):
        def poison(block):
            cache.tensor(1, "V", 0, 1).fill_(float("nan"))
            on_block(block)

        prefill(cache, ids, block_tokens, poison, cancelled)

    planted.sender.prefill = poisoned
    try:
        with pytest.raises(errors.CorruptChunk, match="NaN"):
            pair.ask_sender.handoff(TokenIds(IDS), "local", mapper="any")
    finally:
        del planted.sender.prefill
    handoffs = list(pair.receiver_node.transfers._table._ended)
    answer = pair.ask_receiver.answer(
        HeldCache(handoffs[-1]),
        TokenIds(QUERY),
        on_failure="recompute",
        sampling=AskSampling(max_new_tokens=4, ignore_eos=True),
    )
    answer.text()
    assert answer.final.path == "recompute"
    assert "corrupt_chunk" in answer.final.path_reason
    assert "NaN" in answer.final.path_reason


def test_auto_learns_what_translating_costs(mapped_pair):
    sender = mapped_pair.ask_sender
    first = sender.handoff(TokenIds(IDS), "local", codec="auto", mapper="any")
    assert (first.trust, first.plan.chosen) == ("mapped", "mapped:native")
    assert "nothing to predict from yet" in first.plan.why
    names = {reading.name for reading in sender.ping().measurements}
    assert {"local/map_token", "local/link"} <= names
    second = sender.handoff(TokenIds(IDS[:-5]), "local", codec="auto", mapper="any")
    predicted = {each.way: each for each in second.plan.predictions}
    assert predicted["mapped:int4"].parts["map"] > 0.0
    assert predicted["text"].total_s is None  # the receiver's model has read nothing yet
    assert second.trust == "mapped"
    with pytest.raises(errors.InsufficientTrust, match="trust is mapped, asked for lossy"):
        sender.handoff(TokenIds(IDS), "local", codec="native", mapper="any", least_trust="lossy")
