"""Chunks of another model's cache, installed through a mapper."""

import msgspec
import pytest
import torch

from cachelink_core.codec_spec import INT8, NATIVE, NO_PACKING, ZSTD
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.engine.mapped_chunks import MappedInstaller
from cachelink_core.engine.offer import make_header
from cachelink_core.errors import CorruptChunk, IdentityMismatch, UnexpectedChunk
from cachelink_core.layout import Run
from cachelink_core.testing.planted_pair import analytic_state
from cachelink_core.testing.tiny_engines import tiny_engine
from cachelink_core.transport.card import Card, LayerFit
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.state import MapperState, expected_shapes
from tests.models.fit_pairs import planted_engines

BLOCK, TOKENS = 32, 90
GREEDY = Sampling(max_new_tokens=8, ignore_eos=True)
IDS = tuple(4 + (7 * i) % 260 for i in range(TOKENS))


class Handoff:
    """A sender's filled cache and a receiver that maps it."""

    def __init__(self, family="llama", *, codec=NATIVE, packing=NO_PACKING, dtype=torch.float32):
        self.sender, self.receiver, twin = planted_engines(family, dtype)
        state = analytic_state(twin, self.sender.identity, self.receiver.identity)
        self.mapper = Mapper.place(state, dtype=dtype)
        self.source = self.sender.open_cache(TOKENS, 0, whole=True)
        self.sender.prefill(self.source, IDS, BLOCK)
        self.header = make_header(
            self.sender, IDS, codec, packing, sender_epoch="e", block_tokens=BLOCK, mapper="any"
        )
        self.header = _in_runs(self.header)
        self.encoder = ChunkEncoder(self.sender, self.header, self.source)
        self.cache = self.receiver.open_cache(TOKENS, 64, whole=False)
        self.installer = MappedInstaller(self.receiver, self.header, self.cache, self.mapper)

    def payload(self, block, run):
        return memoryview(b"".join(self.encoder.encode(block, run)))

    def install_all(self):
        for block, run in self.header.layout.chunks():
            self.installer.install(block, run, self.payload(block, run))
        self.installer.finish()


def _in_runs(header):
    """The same header with one run a layer, so that a block takes several chunks."""
    layers = len(header.identity.layers)
    return msgspec.structs.replace(
        header, runs=tuple(Run(2 * i, 2, 0, header.block_tokens) for i in range(layers))
    )


def in_process(handoff):
    """The receiver's cache by one call of the mapper, without chunks."""
    cache = handoff.receiver.open_cache(TOKENS, 64, whole=False)
    layers = range(len(handoff.sender.identity.layers))
    keys = [
        handoff.sender.to_content(i, handoff.source.tensor(i, "K", 0, TOKENS), 0) for i in layers
    ]
    values = [handoff.source.tensor(i, "V", 0, TOKENS) for i in layers]
    for layer, key, value in handoff.mapper.map_block(keys, values, 0, IDS):
        handoff.receiver.rotate_into(layer, key, 0, cache.tensor(layer, "K", 0, TOKENS))
        cache.tensor(layer, "V", 0, TOKENS).copy_(value)
    cache.set_length(TOKENS)
    return cache


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("packing", [NO_PACKING, ZSTD])
def test_installed_in_blocks_equals_mapped_in_one_call_bit_for_bit(family, packing):
    handoff = Handoff(family, packing=packing)
    handoff.install_all()
    expected = in_process(handoff)
    for layer in range(len(handoff.cache.layers)):
        for kind in ("K", "V"):
            ours = handoff.cache.tensor(layer, kind, 0, TOKENS)
            assert torch.equal(ours, expected.tensor(layer, kind, 0, TOKENS)), (layer, kind)
    times = handoff.installer.times
    assert times.map_s > 0
    assert times.decode_s > 0
    assert times.transform_s > 0


@pytest.mark.parametrize("codec", [NATIVE, INT8])
def test_the_receiver_answers_without_reading_the_prefix(codec):
    handoff = Handoff(codec=codec)
    handoff.install_all()
    native = handoff.receiver.open_cache(TOKENS, 64, whole=True)
    handoff.receiver.prefill(native, IDS, BLOCK)
    query = (40, 41, 42)
    expected = list(handoff.receiver.generate_steps(native, IDS, query, GREEDY))
    before = handoff.receiver.model_tokens
    found = list(handoff.receiver.generate_steps(handoff.cache, IDS, query, GREEDY))
    assert handoff.receiver.model_tokens - before == len(query) + 8 - 1
    close = 1e-4 if codec is NATIVE else 0.5
    assert (found[0].logits - expected[0].logits).abs().max() < close
    if codec is NATIVE:
        assert [s.token_id for s in found] == [s.token_id for s in expected]


