"""The error bounds that ``affine.py`` documents, on inputs that hypothesis chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cachelink_core.codec_spec import CODECS, segments, wire_dtype
from cachelink_core.codecs.grouping import channel_groups, plan_slice
from cachelink_core.codecs.kernels import SMALLEST_SCALE
from cachelink_core.codecs.native import TORCH_DTYPES
from tests.contract.cases import DTYPES, KINDS, Slice

TOP = {"int8": 255, "int4": 15}


@st.composite
def slices(draw, codec: str) -> Slice:
    dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    heads, tokens = draw(st.integers(1, 2)), draw(st.sampled_from((1, 5, 33, 40, 131)))
    dim = draw(st.sampled_from((1, 2, 3, 66)))
    largest = draw(st.sampled_from((1e-30, 1.0, 100.0, 6e4)))
    values = hnp.arrays(
        np.float32,
        (heads, tokens, dim),
        elements=st.floats(-1, 1, width=32),
        fill=st.floats(-1, 1, width=32),
    )
    tensor = torch.from_numpy(draw(values)) * largest
    tensor += draw(st.sampled_from((0.0, 1.0, -300.0))) * largest / 300
    if kind == "V":
        # What float16 cannot hold would become an infinity, which a quantizing codec refuses.
        most = torch.finfo(TORCH_DTYPES[dtype]).max
        tensor = tensor.clamp(-most, most).to(TORCH_DTYPES[dtype])
    start = draw(st.sampled_from((0, 3, 4, 100, 256)))
    return Slice(CODECS[codec], dtype, kind, tensor, start)


def scales_of(case: Slice, payload: bytes) -> torch.Tensor:
    """The stored scale of every element, float32 ``[H, T, D]``; NaN where rows are native."""
    heads, tokens, dim = case.tensor.shape
    plan = plan_slice(case.spec, case.kind, case.dtype, heads, dim, case.start, case.start + tokens)
    found = torch.full(case.tensor.shape, float("nan"))
    for part in plan.segments:
        if not part.quantized:
            continue
        raw = torch.tensor(list(payload[part.scales]), dtype=torch.uint8)
        shape = (heads, 1, dim) if case.kind == "K" else (heads, part.stop - part.first, -1)
        scales = raw.view(torch.bfloat16).float().view(shape)
        for index, group in enumerate(channel_groups(case.spec, case.kind, dim)):
            pick = group if case.kind == "K" else slice(index, index + 1)
            found[:, part.first : part.stop, group] = scales[:, :, pick]
    return found


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_no_element_is_further_off_than_documented(codec):
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(case=slices(codec))
    def check(case: Slice) -> None:
        payload = case.encode()
        error = (case.decode(payload) - case.tensor.float()).abs()
        scales = scales_of(case, payload)
        largest = case.tensor.float().abs().max()
        native = scales.isnan()
        bound = scales / 2 + 2**-21 * largest
        assert (error <= bound)[~native].all()
        rows = wire_dtype(case.spec, case.kind, case.dtype)
        resolution = torch.finfo(TORCH_DTYPES[rows])
        row_bound = case.tensor.float().abs() * resolution.eps + resolution.smallest_normal
        fits = case.tensor.float().abs() <= resolution.max
        assert (error <= row_bound)[native & fits].all()

    check()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_no_scale_is_larger_than_documented(codec):
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(case=slices(codec))
    def check(case: Slice) -> None:
        scales = scales_of(case, case.encode())
        _, tokens, dim = case.tensor.shape
        axis = 1 if case.kind == "K" else 2
        for part in segments(case.spec, case.kind, case.start, case.start + tokens):
            if not part.quantized:
                continue
            rows = slice(part.start - case.start, part.stop - case.start)
            for group in channel_groups(case.spec, case.kind, dim):
                x = case.tensor.float()[:, rows, group]
                low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
                rounding = low.abs() * 2**-7 if case.kind == "V" else 0.0
                limit = ((high - low + rounding) / TOP[codec]).clamp_min(SMALLEST_SCALE)
                assert (scales[:, rows, group] <= limit * (1 + 2**-7)).all()

    check()
