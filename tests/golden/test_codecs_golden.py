"""The bytes of codecs and packings do not change by accident; the decoder is fixed bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from cachelink_core.codec_spec import ZSTD
from cachelink_core.codecs.registry import packing
from tests.golden.codec_cases import (
    CODEC_CASES,
    FOLDER,
    PACKING_CASES,
    CodecCase,
    PackingCase,
    files,
    tensor_bytes,
)


def test_there_is_a_file_for_every_case_and_no_other():
    assert {path.name for path in FOLDER.iterdir()} == set(files())


@pytest.mark.parametrize("case", CODEC_CASES, ids=lambda case: case.name)
def test_the_decoder_gives_the_golden_bits(case: CodecCase):
    payload = (FOLDER / f"{case.name}.payload.bin").read_bytes()
    golden = (FOLDER / f"{case.name}.decoded.bin").read_bytes()
    assert tensor_bytes(case.decode(payload)) == golden
    assert case.describe(payload) == json.loads((FOLDER / f"{case.name}.json").read_bytes())


@pytest.mark.parametrize("case", CODEC_CASES, ids=lambda case: case.name)
def test_the_encoder_stays_within_a_step_of_the_golden_payload(case: CodecCase):
    golden = (FOLDER / f"{case.name}.payload.bin").read_bytes()
    encoded = case.encode()
    assert len(encoded) == len(golden)
    if not case.spec.quantized:
        assert encoded == golden
        return
    wanted, found = case.decode(golden), case.decode(encoded)
    axis = 1 if case.kind == "K" else 2
    span = case.tensor().float().amax(axis, keepdim=True) - case.tensor().float().amin(
        axis, keepdim=True
    )
    step = span / (15 if case.spec.id == "int4" else 255) * 1.02
    assert torch.all((wanted - found).abs() <= step)


@pytest.mark.parametrize("case", PACKING_CASES, ids=lambda case: case.name)
def test_the_golden_wire_bytes_unpack(case: PackingCase):
    wire = (FOLDER / f"{case.name}.wire.bin").read_bytes()
    raw = (FOLDER / f"{case.name}.raw.bin").read_bytes()
    assert wire[0] == case.form
    assert bytes(packing(ZSTD).unpack(memoryview(wire), len(raw), case.item_bytes)) == raw
    assert case.raw() == raw
    assert case.describe(wire) == json.loads((FOLDER / f"{case.name}.json").read_bytes())
