"""A node that compiles its codecs hands over the same cache, within a step; without, it still works."""

from __future__ import annotations

import pytest
import torch

from cachelink_core.codec_spec import INT4, NO_PACKING
from cachelink_core.codecs.compiled import CompiledKernels, missing_compiler
from cachelink_core.codecs.kernels import PLAIN
from cachelink_core.engine.chunks import ChunkEncoder, ChunkInstaller
from cachelink_core.engine.compile_codecs import compile_codecs
from cachelink_core.engine.offer import make_header
from cachelink_core.testing.tiny_engines import tiny_engine

BLOCK = 128
TOKENS = 3 * BLOCK
needs_compiler = pytest.mark.skipif(
    missing_compiler(torch.device("cpu")) is not None, reason="needs a C++ compiler"
)


@pytest.fixture
def engine():
    return tiny_engine("llama")


def hand_over(engine, native, header):
    cache = engine.open_cache(TOKENS, 1, whole=False)
    encoder = ChunkEncoder(engine, header, native)
    installer = ChunkInstaller(engine, header, cache)
    for index in header.layout.chunks():
        installer.install(*index, memoryview(b"".join(encoder.encode(*index))))
    installer.finish()
    return cache


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_nothing_is_compiled_unasked(engine, backend):
    assert compile_codecs(engine, backend, ("sender", "receiver")) == 0.0
    assert engine.kernels is PLAIN


def test_without_a_compiler_it_stays_eager(engine, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert compile_codecs(engine, "compiled", ("sender",)) == 0.0
    assert engine.kernels is PLAIN


def test_a_compiler_that_fails_leaves_it_eager(engine, monkeypatch):
    def broken(*_given, **_named):
        raise RuntimeError("internal compiler error")

    monkeypatch.setattr(CompiledKernels, "compile_values", broken)
    compile_codecs(engine, "compiled", ("sender",))
    assert engine.kernels is PLAIN


@needs_compiler
@pytest.mark.slow
def test_a_compiled_handoff_installs_what_an_eager_one_does(engine):
    ids = [(1 + 7 * i) % 200 for i in range(TOKENS)]
    native = engine.open_cache(TOKENS, 1, whole=True)
    engine.prefill(native, ids, BLOCK)
    native.use_window()
    header = make_header(engine, ids, INT4, NO_PACKING, sender_epoch="test", block_tokens=BLOCK)
    eager = hand_over(engine, native, header)
    sides = ("sender", "receiver")
    assert compile_codecs(engine, "compiled", sides, codecs=("int4",), block_tokens=BLOCK) > 0
    assert len(engine.kernels) >= 4
    compiled = hand_over(engine, native, header)
    for layer, geometry in enumerate(native.layers):
        for kind in ("K", "V"):
            first = max(geometry.first_token(TOKENS), native.first_token(layer))
            wanted, found = (c.tensor(layer, kind, first, TOKENS) for c in (eager, compiled))
            span = native.tensor(layer, kind, first, TOKENS).float()
            step = 2 * (span.amax() - span.amin()) / 15
            assert ((wanted.float() - found.float()).abs() <= step).all()
            sinks = slice(0, max(0, 4 - first))
            assert torch.equal(wanted[:, sinks], found[:, sinks])
