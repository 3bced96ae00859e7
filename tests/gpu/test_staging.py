"""The device path: staged copies give the bytes of plain ones, overlap forwards, and leave nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from cachelink_core.codec_spec import CODECS, NO_PACKING, ZSTD
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.cuda_staging import streams
from cachelink_core.engine.mapped_chunks import MappedInstaller
from cachelink_core.engine.staging import HostStaging, staging_for
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.planted_pair import analytic_state
from cachelink_core.testing.tiny_engines import tiny_engine
from cachelink_core.transport.mapper import Mapper
from tests.models.fit_pairs import planted_engines
from tests.models.staged_handoffs import one_run_a_tensor, wires

DEVICE = torch.device("cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS, BLOCK = 600, 128
IDS = tuple(4 + (7 * i) % 250 for i in range(TOKENS))
GREEDY = Sampling(max_new_tokens=16, ignore_eos=True)
MIB = 2**20


def on_device(engine, staging=staging_for):
    """The same model on the device."""
    model = engine.model.to(DEVICE)
    return TransformersEngine(
        model, engine.tokens, engine.identity, KeyRope.probe(model), staging=staging
    )


def plain(engine):
    """The same model, its chunks copied at once on the current stream."""
    return TransformersEngine(
        engine.model, engine.tokens, engine.identity, engine.rope, staging=HostStaging
    )


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral"])
def sender(request):
    engine = on_device(tiny_engine(request.param, dtype=torch.bfloat16))
    cache = engine.open_cache(TOKENS, 0, whole=True)
    engine.prefill(cache, IDS, BLOCK)
    cache.use_window()
    return engine, cache


def header_of(engine, *args, **kwargs):
    return one_run_a_tensor(engine, IDS, BLOCK, *args, **kwargs)


def installed(engine, header, chunks):
    cache = engine.open_cache(TOKENS, 64, whole=False)
    installer = ChunkInstaller(engine, header, cache)
    for index, wire in chunks.items():
        installer.install(*index, memoryview(wire))
    installer.finish()
    return cache


def assert_same(ours, theirs):
    for layer in range(len(ours.layers)):
        first = max(ours.first_token(layer), theirs.first_token(layer))
        for kind in ("K", "V"):
            left, right = (c.tensor(layer, kind, first, TOKENS) for c in (ours, theirs))
            assert torch.equal(left, right), (layer, kind)


@pytest.mark.parametrize("packing", [NO_PACKING, ZSTD], ids=["plain", "zstd"])
@pytest.mark.parametrize("codec", CODECS)
def test_staged_equals_plain_bit_for_bit(sender, codec, packing):
    engine, cache = sender
    header = header_of(engine, codec, packing)
    expected = wires(plain(engine), header, cache)
    assert wires(engine, header, cache) == expected
    arrived = installed(engine, header, expected)
    assert_same(arrived, installed(plain(engine), header, expected))
    if codec == "native":
        assert_same(arrived, cache)
        steps = [
            [s.logits for s in engine.generate_steps(c.copy(TOKENS, 64), IDS, (5, 9, 2), GREEDY)]
            for c in (arrived, cache)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_blocks_downloaded_during_the_prefill_are_those_of_a_finished_cache(sender):
    engine, finished = sender
    header = header_of(engine)
    expected = wires(engine, header, finished)
    for _ in range(5):
        cache = engine.open_cache(TOKENS, 0, whole=True)
        encoder = ChunkEncoder(engine, header, cache)
        ready = [threading.Event() for _ in range(header.layout.block_count)]
        thread = threading.Thread(
            target=engine.prefill,
            args=(cache, IDS, BLOCK),
            kwargs={"on_block": lambda block: ready[block].set()},  # noqa: B023 - joined below
        )
        thread.start()
        sent = {}
        for index in header.layout.chunks():
            assert ready[index[0]].wait(60)
            sent[index] = b"".join(encoder.encode(*index))
        thread.join()
        assert sent == expected


def test_an_install_beside_answers_changes_neither(sender):
    engine, cache = sender
    header = header_of(engine, "int8")
    chunks = wires(engine, header, cache)
    expected = installed(engine, header, chunks)

    def answer():
        steps = engine.generate_steps(cache.copy(TOKENS, 64), IDS, (5, 9, 2), GREEDY)
        return [step.token_id for step in steps]

    alone, beside = answer(), []
    thread = threading.Thread(target=lambda: beside.extend(answer() for _ in range(5)))
    thread.start()
    while thread.is_alive():
        assert_same(installed(engine, header, chunks), expected)
    thread.join()
    assert beside == [alone] * 5


@pytest.mark.parametrize("codec", ["native", "int8"])
def test_a_translation_is_that_of_plain_copies_bit_for_bit(codec):
    sender, receiver, twin = planted_engines("llama", torch.float32)
    state = analytic_state(twin, sender.identity, receiver.identity)
    source = sender.open_cache(TOKENS, 0, whole=True)
    sender.prefill(source, IDS, BLOCK)
    header = header_of(sender, codec, mapper="any")
    chunks = wires(sender, header, source)
    target = on_device(receiver)
    mapper = Mapper.place(state, device=DEVICE, dtype=torch.float32)
    caches = []
    for engine in (target, plain(target)):
        cache = engine.open_cache(TOKENS, 64, whole=False)
        installer = MappedInstaller(engine, header, cache, mapper)
        for index, wire in chunks.items():
            installer.install(*index, memoryview(wire))
        installer.finish()
        caches.append(cache)
    assert_same(*caches)


def test_streams_and_buffers_do_not_leak(sender):
    engine, cache = sender
    header = header_of(engine, "int8")
    chunks = wires(engine, header, cache)
    before = torch.cuda.current_stream(DEVICE)
    held = []
    for _ in range(40):
        installed(engine, header, chunks)
        torch.cuda.synchronize(DEVICE)
        torch.empty(1, device=DEVICE)  # the allocator looks for what was let go
        held.append((torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)))
    assert torch.cuda.current_stream(DEVICE) == before
    assert held[-1] == held[5]
    assert streams(0) == streams(0), "all handoffs share them"


def test_an_abandoned_install_harms_no_memory_that_is_used_after_it(sender):
    engine, cache = sender
    header = header_of(engine)
    chunks = wires(engine, header, cache)
    for _ in range(20):
        doomed = engine.open_cache(TOKENS, 64, whole=False)
        installer = ChunkInstaller(engine, header, doomed)
        for index, wire in chunks.items():
            installer.install(*index, memoryview(wire))
        sizes = [buffer.keys.shape for buffer in doomed.buffers]
        del installer, doomed  # as an abort does, without waiting
        fresh = [torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for size in sizes]
        torch.cuda.synchronize(DEVICE)
        assert all(not tensor.any() for tensor in fresh)


def test_a_copy_does_not_wait_for_a_forward_in_another_stream():
    """A second of work on the model's stream; a download of other memory is over long before."""
    staging = staging_for(DEVICE)
    source = torch.arange(MIB, device=DEVICE).to(torch.uint8)
    torch.cuda.synchronize(DEVICE)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.current_stream(DEVICE).record_event()
    download = staging.download(source.numel(), lambda: [source])
    assert np.array_equal(download.wait(), np.arange(MIB).astype(np.uint8))
    assert not busy.query(), "the copy waited for the model's stream"
    torch.cuda.synchronize(DEVICE)
