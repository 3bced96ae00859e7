"""Encoding and decoding on a device."""

from __future__ import annotations

import itertools

import pytest
import torch

from cachelink_core.codec_spec import CODECS
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
