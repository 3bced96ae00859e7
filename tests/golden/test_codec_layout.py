"""A second reader of quantized payloads, written from the documented layout alone.

It shares no code with the codecs: loops over plain numbers, as someone with another language would
begin.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.golden.codec_cases import CODEC_CASES, FOLDER, CodecCase

QUANTIZED = [case for case in CODEC_CASES if case.spec.quantized]


def segments(case: CodecCase) -> list[tuple[int, int, bool]]:
    """(first, stop, quantized) in absolute positions."""
    at, stop = case.start, case.start + case.shape[1]
    found = []
    if at < 4:
        found.append((at, 4, False))
        at = 4
    if case.kind == "V":
        return [*found, (at, stop, True)]
    while at < stop:
        end = min(stop, at - at % 128 + 128)
        found.append((at, end, end - at >= 32))
        at = end
    return found


class Reader:
    def __init__(self, payload: bytes) -> None:
        self.payload, self.at = payload, 0

    def take(self, count: int, item: str) -> np.ndarray:
        size = {"bf16": 2, "u8": 1, "f32": 4}[item] * count
        raw = self.payload[self.at : self.at + size]
        self.at += size
        if item == "bf16":
            raw = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, size, 2))
        if item == "u8":
            return np.array(list(raw))
        return np.array(struct.unpack(f"<{count}f", raw), np.float32)


def read(case: CodecCase, payload: bytes) -> np.ndarray:
    heads, _, dim = case.shape
    key, width = case.kind == "K", case.spec.value_group_channels
    groups = dim if key else -(-dim // width)
    parts = segments(case)
    reader = Reader(payload)
    shapes = [(heads, 1 if key else b - a, groups) for a, b, codes in parts if codes]
    scales = [reader.take(int(np.prod(s)), "bf16").reshape(s) for s in shapes]
    zeros = [reader.take(int(np.prod(s)), "f32" if key else "bf16").reshape(s) for s in shapes]
    item = "f32" if key or case.dtype == "float32" else "bf16"
    native = [
        reader.take(heads * (b - a) * dim, item).reshape(heads, b - a, dim)
        for a, b, codes in parts
        if not codes
    ]
    pieces = []
    for a, b, codes in parts:
        if not codes:
            pieces.append(native.pop(0))
            continue
        scale, zero = scales.pop(0), zeros.pop(0)
        rows = np.empty((heads, b - a, dim), np.float32)
        row = dim if case.spec.id == "int8" else (dim + 1) // 2
        data = reader.take(heads * (b - a) * row, "u8").reshape(heads, b - a, row)
        for h, t, d in np.ndindex(rows.shape):
            code = data[h, t, d] if row == dim else data[h, t, d % row] >> 4 * (d // row) & 15
            token, group = (0, d) if key else (t, d // width)
            rows[h, t, d] = zero[h, token, group] + np.float32(code) * scale[h, token, group]
        pieces.append(rows)
    assert reader.at == len(payload), "nothing is left"
    return np.concatenate(pieces, axis=1)


@pytest.mark.parametrize("case", QUANTIZED, ids=lambda case: case.name)
def test_the_documented_layout_is_the_layout(case: CodecCase):
    payload = (FOLDER / f"{case.name}.payload.bin").read_bytes()
    assert read(case, payload).tobytes() == (FOLDER / f"{case.name}.decoded.bin").read_bytes()
