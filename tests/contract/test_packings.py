"""What every packing promises: bytes come back, never more than one byte longer, no bombs."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cachelink_core.codec_spec import (
    CODECS,
    NO_PACKING,
    PACKINGS,
    ZSTD,
    PackingSpec,
    item_bytes,
)
from cachelink_core.codecs.planes import join_planes, split_planes
from cachelink_core.codecs.registry import packing, tensor_codec
from cachelink_core.errors import CorruptChunk, DecompressionBomb, UnknownPacking
from tests.contract.cases import DTYPES, KINDS, SHAPES, make

LEVELS = (ZSTD, PackingSpec("zstd", 3), PackingSpec("zstd", 0))
MIB = 2**20


def pack(raw: bytes, item_bytes: int, spec: PackingSpec = ZSTD) -> bytes:
    return b"".join(packing(spec).pack([memoryview(raw)], item_bytes))


def unpack(wire: bytes, raw_bytes: int, item_bytes: int) -> bytes:
    return bytes(packing(ZSTD).unpack(memoryview(wire), raw_bytes, item_bytes))


def floats(count: int, dtype: type = np.float32) -> bytes:
    """Bytes like those of a cache: normal numbers, so that exponents repeat and mantissas do not."""
    return np.random.default_rng(3).standard_normal(count).astype(dtype).tobytes()


def bfloat16(count: int) -> bytes:
    return np.frombuffer(floats(count), np.uint16)[1::2].tobytes()


@pytest.mark.parametrize(
    ("spec", "codec", "dtype", "kind"),
    list(itertools.product(PACKINGS.values(), CODECS, DTYPES, KINDS)),
)
def test_encoded_slices_come_back(spec, codec, dtype, kind):
    packer = packing(spec)
    for shape in SHAPES[::3]:
        case = make(codec, dtype, kind, shape)
        parts = tensor_codec(case.spec, dtype).encode(case.tensor, kind, case.start)
        raw = b"".join(parts)
        item = item_bytes(case.spec, dtype)
        wire = b"".join(packer.pack(parts, item))
        assert bytes(packer.unpack(memoryview(wire), len(raw), item)) == raw, shape
        assert len(wire) <= len(raw) + (spec.id == "zstd"), shape


@pytest.mark.parametrize("spec", LEVELS, ids=lambda spec: f"level{spec.level}")
@pytest.mark.parametrize("item", [1, 2, 4])
def test_any_bytes_come_back_and_grow_by_one_at_most(spec, item):
    runs = st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.tuples(st.binary(min_size=1, max_size=3), st.integers(0, 30_000)).map(
                lambda pair: pair[0] * pair[1]
            ),
        ),
        max_size=4,
    )

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(parts=runs)
    def check(parts: list[bytes]) -> None:
        raw = b"".join(parts)
        wire = b"".join(packing(spec).pack([memoryview(part) for part in parts], item))
        assert len(wire) <= len(raw) + 1
        assert unpack(wire, len(raw), item) == raw

    check()


def test_noise_is_stored_with_one_byte_and_not_copied():
    noise = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    parts = packing(ZSTD).pack([memoryview(noise)], 1)
    assert sum(part.nbytes for part in parts) == MIB + 1
    assert np.shares_memory(np.asarray(parts[1]), noise)


def test_planes_part_exponents_from_the_rest():
    raw = bfloat16(4096)
    exponents, rest = split_planes(np.frombuffer(raw, np.uint8), 2)
    bits = np.frombuffer(raw, np.uint16)
    assert (exponents == (bits >> 7 & 0xFF)).all()
    assert (rest == ((bits & 0x7F) << 1 | bits >> 15)).all()
    assert len(np.unique(exponents)) < 32
    assert join_planes([exponents, rest], 2).tobytes() == raw


@pytest.mark.parametrize("item", [2, 4])
def test_planes_lose_nothing(item):
    raw = np.arange(65536 * item, dtype=np.uint32).astype(np.uint16).view(np.uint8)
    assert (join_planes(split_planes(raw, item), item) == raw).all()


def test_gaussian_bfloat16_shrinks_to_its_exponents_entropy():
    raw = bfloat16(MIB // 2)
    assert len(pack(raw, 2)) / len(raw) < 0.68
    assert len(pack(raw, 2)) < len(pack(raw, 1))


def test_the_plain_packing_has_no_escape_and_copies_nothing():
    part = memoryview(b"abc")
    assert packing(NO_PACKING).pack([part], 2) == [part]
    for wrong in (2, 4):
        with pytest.raises(CorruptChunk):
            packing(NO_PACKING).unpack(part, wrong, 1)


@pytest.mark.parametrize(("raw", "item"), [(bfloat16(50_000), 2), (b"abcd" * 9000, 1)])
def test_truncated_or_extended_wire_bytes_are_corrupt(raw, item):
    wire = pack(raw, item)
    assert wire[0] in (1, 2), "the case is a packed one"
    for cut in (0, 1, 2, 5, 9, 20, len(wire) // 2, len(wire) - 1):
        with pytest.raises(CorruptChunk):
            unpack(wire[:cut], len(raw), item)
    with pytest.raises(CorruptChunk):
        unpack(wire + b"\0", len(raw), item)


@pytest.mark.parametrize(("raw", "item"), [(bfloat16(5_000), 2), (b"abcd" * 900, 1)])
def test_a_changed_head_never_yields_other_than_the_declared_size(raw, item):
    wire = pack(raw, item)
    outcomes = set()
    for at, bit in itertools.product(range(min(40, len(wire))), range(8)):
        bad = bytearray(wire)
        bad[at] ^= 1 << bit
        try:
            assert len(unpack(bytes(bad), len(raw), item)) == len(raw)
        except (CorruptChunk, DecompressionBomb) as error:
            outcomes.add(type(error))
    assert outcomes == {CorruptChunk, DecompressionBomb}


@pytest.mark.parametrize("form", range(3, 256, 11))
def test_unknown_escape_bytes_are_corrupt(form):
    with pytest.raises(CorruptChunk, match=f"escape byte {form}"):
        unpack(bytes([form]) + b"x" * 8, 8, 2)


def test_planes_that_do_not_fit_the_items_are_corrupt():
    wire = pack(bfloat16(5_000), 2)
    for raw_bytes, item in ((10_000, 1), (10_001, 2), (10_000, 3)):
        with pytest.raises(CorruptChunk, match="escape byte 2"):
            unpack(wire, raw_bytes, item)


def test_a_stored_payload_of_another_size_is_refused():
    with pytest.raises(CorruptChunk, match="3 bytes"):
        unpack(b"\0abc", 4, 1)
    with pytest.raises(DecompressionBomb, match="5 bytes"):
        unpack(b"\0abcde", 4, 1)


def bomb(content: int) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(bytes(content))


@pytest.mark.parametrize("raw_bytes", [0, 1, 1000, MIB])
def test_a_bomb_is_refused_before_memory_is_taken(raw_bytes):
    whole = b"\x01" + bomb(64 * MIB)
    planes = b"\x02" + struct.pack("<2I", len(bomb(64 * MIB)), 0) + bomb(64 * MIB)
    planes += bytes(raw_bytes // 2)
    tracemalloc.start()
    try:
        for wire, item in ((whole, 1), (whole, 2), (planes, 2)):
            if item == 2 and raw_bytes % 2:
                continue
            with pytest.raises(DecompressionBomb, match=str(64 * MIB)):
                unpack(wire, raw_bytes, item)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_frame_that_lies_about_its_size_is_refused():
    honest = zstandard.ZstdCompressor(level=3).compress(bytes(70_000))
    assert honest[4] & 0xC0 == 0x80, "a four-byte content size at offset 5"
    for claim in (1_000, 69_999):
        lying = honest[:5] + struct.pack("<I", claim) + honest[9:]
        with pytest.raises(CorruptChunk):
            unpack(b"\x01" + lying, claim, 1)


def test_a_frame_without_a_content_size_is_refused():
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=False)
    with pytest.raises(CorruptChunk, match="does not state its content size"):
        unpack(b"\x01" + compressor.compress(bytes(1000)), 1000, 1)


def test_a_frame_of_fewer_bytes_is_corrupt():
    with pytest.raises(CorruptChunk, match="999 bytes"):
        unpack(b"\x01" + bomb(999), 1000, 1)


def test_the_largest_claims_are_refused():
    huge = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 2**63) + b"\x01\x00\x00"
    with pytest.raises(DecompressionBomb, match=str(2**63)):
        unpack(b"\x01" + huge, 1000, 1)


def test_unknown_packings_are_refused():
    with pytest.raises(UnknownPacking, match="lz4"):
        packing(msgspec.structs.replace(ZSTD, id="lz4"))
