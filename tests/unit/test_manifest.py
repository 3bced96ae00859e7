"""Header and seal: bytes, digest, JSON and the checks between fields."""

import json

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachelink_core import limits, manifest
from cachelink_core.codec_spec import BF16, INT4, INT8, NATIVE, ZSTD, expected_trust
from cachelink_core.errors import ManifestError, UnsupportedVersion
from cachelink_core.manifest import (
    Header,
    decode_header,
    decode_seal,
    encode_header,
    encode_seal,
    header_from_json,
    header_to_json,
    pack_ids,
    unpack_ids,
)
from cachelink_core.testing import handoffs

MAPPER = "c" * 64
HEADERS = {
    "exact": handoffs.header(),
    "empty": handoffs.header(0),
    "packed": handoffs.header(packing=ZSTD),
    "int8": handoffs.header(codec=INT8),
    "int4": handoffs.header(codec=INT4, packing=ZSTD),
    "rounded": handoffs.header(codec=BF16, dtype="float32"),
    "mapped": handoffs.header(mapper=MAPPER),
    "any mapper": handoffs.header(codec=INT4, mapper="any"),
}


def plain(header: Header = HEADERS["exact"]) -> dict:
    return msgspec.msgpack.decode(encode_header(header))


def with_fields(header: Header = HEADERS["exact"], **changes) -> bytes:
    return encode_header(msgspec.structs.replace(header, **changes))


@pytest.mark.parametrize("name", HEADERS)
def test_bytes_and_json_come_back_as_they_were(name):
    header = HEADERS[name]
    data = encode_header(header)
    assert decode_header(data) == header
    assert encode_header(decode_header(data)) == data
    text = header_to_json(header)
    assert header_from_json(text) == header
    jsonschema.validate(json.loads(text), manifest.header_schema())
    assert manifest.digest(data) != manifest.digest(data + b"\x00")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_ids_come_back(ids):
    assert unpack_ids(pack_ids(ids)) == tuple(ids)


def test_ids_are_little_endian():
    assert pack_ids([1, 0x01020304]) == b"\x01\x00\x00\x00\x04\x03\x02\x01"
    header = handoffs.header(3)
    assert (header.ids, header.tokens) == ((100, 101, 102), 3)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["1"], [1.5]])
def test_ids_that_are_no_u32_are_refused(ids):
    with pytest.raises(ManifestError, match="token_ids"):
        pack_ids(ids)


@pytest.mark.parametrize(
    ("codec", "dtype", "mapped", "trust"),
    [
        (NATIVE, "bfloat16", False, "exact"),
        (NATIVE, "float32", False, "exact"),
        (BF16, "bfloat16", False, "exact"),
        (BF16, "float32", False, "lossy"),
        (BF16, "float16", False, "lossy"),
        (INT8, "bfloat16", False, "lossy"),
        (INT4, "bfloat16", True, "mapped"),
        (NATIVE, "bfloat16", True, "mapped"),
    ],
)
def test_nothing_rounded_is_exact(codec, dtype, mapped, trust):
    assert expected_trust(codec, dtype, mapped=mapped) == trust


def test_a_newer_version_that_this_reader_may_read_loses_only_its_new_fields():
    newer = {**plain(), "schema_version": 7, "new_field": [1, 2]}
    header = decode_header(msgspec.msgpack.encode(newer))
    assert header.schema_version == 7
    assert header.token_ids == HEADERS["exact"].token_ids


def test_a_version_that_needs_a_newer_reader_is_refused_whatever_it_holds():
    newer = {"schema_version": 9, "min_reader_version": 2, "everything": "else"}
    with pytest.raises(UnsupportedVersion, match=r"min_reader_version is 2.*version 1"):
        decode_header(msgspec.msgpack.encode(newer))


def test_the_same_fields_in_another_order_are_not_canonical():
    reordered = dict(reversed(list(plain().items())))
    with pytest.raises(ManifestError, match="canonical"):
        decode_header(msgspec.msgpack.encode(reordered))


def test_a_field_twice_is_not_canonical():
    fields = plain()
    body = b"".join(msgspec.msgpack.encode(part) for item in fields.items() for part in item)
    twice = b"\xde" + (len(fields) + 1).to_bytes(2, "big") + body
    twice += msgspec.msgpack.encode("handoff_id") + msgspec.msgpack.encode("other")
    with pytest.raises(ManifestError, match="canonical"):
        decode_header(twice)


def test_a_header_of_the_most_ids_fits_its_limit():
    header = handoffs.header(
        limits.MAX_PREFIX_TOKENS, layers=[handoffs.FULL] * 60, block_tokens=512
    )
    data = encode_header(header)
    assert len(data) < limits.MAX_HEADER_BYTES
    assert decode_header(data).tokens == limits.MAX_PREFIX_TOKENS


def test_a_seal_of_the_most_chunks_fits_its_frame():
    record = manifest.ChunkRecord(2**31, 2**31, 4 * limits.MIB, 4 * limits.MIB, bytes(16))
    seal = handoffs.commit(HEADERS["empty"]).seal
    full = msgspec.structs.replace(
        seal, chunks=(record,) * limits.MAX_CHUNKS, chunk_count=limits.MAX_CHUNKS
    )
    data = encode_seal(full)
    assert len(data) < limits.MAX_SEAL_BYTES
    assert decode_seal(data) == full


def test_the_schema_describes_every_field():
    definitions = manifest.header_schema()["$defs"]
    assert set(definitions["Header"]["properties"]) == set(Header.__struct_fields__)
    assert definitions["Header"]["additionalProperties"] is False


def test_json_that_contradicts_itself_is_refused_like_bytes():
    text = header_to_json(HEADERS["int4"]).replace('"trust": "lossy"', '"trust": "exact"')
    with pytest.raises(ManifestError, match=r"trust is 'exact'.*gives 'lossy'"):
        header_from_json(text)
