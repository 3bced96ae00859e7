"""Staged copies: the same bytes as plain ones, and never read before they are waited for.

``HostStaging`` runs at once, ``DelayedStaging`` only when somebody waits; a device is in between.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cachelink_core.codec_spec import CODECS, NO_PACKING, ZSTD
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.mapped_chunks import MappedInstaller
from cachelink_core.engine.staging import HostStaging, Ring, staging_for
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import CorruptChunk, InvalidRequest
from cachelink_core.testing.delayed_staging import NOT_YET, DelayedStaging
from cachelink_core.testing.planted_pair import analytic_state
from cachelink_core.testing.tiny_engines import tiny_engine
from cachelink_core.transport.mapper import Mapper
from tests.models.fit_pairs import planted_engines
from tests.models.staged_handoffs import one_run_a_tensor, wires

TOKENS, BLOCK = 150, 64
IDS = tuple(4 + (7 * i) % 250 for i in range(TOKENS))
STAGINGS = {
    "at once": HostStaging,
    "late": DelayedStaging,
    "late, one buffer": lambda: DelayedStaging(slots=1, blocks_ahead=0),
    "late, many buffers": lambda: DelayedStaging(slots=7, blocks_ahead=3),
}


def staged(engine: TransformersEngine, make) -> TransformersEngine:
    """The same model behind another staging."""
    return TransformersEngine(
        engine.model, engine.tokens, engine.identity, engine.rope, staging=lambda _device: make()
    )


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral"])
def sender(request):
    """An engine with a filled cache; the last family has sliding layers."""
    engine = tiny_engine(request.param, dtype=torch.bfloat16)
    cache = engine.open_cache(TOKENS, 0, whole=True)
    engine.prefill(cache, IDS, BLOCK)
    cache.use_window()
    return engine, cache


def header_of(engine, *args, **kwargs):
    return one_run_a_tensor(engine, IDS, BLOCK, *args, **kwargs)


def install(engine, header, chunks, cache):
    installer = ChunkInstaller(engine, header, cache)
    for index, wire in chunks.items():
        # In memory that is used again at once, as a receive buffer is.
        buffer = bytearray(wire)
        installer.install(*index, memoryview(buffer))
        buffer[:] = bytes(len(buffer))
    return installer


def assert_same(ours, theirs):
    for layer in range(len(ours.layers)):
        first = max(ours.first_token(layer), theirs.first_token(layer))
        for kind in ("K", "V"):
            left, right = (c.tensor(layer, kind, first, TOKENS) for c in (ours, theirs))
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), (layer, kind)


@pytest.mark.parametrize("make", STAGINGS.values(), ids=STAGINGS)
@pytest.mark.parametrize("packing", [NO_PACKING, ZSTD], ids=["plain", "zstd"])
@pytest.mark.parametrize("codec", CODECS)
def test_staged_equals_plain_bit_for_bit(sender, codec, packing, make):
    engine, cache = sender
    other, header = staged(engine, make), header_of(engine, codec, packing)
    expected = wires(engine, header, cache)
    assert wires(other, header, cache) == expected
    plain = engine.open_cache(TOKENS, 8, whole=False)
    install(engine, header, expected, plain).finish()
    arrived = engine.open_cache(TOKENS, 8, whole=False)
    install(other, header, expected, arrived).finish()
    assert arrived.length == TOKENS
    assert_same(arrived, plain)


def test_nothing_arrives_before_it_is_waited_for(sender):
    engine, cache = sender
    header = header_of(engine)
    made: list[DelayedStaging] = []

    def make():
        made.append(DelayedStaging(slots=2))
        return made[-1]

    arrived = engine.open_cache(TOKENS, 8, whole=False)
    installer = install(staged(engine, make), header, wires(engine, header, cache), arrived)
    (staging,) = made
    assert staging.pending > 0
    assert arrived.length == 0
    with pytest.raises(AssertionError):
        assert_same(arrived, cache)
    installer.finish()
    assert staging.pending == 0
    assert_same(arrived, cache)


def test_chunks_may_be_asked_for_again_and_out_of_order(sender):
    engine, cache = sender
    header = header_of(engine, "int8")
    expected = wires(engine, header, cache)
    encoder = ChunkEncoder(staged(engine, DelayedStaging), header, cache)
    order = [*header.layout.chunks()]
    for index in (order[-1], order[0], order[0], *reversed(order), *order):
        assert b"".join(encoder.encode(*index)) == expected[index]


def test_a_block_is_never_read_before_it_is_asked_for():
    engine = tiny_engine("llama")
    header = header_of(engine)
    cache = engine.open_cache(TOKENS, 0, whole=True)
    encoder = ChunkEncoder(staged(engine, lambda: DelayedStaging(slots=64)), header, cache)
    sent = {}

    def on_block(block):
        for index in header.layout.block_chunks(block):
            sent[index] = b"".join(encoder.encode(*index))

    engine.prefill(cache, IDS, BLOCK, on_block=on_block)
    assert sent == wires(engine, header, cache)


@pytest.mark.parametrize("make", STAGINGS.values(), ids=STAGINGS)
def test_what_cannot_be_decoded_is_refused_before_it_is_queued(sender, make):
    engine, cache = sender
    header = header_of(engine, "int8")
    chunks = wires(engine, header, cache)
    index = [*chunks][-1]  # values are quantized from few tokens on
    installer = ChunkInstaller(
        staged(engine, make), header, engine.open_cache(TOKENS, 8, whole=False)
    )
    with pytest.raises(CorruptChunk, match="scale"):
        installer.install(*index, memoryview(b"\xff" * len(chunks[index])))
    with pytest.raises(CorruptChunk, match="bytes"):
        installer.install(*index, memoryview(chunks[index])[:-1])


def test_what_cannot_be_encoded_is_refused():
    engine = tiny_engine("llama", dtype=torch.bfloat16)
    cache = engine.open_cache(TOKENS, 0, whole=True)
    cache.tensor(1, "V", 20, 21)[0, 0, 0] = torch.inf
    header = header_of(engine, "int4")
    for make in STAGINGS.values():
        with pytest.raises(InvalidRequest, match=r"layer 1 V .* codec native can"):
            wires(staged(engine, make), header, cache)


class Mapped:
    """A planted pair with the sender's chunks."""

    def __init__(self, codec):
        self.sender, self.receiver, twin = planted_engines("llama", torch.float32)
        state = analytic_state(twin, self.sender.identity, self.receiver.identity)
        self.mapper = Mapper.place(state, dtype=torch.float32)
        self.source = self.sender.open_cache(TOKENS, 0, whole=True)
        self.sender.prefill(self.source, IDS, BLOCK)
        self.header = header_of(self.sender, codec, mapper="any")

    def installed(self, engine, chunks):
        cache = self.receiver.open_cache(TOKENS, 8, whole=False)
        installer = MappedInstaller(engine, self.header, cache, self.mapper)
        for index, wire in chunks.items():
            installer.install(*index, memoryview(wire))
        installer.finish()
        return cache


