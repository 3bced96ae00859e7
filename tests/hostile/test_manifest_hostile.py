"""Headers and seals of peers that are broken or mean harm: each its own error, nothing else."""

import random
import tracemalloc

import msgspec
import pytest

from cachelink_core import limits
from cachelink_core.codec_spec import INT4, ZSTD
from cachelink_core.errors import (
    CacheLinkError,
    ManifestError,
    UnknownCodec,
    UnknownPacking,
    UnsupportedVersion,
)
from cachelink_core.manifest import decode_header, decode_seal, encode_header, encode_seal
from cachelink_core.testing import handoffs

EXACT = handoffs.header()
INT4_ZSTD = handoffs.header(codec=INT4, packing=ZSTD)
MAPPED = handoffs.header(mapper="c" * 64)
SEAL = handoffs.commit(EXACT).seal
HUGE = 2**63
ABSENT = object()


def plain(value) -> dict:
    return msgspec.msgpack.decode(encode_header(value) if value is not SEAL else encode_seal(value))


def altered(value, path: str, new) -> bytes:
    """Bytes of ``value`` with one field, by its dotted path, replaced or left out."""
    document = plain(value)
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    at = document
    for step in way:
        at = at[step]
    if new is ABSENT:
        del at[last]
    else:
        at[last] = new
    return msgspec.msgpack.encode(document)


WRONG_FIELDS = [
    ("schema_version", [0, -1, HUGE, 2**64 - 1, "1", None, 1.0], ManifestError),
    ("min_reader_version", [0, -1, HUGE, "1", None], ManifestError),
    ("min_reader_version", [2, 2**31 - 1], UnsupportedVersion),
    ("handoff_id", ["", "a" * 129, "a b", "../x", "a\n", 7, None, b"x"], ManifestError),
    ("sender_epoch", ["", "a" * 129, "é", 7], ManifestError),
    ("identity", [None, [], {}, "x"], ManifestError),
    ("identity.architecture", ["", "x" * 201, 5], ManifestError),
    ("identity.config_digest", ["", "1" * 63, "G" * 64, b"1" * 64], ManifestError),
    ("identity.weights_digest", ["1" * 65, "1" * 64 + "\n", None], ManifestError),
    ("identity.vocabulary_digest", ["1" * 63], ManifestError),
    ("identity.template_digest", ["A" * 64], ManifestError),
    ("identity.dtype", ["int8", "", None, 3], ManifestError),
    ("identity.rope", [None, [], "x", {"a": float("nan")}, {"a": b"x"}], ManifestError),
    ("identity.rope", [{"a": {1: 2}}, {"a": [[[[[[[[[1]]]]]]]]]}], ManifestError),
    ("identity.layers", [[], None, {}, ["x"]], ManifestError),
    ("identity.layers", [plain(EXACT)["identity"]["layers"] * 342], ManifestError),
    ("identity.layers.0.kv_heads", [0, -1, limits.MAX_KV_HEADS + 1, HUGE, "2"], ManifestError),
    ("identity.layers.0.head_dim", [0, limits.MAX_HEAD_DIM + 1, HUGE], ManifestError),
    ("identity.layers.0.attention", ["mla", "", None], ManifestError),
    ("identity.layers.0.window", [-1, 5, HUGE], ManifestError),
    ("identity.layers.1.window", [0, -1], ManifestError),
    ("identity.layers.0.key_layout", ["rotary", 1], ManifestError),
    ("identity.layers.0.rotary_dim", [9, -1, HUGE], ManifestError),
    ("identity.max_positions", [0, -1, None], ManifestError),
    ("identity.adapter_digest", ["x", "1" * 63, "\n"], ManifestError),
    ("token_ids", [b"123", b"\x00" * 5, "text", [1, 2], None], ManifestError),
    ("token_ids", [bytes(4 * limits.MAX_PREFIX_TOKENS + 4)], ManifestError),
    ("position_base", [1, -1, HUGE - 1, HUGE, 2**64 - 1, None], ManifestError),
    ("space", ["content", "", "world", 1], ManifestError),
    ("block_tokens", [0, 15, -16, limits.MAX_BLOCK_TOKENS + 1, HUGE, "16"], ManifestError),
    ("block_tokens", [17, 32], ManifestError),  # the runs no longer tile it
    ("runs", [[], None, [[0, 2, 0]], [[0, 2, 0, 16, 1]], ["x"]], ManifestError),
    ("runs", [[[0, 6, 0, 8]], [[0, 6, 0, 16]] * 2, [[0, 4, 0, 16]]], ManifestError),
    ("runs.0.0", [1, -1, HUGE, 2**64 - 1, "0"], ManifestError),
    ("runs.0.1", [0, 1, 3, 7, -1, HUGE, 2**64 - 1], ManifestError),
    ("runs.0.2", [1, -1, HUGE], ManifestError),
    ("runs.0.3", [0, 15, 17, HUGE, 2**64 - 1], ManifestError),
    ("codec", [None, [], "native", {}], CacheLinkError),
    ("codec.id", ["int2", "", None, 4, "pickle"], UnknownCodec),
    ("codec.key_group_tokens", [128], UnknownCodec),
    ("codec.value_group_channels", [64], UnknownCodec),
    ("codec.sink_tokens", [4], UnknownCodec),
    ("codec.key_group_tokens", [-1, 4097, HUGE], ManifestError),
    ("packing", [None, [], {}], CacheLinkError),
    ("packing.id", ["gzip", "", None, 1], UnknownPacking),
    ("packing.level", [-1, 23, HUGE], ManifestError),
    ("trust", ["lossy", "mapped", "perfect", None], ManifestError),
    ("mapper", ["", "some", "C" * 64, "none\n", None, "any"], ManifestError),
    ("rope_tables_digest", ["5" * 64, "5", None], ManifestError),
    ("query_frame", [None, [], {"middle": ""}], ManifestError),
    ("query_frame.before", [None, b"x", "x" * 65_537], ManifestError),
    ("lease_s", [0.0, 0.5, 601.0, -1.0, float("nan"), float("inf"), "30", None], ManifestError),
    ("unknown", [1], ManifestError),
    ("identity.unknown", [1], ManifestError),
    ("identity.layers.0.unknown", [1], ManifestError),
    ("codec.unknown", [1], ManifestError),
]
CASES = [(path, new, error) for path, news, error in WRONG_FIELDS for new in news]


