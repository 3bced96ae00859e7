"""What every codec promises, over every dtype, kind and odd shape."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from cachelink_core.codec_spec import CODECS, INT4, NATIVE, CodecSpec, wire_dtype
from cachelink_core.codecs.grouping import plan_slice
from cachelink_core.codecs.native import TORCH_DTYPES
from cachelink_core.codecs.registry import tensor_codec
from cachelink_core.errors import CorruptChunk, InvalidRequest, UnknownCodec
from tests.contract.cases import DTYPES, KINDS, SHAPES, Slice, make

GRID = tuple(itertools.product(CODECS, DTYPES, KINDS))
QUANTIZED = tuple(itertools.product(("int8", "int4"), DTYPES, KINDS))
SHAPE = (3, 200, 80, 64)
"""Sinks no, a short first key group of 64 tokens, a full one, one of 8 native rows; two V groups."""


@pytest.mark.parametrize(("codec", "dtype", "kind"), GRID)
def test_lengths_round_trip_and_purity_over_every_shape(codec, dtype, kind):
    for shape in SHAPES:
        case = make(codec, dtype, kind, shape)
        before = case.tensor.clone()
        payload = case.encode()
        assert len(payload) == case.length, shape
        assert torch.equal(case.tensor, before), shape
        decoded = case.decode(payload)
        wanted = case.tensor.float()
        error = (decoded - wanted).abs().max()
        span = wanted.amax() - wanted.amin()
        limit = {"native": 2**-8, "bf16": 2**-8, "int8": 2**-6, "int4": 2**-3}[codec]
        assert error <= limit * max(span, wanted.abs().max()), shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_native_keeps_every_bit_pattern(dtype, kind):
    item = TORCH_DTYPES[dtype].itemsize
    if item == 2:
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    else:
        patterns = torch.arange(-(2**31), 2**31, 65_537, dtype=torch.int64)[:65536].int()
    tensor = patterns.view(TORCH_DTYPES[dtype]).view(4, 256, 64)
    case = Slice(NATIVE, dtype, kind, tensor, 0)
    decoded = case.decode(case.encode(), torch.empty_like(tensor))
    assert torch.equal(decoded.view(patterns.dtype), tensor.view(patterns.dtype))


def test_bf16_is_native_for_a_bf16_cache_and_rounds_a_wider_one():
    case = make("bf16", "bfloat16", "V", SHAPE)
    assert case.encode() == make("native", "bfloat16", "V", SHAPE).encode()
    wide = make("bf16", "float32", "V", SHAPE)
    assert torch.equal(wide.decode(wide.encode()), wide.tensor.bfloat16().float())


def test_native_encode_copies_nothing():
    buffer = torch.zeros(3, 512, 64, dtype=torch.bfloat16)
    rows = buffer[:, 128:256]
    parts = tensor_codec(NATIVE, "bfloat16").encode(rows, "K", 128)
    assert len(parts) == 3
    rows.fill_(1)
    assert all(bytes(part) == b"\x80\x3f" * (128 * 64) for part in parts)


@pytest.mark.parametrize(("codec", "dtype", "kind"), GRID)
def test_strided_input_and_output(codec, dtype, kind):
    case = make(codec, dtype, kind, SHAPE)
    heads, tokens, dim = case.tensor.shape
    wide = torch.zeros(heads, tokens + 37, dim, dtype=case.tensor.dtype)
    wide[:, 20 : 20 + tokens] = case.tensor
    inside = Slice(case.spec, dtype, kind, wide[:, 20 : 20 + tokens], case.start)
    payload = case.encode()
    assert inside.encode() == payload
    for out_dtype in TORCH_DTYPES.values():
        plain = case.decode(payload, torch.empty(heads, tokens, dim, dtype=out_dtype))
        buffer = torch.full((heads, tokens + 37, dim), 7.0, dtype=out_dtype)
        case.decode(payload, buffer[:, 20 : 20 + tokens])
        assert torch.equal(buffer[:, 20 : 20 + tokens], plain)
        assert (buffer[:, :20] == 7).all()
        assert (buffer[:, 20 + tokens :] == 7).all()


@pytest.mark.parametrize(("codec", "dtype", "kind"), GRID)
def test_decoding_from_an_odd_address_gives_the_same(codec, dtype, kind):
    case = make(codec, dtype, kind, SHAPE)
    payload = case.encode()
    shifted = memoryview(b"\0" + payload)[1:]
    out = torch.empty(case.tensor.shape)
    tensor_codec(case.spec, dtype).decode(shifted, kind, case.start, out)
    assert torch.equal(out, case.decode(payload))


@pytest.mark.parametrize(("codec", "dtype", "kind"), GRID)
def test_wrong_lengths_are_corrupt(codec, dtype, kind):
    case = make(codec, dtype, kind, SHAPE)
    payload = case.encode()
    for wrong in (b"", payload[:-1], payload[: len(payload) // 2], payload + b"\0"):
        with pytest.raises(CorruptChunk, match=f"payload has {len(wrong)} bytes"):
            case.decode(wrong)


@pytest.mark.parametrize(("codec", "dtype", "kind"), QUANTIZED)
@pytest.mark.parametrize("bits", [0x8000, 0xBF80, 0x7F80, 0xFF80, 0x7FC0])
def test_a_negative_or_non_finite_scale_is_corrupt(codec, dtype, kind, bits):
    case = make(codec, dtype, kind, SHAPE)
    heads, tokens, dim = case.tensor.shape
    plan = plan_slice(case.spec, kind, dtype, heads, dim, case.start, case.start + tokens)
    for at in (0, plan.scales.stop - 2):
        payload = bytearray(case.encode())
        payload[at : at + 2] = bits.to_bytes(2, "little")
        with pytest.raises(CorruptChunk, match="scale"):
            case.decode(bytes(payload))


@pytest.mark.parametrize(("codec", "dtype", "kind"), QUANTIZED)
@pytest.mark.parametrize("top_bits", [0x7F80, 0xFF80, 0x7FC0])
def test_a_non_finite_zero_point_is_corrupt(codec, dtype, kind, top_bits):
    case = make(codec, dtype, kind, SHAPE)
    heads, tokens, dim = case.tensor.shape
    plan = plan_slice(case.spec, kind, dtype, heads, dim, case.start, case.start + tokens)
    item = 4 if kind == "K" else 2
    for first in (plan.zeros.start, plan.zeros.stop - item):
        payload = bytearray(case.encode())
        payload[first + item - 2 : first + item] = top_bits.to_bytes(2, "little")
        with pytest.raises(CorruptChunk, match="zero point"):
            case.decode(bytes(payload))


@pytest.mark.parametrize(("codec", "dtype", "kind"), QUANTIZED)
def test_garbage_is_refused_or_decodes_to_every_element(codec, dtype, kind):
    case = make(codec, dtype, kind, SHAPE)
    generator = torch.Generator().manual_seed(5)
    refused = 0
    for _ in range(8):
        noise = torch.randint(0, 256, (case.length,), generator=generator, dtype=torch.uint8)
        try:
            case.decode(noise.numpy().tobytes())
        except CorruptChunk:
            refused += 1
    assert refused == 8, "hundreds of random scales are never all positive and finite"


@pytest.mark.parametrize(("codec", "dtype", "kind"), QUANTIZED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_quantizing_a_non_finite_cache_is_refused(codec, dtype, kind, value):
    case = make(codec, dtype, kind, SHAPE)
    case.tensor[1, 100, 70] = value
    with pytest.raises(InvalidRequest, match=f"codec {codec} cannot quantize"):
        case.encode()


@pytest.mark.parametrize(("codec", "dtype", "kind"), QUANTIZED)
def test_a_constant_tensor_comes_back(codec, dtype, kind):
    case = make(codec, dtype, kind, SHAPE)
    case.tensor.fill_(3.25)
    assert torch.equal(case.decode(case.encode()), case.tensor.float())
    case.tensor.fill_(0.0)
    assert torch.equal(case.decode(case.encode()), case.tensor.float())


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sinks_are_stored_native(codec, kind):
    case = make(codec, "bfloat16", kind, (3, 256, 64, 0))
    case.tensor[:, 0] = 4096.0
    decoded = case.decode(case.encode())
    assert torch.equal(decoded[:, :4], case.tensor[:, :4].float())
    spread = (decoded[:, 4:] - case.tensor[:, 4:].float()).abs().max()
    assert spread < 10, "the sinks are outside the statistics of the groups"


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_huge_channel_mean_costs_keys_nothing(codec):
    case = make(codec, "bfloat16", "K", (3, 256, 64, 128))
    biased = case.tensor.clone()
    biased[:, :, 7] += 4096
    shifted = Slice(case.spec, "bfloat16", "K", biased, 128)
    plain = (case.decode(case.encode()) - case.tensor).abs().amax()
    assert (shifted.decode(shifted.encode()) - biased).abs().amax() <= plain * 1.01 + 1e-3


def test_unknown_codecs_are_refused():
    for bad in (
        msgspec.structs.replace(INT4, id="int3"),
        msgspec.structs.replace(INT4, key_group_tokens=0),
        msgspec.structs.replace(INT4, value_group_channels=0),
        CodecSpec("native", 128, 0, 0),
        CodecSpec("bf16", 0, 0, 4),
    ):
        with pytest.raises(UnknownCodec):
            tensor_codec(bad, "bfloat16")
    with pytest.raises(UnknownCodec, match="float64"):
        tensor_codec(NATIVE, "float64")


@pytest.mark.parametrize("codec", CODECS)
def test_no_tokens_are_no_bytes(codec):
    case = make(codec, "bfloat16", "V", (3, 0, 64, 256))
    assert case.encode() == b""
    assert case.decode(b"").numel() == 0


def test_wire_dtype_is_what_the_rows_have():
    case = make("bf16", "float32", "K", (1, 33, 64, 0))
    assert (
        len(case.encode()) == 33 * 64 * TORCH_DTYPES[wire_dtype(case.spec, "K", "float32")].itemsize
    )