@pytest.mark.parametrize("make", STAGINGS.values(), ids=STAGINGS)
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_a_translation_is_the_same_bit_for_bit(codec, make):
    pair = Mapped(codec)
    chunks = wires(pair.sender, pair.header, pair.source)
    expected = pair.installed(pair.receiver, chunks)
    assert_same(pair.installed(staged(pair.receiver, make), chunks), expected)


@pytest.mark.parametrize("make", STAGINGS.values(), ids=STAGINGS)
@pytest.mark.parametrize("position", [3, TOKENS - 1], ids=["first block", "last block"])
def test_a_translated_block_with_nan_never_gets_through(position, make):
    pair = Mapped("native")
    pair.source.tensor(0, "V", position, position + 1)[0, 0, 0] = torch.nan
    chunks = wires(pair.sender, pair.header, pair.source)
    with pytest.raises(CorruptChunk, match="layer 0 V holds NaN"):
        pair.installed(staged(pair.receiver, make), chunks)


def test_a_ring_waits_for_the_buffer_that_it_uses_again():
    waited = []

    class Busy:
        def __init__(self, number):
            self.number = number

        def wait(self):
            waited.append(self.number)

    allocated = []
    ring = Ring(
        2, lambda nbytes: allocated.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8)
    )
    for number, nbytes in enumerate((10, 10, 8, 20, 20)):
        slot = ring.take(nbytes)
        assert slot.buffer.numel() >= nbytes
        slot.busy = Busy(number)
    assert waited == [0, 1, 2]
    assert allocated == [10, 10, 20, 20]


def test_a_delayed_copy_shows_who_does_not_wait():
    staging = DelayedStaging(slots=1)
    sent = np.arange(8, dtype=np.uint8)
    upload = staging.upload(sent)
    sent[:] = 0  # the caller's memory is free at once
    seen = []
    staging.run(lambda: seen.append(upload.tensor().clone()))
    assert seen == []
    staging.mark().wait()
    assert seen[0].tolist() == list(range(8))

    source = torch.zeros(4, dtype=torch.uint8)
    download = staging.download(4, lambda: [source])
    early = download.buffer.tolist()
    source += 1
    assert early == [NOT_YET] * 4
    assert download.wait().tolist() == [1] * 4


def test_a_cpu_needs_no_staging():
    assert staging_for(torch.device("cpu")) is None
    assert isinstance(staging_for(torch.device("meta")), HostStaging)
