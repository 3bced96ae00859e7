"""Mapping, rotating and installing on a device, held against the CPU."""

import json

import pytest
import torch

from cachelink_bench import latency
from cachelink_core.codec_spec import INT8, NATIVE, NO_PACKING
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.chunks import ChunkEncoder
from cachelink_core.engine.mapped_chunks import MappedInstaller
from cachelink_core.engine.offer import make_header
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.planted_pair import analytic_state
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.precision import ROW_TILE
from tests.models.fit_pairs import planted_engines
from tests.models.mapper_states import SHAPE, mapped, random_source, random_state

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMS = {"ridge": {}, "residual": {"residual": SHAPE}, "local": {"heads": "local"}}
TOKENS, BLOCK = 90, 32
IDS = tuple(4 + (7 * i) % 260 for i in range(TOKENS))
GREEDY = Sampling(max_new_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_maps_as_the_host_does(form, dtype):
    state = random_state(**FORMS[form])
    source = random_source(ROW_TILE + 37)
    host = mapped(Mapper.place(state, dtype=dtype), source)
    device = mapped(Mapper.place(state, device=DEVICE, dtype=dtype), source.to(DEVICE))
    # Sums differ in their order alone; a residual in bf16 may round a unit to its neighbour.
    tolerance = 2e-2 if dtype == torch.bfloat16 and form == "residual" else 1e-4
    for ours, theirs in zip(host, device, strict=True):
        for expected, found in zip(ours, theirs, strict=True):
            assert found.device.type == DEVICE
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_on_a_device_too_any_cut_of_a_prefix_gives_the_same_bits(form):
    mapper = Mapper.place(random_state(**FORMS[form]), device=DEVICE, dtype=torch.float32)
    source = random_source(2 * ROW_TILE + 37).to(DEVICE)
    whole = mapped(mapper, source)
    for start, stop in ((0, 100), (100, ROW_TILE + 3), (ROW_TILE + 3, source.shape[3])):
        part = mapped(mapper, source[:, :, :, start:stop], start)
        for expected, found in zip(whole, part, strict=True):
            for layer, tensor in zip(expected, found, strict=True):
                assert torch.equal(layer[:, start:stop], tensor)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("codec", [NATIVE, INT8])
def test_a_handoff_to_a_device_installs_what_one_to_the_host_does(family, codec):
    sender, receiver, twin = planted_engines(family, torch.float32)
    state = analytic_state(twin, sender.identity, receiver.identity)
    source = sender.open_cache(TOKENS, 0, whole=True)
    sender.prefill(source, IDS, BLOCK)
    header = make_header(
        sender, IDS, codec, NO_PACKING, sender_epoch="e", block_tokens=BLOCK, mapper="any"
    )
    caches, answers = [], []
    for engine in (receiver, _on_device(family, receiver)):
        mapper = Mapper.place(state, device=engine.device, dtype=torch.float32)
        cache = _installed(engine, ChunkEncoder(sender, header, source), header, mapper)
        caches.append(cache)
        steps = engine.generate_steps(cache.copy(TOKENS, 64), IDS, (5, 9, 2), GREEDY)
        answers.append([step.token_id for step in steps])
    for layer in range(len(caches[0].layers)):
        for kind in ("K", "V"):
            host, device = (cache.tensor(layer, kind, 0, TOKENS) for cache in caches)
            torch.testing.assert_close(device.cpu(), host, rtol=1e-4, atol=1e-4)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_phases_timed_by_events_sum_to_the_hosts_clock(dtype, capsys):
    arguments = ["--smoke", "--device", DEVICE, "--dtype", dtype, "--strict"]
    assert latency.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["peak_device_bytes"] > 0
    for result in document["results"]:
        assert result["arms"]["ridge_residual"]["phases_s"]["map"] > 0


def _on_device(family, receiver):
    """The same receiver once more: its models are seeded."""
    _, again, _ = planted_engines(family, torch.float32)
    assert again.identity == receiver.identity
    model = again.model.to(DEVICE)
    return TransformersEngine(model, again.tokens, again.identity, KeyRope.probe(model))


def _installed(engine, encoder, header, mapper):
    cache = engine.open_cache(TOKENS, 64, whole=False)
    installer = MappedInstaller(engine, header, cache, mapper)
    for block, run in header.layout.chunks():
        installer.install(block, run, memoryview(b"".join(encoder.encode(block, run))))
    installer.finish()
    return cache
