"""Encoding and decoding on a device."""

from __future__ import annotations

import itertools

import pytest
import torch

from cachelink_core.codec_spec import CODECS
from cachelink_core.codecs.compiled import CompiledKernels, missing_compiler
from tests.contract.cases import DTYPES, KINDS, Slice, make

SHAPE = (3, 200, 80, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("codec", "dtype", "kind"), tuple(itertools.product(CODECS, DTYPES, KINDS))
)
def test_a_device_gives_the_hosts_bytes_and_values(codec, dtype, kind):
    case = make(codec, dtype, kind, SHAPE)
    on_device = Slice(case.spec, dtype, kind, case.tensor.cuda(), case.start)
    payload = on_device.encode()
    assert len(payload) == case.length
    decoded = case.decode(payload, torch.empty(case.tensor.shape, device="cuda"))
    assert torch.equal(decoded.cpu(), case.decode(payload)), "the decoder is fixed bit for bit"
    step = (case.decode(case.encode()) - decoded.cpu()).abs().max()
    assert step <= (case.tensor.float().amax() - case.tensor.float().amin()) / 15


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or missing_compiler(torch.device("cuda")) is not None,
    reason="needs a CUDA device and Triton",
)
@pytest.mark.parametrize(("codec", "top"), [("int8", 255), ("int4", 15)])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_kernels_decode_to_the_hosts_bits(codec, top, kind):
    case = make(codec, "bfloat16", kind, (2, 256, 128, 256))
    rows = case.tensor.cuda()
    held = CompiledKernels()
    for encode in (True, False):
        if kind == "K":
            held.compile_keys(rows, None, top, 128, encode=encode)
        else:
            held.compile_values(rows, top, 64, encode=encode)
    assert len(held) == 2
    payload = Slice(case.spec, "bfloat16", kind, rows, case.start).encode(held)
    decoded = case.decode(payload, torch.empty_like(rows), held)
    on_host = case.decode(payload, torch.empty_like(case.tensor))
    assert torch.equal(decoded.cpu(), on_host), "the decoder is fixed bit for bit"
    step = (case.decode(case.encode()) - case.decode(payload)).abs().max()
    assert step <= (case.tensor.float().amax() - case.tensor.float().amin()) / top