@pytest.mark.parametrize(("path", "new", "error"), CASES)
def test_each_field_wrong_in_turn(path, new, error):
    with pytest.raises(error):
        decode_header(altered(EXACT, path, new))


def test_every_field_was_tried():
    tried = {path.partition(".")[0] for path, _, _ in CASES}
    assert set(type(EXACT).__struct_fields__) <= tried
    tried = {path.split(".")[1] for path, _, _ in CASES if path.startswith("identity.")}
    assert set(type(EXACT.identity).__struct_fields__) <= tried


@pytest.mark.parametrize("name", type(EXACT).__struct_fields__)
def test_a_field_that_is_missing_is_refused(name):
    with pytest.raises(ManifestError):
        decode_header(altered(EXACT, name, ABSENT))


@pytest.mark.parametrize(
    ("header", "path", "new", "error", "word"),
    [
        (INT4_ZSTD, "space", "rotated", ManifestError, "space is 'rotated'"),
        (INT4_ZSTD, "rope_tables_digest", "", ManifestError, "rope_tables_digest is missing"),
        (INT4_ZSTD, "trust", "exact", ManifestError, "gives 'lossy'"),
        (INT4_ZSTD, "codec.key_group_tokens", 0, UnknownCodec, "multiple of 128"),
        (INT4_ZSTD, "codec.key_group_tokens", 130, UnknownCodec, "multiple of 128"),
        (INT4_ZSTD, "codec.value_group_channels", 0, UnknownCodec, "at least 1"),
        (INT4_ZSTD, "mapper", "any", ManifestError, "gives 'mapped'"),
        (MAPPED, "mapper", "none", ManifestError, "space is 'content'"),
        (MAPPED, "rope_tables_digest", "5" * 64, ManifestError, "has no meaning"),
        (MAPPED, "trust", "lossy", ManifestError, "gives 'mapped'"),
    ],
)
def test_fields_that_contradict_each_other_are_named(header, path, new, error, word):
    with pytest.raises(error, match=word):
        decode_header(altered(header, path, new))