def test_a_bf16_pair_is_mapped_with_one_cast():
    handoff = Handoff(dtype=torch.bfloat16)
    handoff.install_all()
    native = handoff.receiver.open_cache(TOKENS, 64, whole=True)
    handoff.receiver.prefill(native, IDS, BLOCK)
    for layer in range(len(native.layers)):
        for kind in ("K", "V"):
            ours = handoff.cache.tensor(layer, kind, 0, TOKENS).float()
            theirs = native.tensor(layer, kind, 0, TOKENS).float()
            assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_runs_of_a_block_may_come_in_any_order_but_blocks_may_not():
    handoff = Handoff()
    for run in (2, 0):
        handoff.installer.install(0, run, handoff.payload(0, run))
    with pytest.raises(UnexpectedChunk, match="block 1 came while block 0 lacks 1"):
        handoff.installer.install(1, 0, handoff.payload(1, 0))
    with pytest.raises(UnexpectedChunk, match=r"\(0, 2\) is in the open block already"):
        handoff.installer.install(0, 2, handoff.payload(0, 2))
    with pytest.raises(CorruptChunk, match=r"block 0 lacks runs \[1\]"):
        handoff.installer.finish()
    handoff.installer.install(0, 1, handoff.payload(0, 1))
    handoff.installer.install(1, 0, handoff.payload(1, 0))


@pytest.mark.parametrize("kind", ["K", "V"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_a_block_is_named_so_that_the_caller_can_read_again(kind, value):
    handoff = Handoff()
    handoff.source.tensor(1, kind, 40, 41)[0, 0, 3] = value
    with pytest.raises(CorruptChunk, match=rf"\[32, 64\): layer 1 {kind} holds NaN or infinity"):
        handoff.install_all()


def test_a_translation_that_overflows_is_named():
    handoff = Handoff()
    handoff.source.tensor(1, "V", 40, 41).fill_(3e38)
    with pytest.raises(CorruptChunk, match="block 1: its translation holds NaN or infinity"):
        handoff.install_all()


def test_a_mapper_of_other_models_is_refused():
    handoff, other = Handoff(), Handoff("qwen2")
    with pytest.raises(IdentityMismatch, match=r"sender\.architecture"):
        MappedInstaller(handoff.receiver, handoff.header, handoff.cache, other.mapper)


def test_sliding_layers_of_the_receiver_get_their_window_only():
    sender, receiver = tiny_engine("llama"), tiny_engine("gemma3")
    geometry = receiver.identity.layers
    assert {layer.attention for layer in geometry} == {"full", "sliding"}
    card = Card(
        sender=sender.identity,
        receiver=receiver.identity,
        layers=(LayerFit(sources=(0, 2)),) * len(geometry),
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) / 8 for n, s in expected_shapes(card)}
    mapper = Mapper.place(MapperState(card, tensors), dtype=torch.float32)
    header = make_header(
        sender, IDS, NATIVE, NO_PACKING, sender_epoch="e", block_tokens=BLOCK, mapper="any"
    )
    source = sender.open_cache(TOKENS, 0, whole=True)
    sender.prefill(source, IDS, BLOCK)
    encoder = ChunkEncoder(sender, header, source)
    caches = [receiver.open_cache(TOKENS, 8, whole=whole) for whole in (True, False)]
    for cache in caches:
        installer = MappedInstaller(receiver, header, cache, mapper)
        for block, run in header.layout.chunks():
            installer.install(block, run, memoryview(b"".join(encoder.encode(block, run))))
        installer.finish()
    for layer, shape in enumerate(geometry):
        first = shape.first_token(TOKENS)
        assert caches[1].first_token(layer) == first
        for kind in ("K", "V"):
            ours, theirs = (cache.tensor(layer, kind, first, TOKENS) for cache in caches)
            assert torch.equal(ours, theirs)
            assert ours.abs().sum() > 0
