"""Everything that can be wrong with a handoff: refused with its own error, counted, nothing left."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from cachelink_core import errors, limits
from cachelink_core.codec_spec import ZSTD, CodecSpec
from cachelink_core.handoff import chunk_digest
from cachelink_core.identity import LayerGeometry
from cachelink_core.layout import Run
from cachelink_core.rpc import frames
from cachelink_core.rpc.client import HeldCache, HeldHandoff, TokenIds, VerbatimText
from tests.loopback.nodes import pair_of
from tests.loopback.offers import IDS, Offer, slowly

on_both_planes = pytest.mark.usefixtures("plane")


@pytest.fixture(params=["grpc", "tcp"])
def plane(request, monkeypatch):
    monkeypatch.setattr(Offer, "plane", request.param)
    return request.param


def rejected(pair, metric: str, reason: str) -> float:
    return pair.receiver.metrics.value(metric, reason=reason)


@pytest.fixture
def untouched(pair):
    """After the test: nothing reserved, nothing visible, and the next handoff works."""
    yield
    deadline_s = time.monotonic() + 5.0
    while pair.receiver_node.parts.store.stats().reserved_bytes and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert pair.receiver_node.parts.store.stats().reserved_bytes == 0
    assert pair.ask_receiver.caches().caches == ()
    receipt = pair.ask_sender.handoff(TokenIds(IDS), "local", codec="int8")
    assert pair.ask_receiver.answer(HeldCache(receipt.cache_id), TokenIds((5,))).text() is not None


D = "ab" * 32
IDENTITY_CHANGES = {
    "architecture": "OtherForCausalLM",
    "config_digest": D,
    "weights_digest": D,
    "vocabulary_digest": D,
    "template_digest": D,
    "rope": {"rope_type": "linear", "factor": 2.0},
    "max_positions": 17,
    "adapter_digest": D,
}


@pytest.mark.parametrize("field", IDENTITY_CHANGES)
def test_wrong_identity_is_refused_by_name(pair, untouched, field):
    offer = Offer(pair)
    other = msgspec.structs.replace(offer.header.identity, **{field: IDENTITY_CHANGES[field]})
    before = rejected(pair, "cachelink_manifest_rejected_total", "identity_mismatch")
    with pytest.raises(errors.IdentityMismatch, match=field) as caught:
        offer.reserve(offer.changed(identity=other))
    assert str(getattr(offer.header.identity, field))[:20] in str(caught.value) or field == "rope"
    after = rejected(pair, "cachelink_manifest_rejected_total", "identity_mismatch")
    assert after == before + 1


@pytest.mark.parametrize(
    "change",
    [{"kv_heads": 3}, {"head_dim": 32}, {"attention": "sliding", "window": 9}, {"rotary_dim": 4}],
)
def test_wrong_geometry_is_refused_by_name(pair, untouched, change):
    offer = Offer(pair)
    layers = list(offer.header.identity.layers)
    layers[1] = msgspec.structs.replace(layers[1], **change)
    other = msgspec.structs.replace(offer.header.identity, layers=tuple(layers))
    with pytest.raises(errors.IdentityMismatch, match=rf"layers\[1\]\.{next(iter(change))}"):
        offer.reserve(offer.changed(identity=other))


def test_dtype_is_part_of_the_identity(pair, untouched):
    offer = Offer(pair)
    other = msgspec.structs.replace(offer.header.identity, dtype="float16")
    with pytest.raises((errors.IdentityMismatch, errors.ManifestError), match=r"dtype|runs"):
        offer.reserve(offer.changed(identity=other))


HEADER_CHANGES = [
    ("schema 9 needs reader 9", {"min_reader_version": 9}, errors.UnsupportedVersion),
    ("odd ids", {"token_ids": b"\x01\x00\x00"}, errors.ManifestError),
    ("position base", {"position_base": 1}, errors.ManifestError),
    ("position base 2**63", {"position_base": 2**63}, errors.ManifestError),
    ("space", {"space": "content"}, errors.ManifestError),
    ("trust", {"trust": "lossy"}, errors.ManifestError),
    ("lease", {"lease_s": 1e9}, errors.ManifestError),
    ("lease 0", {"lease_s": 0.0}, errors.ManifestError),
    ("lease NaN", {"lease_s": float("nan")}, errors.ManifestError),
    ("block tokens 2**63", {"block_tokens": 2**63}, errors.ManifestError),
    ("no runs", {"runs": ()}, errors.ManifestError),
    ("hole", {"runs": (Run(0, 2, 0, 16),)}, errors.ManifestError),
    ("overlap", {"runs": (Run(0, 4, 0, 16), Run(3, 1, 0, 16))}, errors.ManifestError),
    ("run of 2**62 tensors", {"runs": (Run(0, 2**62, 0, 16),)}, errors.ManifestError),
    ("tables", {"rope_tables_digest": D}, errors.ManifestError),
    ("codec id", {"codec": {"id": "int2"}}, errors.UnknownCodec),
    ("codec groups", {"codec": CodecSpec("native", 128, 64, 4)}, errors.UnknownCodec),
    ("packing id", {"packing": {"id": "lz4", "level": 1}}, errors.UnknownPacking),
    ("mapper", {"mapper": "any", "space": "content", "trust": "mapped"}, errors.IncompatiblePeer),
    ("a vocabulary's end", {"token_ids": b"\xff\xff\xff\x7f" * 20}, errors.InvalidRequest),
]


@pytest.mark.parametrize(
    ("change", "error"), [c[1:] for c in HEADER_CHANGES], ids=[c[0] for c in HEADER_CHANGES]
)
def test_a_wrong_header_is_refused(pair, untouched, change, error):
    offer = Offer(pair)
    before = rejected(pair, "cachelink_manifest_rejected_total", error.reason)
    began = time.monotonic()
    with pytest.raises(errors.CacheLinkError) as caught:
        offer.reserve(offer.changed(**change))
    assert type(caught.value) is error
    assert time.monotonic() - began < 1.0
    assert rejected(pair, "cachelink_manifest_rejected_total", error.reason) == before + 1


def test_garbage_and_truncated_headers_are_refused(pair, untouched):
    offer = Offer(pair)
    good = offer.changed()
    for data in (b"", b"\x00", b"\xc1", good[:-1], good[: len(good) // 2], good + b"\x00"):
        with pytest.raises(errors.ManifestError):
            offer.reserve(data or b"\x80")


def test_a_cache_beyond_the_budget_is_refused_at_once(engines, pair):
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    with pair_of(sending, receiving, receiver_config={"store": {"budget": "200KB"}}) as small:
        offer = Offer(small, ids=IDS * 4)
        began = time.monotonic()
        with pytest.raises(errors.BudgetExceeded, match="200000"):
            offer.reserve()
        assert time.monotonic() - began < 0.5
        assert small.receiver_node.parts.store.stats().reserved_bytes == 0


def test_too_long_for_the_window(engines):
    sending, receiving = engines("llama"), engines("llama", side="receiver")
    with pair_of(sending, receiving) as pair:
        window = receiving.identity.max_positions
        offer = Offer(pair)
        ids = tuple(5 for _ in range(window))
        from cachelink_core.manifest import pack_ids

        with pytest.raises(errors.QueryTooLong, match=str(window)):
            offer.reserve(offer.changed(token_ids=pack_ids(ids)))


def broken_push(pair, change, codec="native"):
    offer = Offer(pair, codec)
    offer.reserve()
    messages = change(offer, offer.messages())
    return offer, messages


def chunk_again(data: bytes, payload: bytes) -> bytes:
    """The same chunk with another payload and a digest that fits it."""
    chunk = frames.decode_frame(data)
    view = memoryview(payload)
    return frames.encode_chunk(
        chunk.block, chunk.run, chunk_digest(chunk.block, chunk.run, view), [view]
    )


def flip(data: bytes, at: int = -1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x10
    return bytes(changed)


def moved(data: bytes) -> bytes:
    chunk = frames.decode_frame(data)
    return frames.encode_chunk(chunk.block + 1, chunk.run, chunk.digest, [chunk.payload])


def far(data: bytes) -> bytes:
    chunk = frames.decode_frame(data)
    return frames.encode_chunk(2**31, chunk.run, chunk.digest, [chunk.payload])


STREAMS = [
    ("no commit", lambda o, m: m[:-1], errors.TruncatedStream),
    ("nothing but open", lambda o, m: m[:1], errors.TruncatedStream),
    ("commit at once", lambda o, m: [m[0], m[-1]], errors.MissingChunk),
    ("a chunk is missing", lambda o, m: [*m[:2], *m[3:]], errors.MissingChunk),
    ("the last chunk is missing", lambda o, m: [*m[:-2], m[-1]], errors.MissingChunk),
    ("a chunk comes twice", lambda o, m: [*m[:3], m[2], *m[3:]], errors.DuplicateChunk),
    ("a bit of a payload", lambda o, m: [*m[:2], flip(m[2]), *m[3:]], errors.ChecksumMismatch),
    ("another's place", lambda o, m: [m[0], moved(m[1]), *m[1:]], errors.ChecksumMismatch),
    ("no such block", lambda o, m: [m[0], far(m[1]), *m[1:]], errors.UnexpectedChunk),
    ("a shorter chunk", lambda o, m: [m[0], chunk_again(m[1], b"abc"), *m[2:]], errors.WrongLength),
    ("open twice", lambda o, m: [m[0], m[0], *m[1:]], errors.RemoteProtocolError),
]


@on_both_planes
@pytest.mark.parametrize(("change", "error"), [s[1:] for s in STREAMS], ids=[s[0] for s in STREAMS])
def test_a_wrong_stream_publishes_nothing(pair, untouched, change, error):
    offer, messages = broken_push(pair, change)
    before = rejected(pair, "cachelink_chunk_rejected_total", error.reason)
    with pytest.raises(errors.CacheLinkError) as caught:
        offer.push(messages)
    assert type(caught.value) is error
    assert rejected(pair, "cachelink_chunk_rejected_total", error.reason) == before + 1
    with pytest.raises(errors.UnknownCache):
        pair.ask_receiver.answer(HeldCache(offer.reservation.cache_id), TokenIds((5,))).text()
    status = pair.transfer.status(offer.header.handoff_id)
    assert status.state == "Failed"
    assert type(status.error) is error


@on_both_planes
def test_a_stream_that_begins_with_a_chunk_is_refused(pair, untouched):
    offer, messages = broken_push(pair, lambda o, m: m)
    with pytest.raises(errors.RemoteProtocolError, match="open"):
        offer.push(messages[1:])
    pair.transfer.abort(offer.header.handoff_id, "test")


@on_both_planes
def test_a_seal_that_lies_is_refused(pair, untouched):
    offer, messages = broken_push(pair, lambda o, m: m)
    seal = frames.decode_frame(messages[-1]).seal
    record = msgspec.structs.replace(seal.chunks[0], wire_bytes=seal.chunks[0].wire_bytes + 1)
    lying = msgspec.structs.replace(seal, chunks=(record, *seal.chunks[1:]))
    with pytest.raises(errors.SealMismatch):
        offer.push([*messages[:-1], frames.encode_commit(lying)])


@on_both_planes
def test_a_scale_that_is_missing_or_not_a_number_is_refused(pair, untouched):
    def missing(offer, messages):
        payload = bytes(frames.decode_frame(messages[1]).payload)
        return [messages[0], chunk_again(messages[1], payload[2:]), *messages[2:]]

    offer, messages = broken_push(pair, missing, codec="int8")
    with pytest.raises(errors.WrongLength):
        offer.push(messages)

    def not_a_number(offer, messages):
        chunk = frames.decode_frame(messages[3])
        payload = bytearray(chunk.payload)
        values = offer.header.layout.slices(chunk.block, chunk.run)[1]
        assert values.kind == "V"
        payload[values.offset : values.offset + 2] = b"\xff\xff"  # a bfloat16 scale: not a number
        return [*messages[:3], chunk_again(messages[3], bytes(payload)), *messages[4:]]

    ids = IDS + tuple(3 + i % 200 for i in range(200))
    offer = Offer(pair, "int4", ids)
    offer.reserve()
    messages = offer.messages()
    with pytest.raises(errors.CorruptChunk):
        offer.push(not_a_number(offer, messages))


@on_both_planes
def test_a_decompression_bomb_is_refused_before_it_costs_memory(pair, untouched):
    import zstandard

    def bomb(offer, messages):
        chunk = frames.decode_frame(messages[1])
        raw = offer.header.layout.raw_bytes(chunk.block, chunk.run)
        frame = zstandard.ZstdCompressor().compress(bytes(64 * limits.MIB))
        assert len(frame) < raw
        escape = bytes(chunk.payload[:1])
        return [messages[0], chunk_again(messages[1], escape + frame), *messages[2:]]

    offer = Offer(pair, "int8+zstd")
    assert offer.header.packing == ZSTD
    offer.reserve()
    messages = offer.messages()
    packed = [m for m in messages[1:-1] if frames.decode_frame(m).payload[0] != 0]
    assert packed, "no chunk was packed: the test would test nothing"
    at = messages.index(packed[0])
    messages = [messages[0], packed[0], *messages[1:at], *messages[at + 1 :]]
    with pytest.raises((errors.DecompressionBomb, errors.CorruptChunk)):
        offer.push(bomb(offer, messages))


def test_no_flipped_bit_is_ever_accepted(pair, untouched):
    """Random single bits of random messages of a stream; each refused, none installed."""
    random.seed(20261130)
    offer = Offer(pair, "int8", IDS[:20])
    for trial in range(60):
        header = msgspec.structs.replace(offer.header, handoff_id=f"flip{trial}")
        offer.header = header
        offer.reserve()
        messages = offer.messages()
        at = random.randrange(1, len(messages))
        bit = random.randrange(8 * len(messages[at]))
        changed = bytearray(messages[at])
        changed[bit // 8] ^= 1 << (bit % 8)
        messages[at] = bytes(changed)
        with pytest.raises(errors.CacheLinkError):
            offer.push(messages)
    assert pair.ask_receiver.caches().caches == ()


@on_both_planes
def test_a_second_reserve_with_a_live_id_is_refused_and_harms_nothing(pair, untouched):
    offer = Offer(pair)
    offer.reserve()
    with pytest.raises(errors.DuplicateHandoff, match=offer.header.handoff_id):
        pair.transfer.reserve(offer.changed())
    receipt = offer.push(offer.messages())
    assert receipt.state == "Installed"
    pair.ask_receiver.evict(receipt.cache_id)


@on_both_planes
def test_an_old_epoch_is_refused(pair, untouched):
    offer, messages = broken_push(pair, lambda o, m: m)
    stale = frames.encode_open(offer.header.handoff_id, "0" * 32)
    with pytest.raises(errors.StaleEpoch):
        offer.push([stale, *messages[1:]])


def test_a_receiver_that_is_not_listed_is_denied(pair, untouched):
    for name in ("elsewhere", "127.0.0.1:1"):
        with pytest.raises(errors.Denied, match=name):
            pair.ask_sender.handoff(TokenIds(IDS), name)


@on_both_planes
def test_a_reservation_without_a_stream_is_freed_when_its_lease_ends(pair, untouched):
    offer = Offer(pair, lease_s=1.0)
    offer.reserve()
    store = pair.receiver_node.parts.store
    assert store.stats().reserved_bytes > 0
    before = pair.receiver.metrics.value("cachelink_lease_expired_total")
    deadline_s = time.monotonic() + 4.0
    while store.stats().reserved_bytes and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert store.stats().reserved_bytes == 0
    assert pair.receiver.metrics.value("cachelink_lease_expired_total") == before + 1
    assert pair.transfer.status(offer.header.handoff_id).state == "Expired"
    with pytest.raises(errors.HandoffExpired):
        offer.push(offer.messages())


@on_both_planes
def test_a_stream_that_outlives_its_lease_is_refused(pair, untouched):
    offer = Offer(pair, lease_s=1.0)
    offer.reserve()
    messages = offer.messages()
    with pytest.raises(errors.CacheLinkError) as caught:
        offer.push(slowly([messages[0], *messages[1:]], pause_s=2.0), deadline_s=30.0)
    assert isinstance(caught.value, errors.HandoffExpired)


@on_both_planes
def test_after_a_failure_the_prefix_can_be_read_again_by_id(pair, untouched):
    offer, messages = broken_push(pair, lambda o, m: m[:-1])
    with pytest.raises(errors.TruncatedStream):
        offer.push(messages)
    for context in (HeldHandoff(offer.header.handoff_id), HeldCache(offer.reservation.cache_id)):
        with pytest.raises(errors.UnknownCache):
            pair.ask_receiver.answer(context, VerbatimText("abc")).text()
        answer = pair.ask_receiver.answer(context, VerbatimText("abc"), on_failure="recompute")
        answer.text()
        assert answer.final.path == "recompute"
        assert "truncated_stream" in answer.final.path_reason
        assert answer.final.cached_tokens == 0


def test_geometry_of_mla_cannot_even_be_said(pair):
    """A cache that is not heads x dim has no place in a manifest."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kv_heads": 0, "head_dim": 512}, LayerGeometry)
