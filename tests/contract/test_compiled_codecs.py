"""Compiled kernels: the plain ones' numbers, the documented bounds, and plain for what they lack."""

from __future__ import annotations

import threading

import pytest
import torch

from cachelink_core.codec_spec import CODECS
from cachelink_core.codecs import compiled, kernels
from cachelink_core.codecs.affine import AffineCodec
from cachelink_core.codecs.compiled import CompiledKernels, missing_compiler
from cachelink_core.codecs.kernels import PLAIN
from cachelink_core.codecs.registry import tensor_codec
from cachelink_core.errors import InternalError, InvalidRequest
from cachelink_core.kv.rotation import inverse_angles, rotate, unrotate
from tests.contract.cases import Slice, cache_like

CPU = torch.device("cpu")
SHAPE = (2, 256, 128)
"""Two key groups, two value groups."""
TOPS = {"int8": 255, "int4": 15}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        missing_compiler(CPU) is not None, reason="needs a C++ compiler: without one all run plain"
    ),
]


def angles(tokens: int = 256, pairs: int = 64, scale: float = 1.1) -> tuple[torch.Tensor, ...]:
    turn = torch.arange(tokens).unsqueeze(1) / (1.3 ** torch.arange(pairs))
    return scale * turn.cos(), scale * turn.sin()


@pytest.fixture(scope="module")
def held() -> CompiledKernels:
    made = CompiledKernels()
    rows = cache_like(SHAPE)
    for top in TOPS.values():
        for encode in (True, False):
            made.compile_values(rows.bfloat16(), top, 64, encode=encode)
            made.compile_keys(rows, None, top, 128, encode=encode)
            turn = inverse_angles(*angles()) if encode else angles()
            made.compile_keys(rows.bfloat16(), turn, top, 128, encode=encode)
    assert len(made) == 12
    assert made.compile_s > 0
    return made


def case(codec: str, kind: str, start: int = 256, seed: int = 1) -> Slice:
    rows = cache_like(SHAPE, seed)
    tensor = rows if kind == "K" else rows.bfloat16()
    return Slice(CODECS[codec], "bfloat16", kind, tensor, start)


class Counting(CompiledKernels):
    """Says how often a compiled kernel ran."""

    def __init__(self, held: CompiledKernels) -> None:
        super().__init__()
        self.ran = 0
        self._held = {key: self._count(kernel) for key, kernel in held._held.items()}

    def _count(self, kernel):
        def run(*given):
            self.ran += 1
            return kernel(*given)

        return run


@pytest.mark.parametrize("codec", TOPS)
@pytest.mark.parametrize("kind", ["K", "V"])
def test_a_full_block_is_within_the_bounds_and_decodes_to_the_plain_bits(held, codec, kind):
    counting = Counting(held)
    one = case(codec, kind)
    payload = one.encode(counting)
    assert len(payload) == one.length
    wanted = one.tensor.float()
    step = (wanted.amax(1, keepdim=True) - wanted.amin(1, keepdim=True)) / TOPS[codec]
    if kind == "V":
        groups = wanted.unflatten(2, (2, 64))
        span = groups.amax(3) - groups.amin(3) + groups.amin(3).abs() * 2**-7
        step = (span / TOPS[codec]).repeat_interleave(64, 2)
    decoded = one.decode(payload)
    limit = step * (1 + 2**-7) / 2 + 2**-21 * wanted.abs().max()
    assert ((decoded - wanted).abs() <= limit).all()
    assert ((decoded - one.decode(one.encode())).abs() <= step * (1 + 2**-7)).all()
    dtype = torch.float32 if kind == "K" else torch.bfloat16
    outs = [torch.empty(SHAPE, dtype=dtype) for _ in range(2)]
    assert torch.equal(one.decode(payload, outs[0], counting), one.decode(payload, outs[1]))
    assert counting.ran == 2