@pytest.mark.parametrize(
    "value",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 items
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # text
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x91" * 1_000_000,  # nested arrays
        b"\x81\xa1a" * 100_000,  # nested maps
    ],
)
def test_declared_sizes_cost_no_memory(value):
    marker = msgspec.msgpack.encode("marker-text")
    document = altered(EXACT, "identity.rope", {"a": "marker-text"}).replace(marker, value)
    for data in (value, document):
        tracemalloc.start()
        with pytest.raises(ManifestError):
            decode_header(data)
        with pytest.raises(ManifestError):
            decode_seal(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 4 * limits.MIB


def test_a_header_above_its_limit_is_not_even_parsed():
    with pytest.raises(ManifestError, match=str(limits.MAX_HEADER_BYTES)):
        decode_header(bytes(limits.MAX_HEADER_BYTES + 1))
    with pytest.raises(ManifestError, match=str(limits.MAX_SEAL_BYTES)):
        decode_seal(bytes(limits.MAX_SEAL_BYTES + 1))


def _cuts(data: bytes) -> list[int]:
    rng = random.Random(7)
    return sorted({*range(0, len(data), 1024), *(rng.randrange(len(data)) for _ in range(200))})


def test_a_header_cut_anywhere_is_refused():
    data = encode_header(handoffs.header(5_000))
    for length in _cuts(data):
        with pytest.raises(ManifestError):
            decode_header(data[:length])


def test_a_seal_cut_anywhere_is_refused():
    data = encode_seal(handoffs.commit(handoffs.header(2_000)).seal)
    for length in _cuts(data):
        with pytest.raises(ManifestError):
            decode_seal(data[:length])


def test_bytes_after_the_end_are_refused():
    for extra in (b"\x00", b"\xc0", encode_header(EXACT)):
        with pytest.raises(ManifestError):
            decode_header(encode_header(EXACT) + extra)
        with pytest.raises(ManifestError):
            decode_seal(encode_seal(SEAL) + extra)


def test_random_bytes_and_random_damage_raise_nothing_else():
    rng = random.Random(11)
    data, seal = encode_header(INT4_ZSTD), encode_seal(SEAL)
    for _ in range(5_000):
        source = rng.choice([data, seal])
        damaged = bytearray(source)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        decode = decode_header if source is data else decode_seal
        for junk in (bytes(damaged), rng.randbytes(rng.randrange(64))):
            try:
                decode(junk)
            except CacheLinkError:
                continue


@pytest.mark.parametrize(
    ("path", "news"),
    [
        ("handoff_id", ["", "a b", None]),
        ("manifest_digest", [b"", bytes(31), bytes(33), "x" * 32]),
        ("chunk_count", [-1, HUGE, 2**64 - 1, "1", None]),
        ("chunks", [None, {}, [[1, 2, 3]], [[0, 0, 1, 1, bytes(16), 0]]]),
        ("chunks.0.0", [-1, HUGE, None]),
        ("chunks.0.1", [-1, HUGE, "0"]),
        ("chunks.0.2", [-1, HUGE]),
        ("chunks.0.3", [-1, HUGE]),
        ("chunks.0.4", [b"", bytes(15), bytes(17), "x" * 16]),
        ("root", [b"", bytes(31), None]),
        ("timings", [None, [], {"unknown": 1}]),
        ("unknown", [1]),
    ],
)
def test_each_field_of_a_seal_wrong_in_turn(path, news):
    for new in news:
        with pytest.raises(ManifestError):
            decode_seal(altered(SEAL, path, new))


def test_more_records_than_a_handoff_can_have_are_refused():
    records = plain(SEAL)["chunks"][:1] * (limits.MAX_CHUNKS + 1)
    with pytest.raises(ManifestError):
        decode_seal(altered(SEAL, "chunks", records))