@pytest.mark.parametrize("codec", TOPS)
def test_turning_and_quantizing_in_one_pass_is_within_a_step_of_two_passes(held, codec):
    one = tensor_codec(CODECS[codec], "bfloat16", held)
    assert isinstance(one, AffineCodec)
    cached = cache_like(SHAPE, 3).bfloat16()
    back, there = inverse_angles(*angles()), angles()
    assert one.turns(cached, 256, 64, encode=True)
    content = unrotate(cached, *there, "half", 128)
    payload = b"".join(one.encode(cached, "K", 256, back))
    step = (content.amax(1, keepdim=True) - content.amin(1, keepdim=True)) / TOPS[codec]
    decoded = torch.empty(SHAPE)
    one.decode(memoryview(payload), "K", 256, decoded)
    assert ((decoded - content).abs() <= step * (1 + 2**-7) / 2 + 1e-4).all()
    turned = torch.empty(SHAPE, dtype=torch.bfloat16)
    assert one.turns(turned, 256, 64, encode=False)
    one.decode(memoryview(payload), "K", 256, turned, there)
    expected = rotate(decoded, *there, "half", 128)
    assert torch.allclose(turned.float(), expected, rtol=2**-8, atol=1e-3)


def test_what_was_not_compiled_runs_plain(held):
    counting = Counting(held)
    for start, shape in (
        (0, SHAPE),
        (256, (2, 255, 128)),
        (256, (2, 256, 64)),
        (256, (3, 256, 128)),
    ):
        rows = cache_like(shape)
        for kind, tensor in (("K", rows), ("V", rows.bfloat16())):
            odd = Slice(CODECS["int4"], "bfloat16", kind, tensor, start)
            payload = odd.encode(counting)
            assert payload == odd.encode()
            assert torch.equal(odd.decode(payload, None, counting), odd.decode(payload))
    assert counting.ran == 0
    codec = tensor_codec(CODECS["int4"], "bfloat16", held)
    rows = cache_like(SHAPE).bfloat16()
    assert not codec.turns(rows, 0, 64, encode=True), "the sinks are there"
    assert not codec.turns(rows, 256, 32, encode=True)
    assert not codec.turns(rows[:, :128], 256, 64, encode=True)
    assert not tensor_codec(CODECS["int4"], "bfloat16").turns(rows, 256, 64, encode=True)


def test_strided_tensors_and_other_threads_get_the_same_bytes(held):
    one = case("int4", "V")
    wide = torch.zeros(2, 700, 128, dtype=torch.bfloat16)
    wide[:, 300:556] = one.tensor
    inside = Slice(one.spec, "bfloat16", "V", wide[:, 300:556], 256)
    counting = Counting(held)
    wanted = one.encode(counting)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(inside.encode(counting)))
    thread.start()
    thread.join()
    assert found == [wanted]
    assert counting.ran == 2


@pytest.mark.parametrize("kind", ["K", "V"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_compiled_encoder_refuses_what_the_plain_one_refuses(held, kind, value):
    one = case("int4", kind)
    one.tensor[1, 100, 70] = value
    counting = Counting(held)
    with pytest.raises(InvalidRequest, match="cannot quantize"):
        one.encode(counting)
    assert counting.ran == 1


def test_a_kernel_that_computes_something_else_is_refused():
    rows = cache_like(SHAPE)
    wanted = kernels.encode_keys(rows, None, 15, 128)
    shifted = wanted[0], wanted[1] + 8 * wanted[0].float().max(), wanted[2]
    decode = lambda encoded: PLAIN.decode_keys(encoded, None, 15, torch.float32)  # noqa: E731
    with pytest.raises(InternalError, match="apart"):
        compiled._check_codes(wanted, shifted, decode)
    values = decode(wanted)
    with pytest.raises(InternalError, match="apart"):
        compiled._check_values(values, values + 2**-10, exact=True)
    with pytest.raises(InternalError, match="apart"):
        compiled._check_values(values, torch.full_like(values, float("nan")), exact=False)
