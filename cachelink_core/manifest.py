"""The manifest of one handoff: the header, sent before the first block, and the seal, sent last.

Bytes are canonical msgpack; the digest is BLAKE3-256 over them. The JSON form is for people and has
the same fields (byte strings in base64). What each field means on the wire: proto/README.md; the
JSON Schema in manifests/ is generated from these classes and tested against them.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3

from cachelink_core import limits
from cachelink_core.codec_spec import CodecSpec, PackingSpec, Space, Trust, expected_trust
from cachelink_core.errors import ManifestError, UnknownCodec, UnknownPacking, UnsupportedVersion
from cachelink_core.identity import LayerGeometry, ModelIdentity, canonical_bytes
from cachelink_core.layout import CacheLayout, Run

SCHEMA_VERSION: Final = 1
"""Raised when a field is added or changes meaning.

History:
    1  first version.
"""

MIN_READER_VERSION: Final = 1
"""The oldest reader that understands a header of this version. Raised together with
SCHEMA_VERSION when a reader that ignores the new fields would install a wrong cache."""

_MAX_ROPE_DEPTH: Final = 8
"""Models have one level by layer type and one of parameters."""

MAPPER_NONE: Final = "none"
MAPPER_ANY: Final = "any"

HandoffId = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,128}$(?!\\n)")]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Version = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class QueryFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rendered template text around a question; both empty for a plain prompt.

    It may hold special tokens of the model's template: it is tokenized with them, the question
    between is not.
    """

    before: Annotated[str, msgspec.Meta(max_length=65_536)] = ""
    after: Annotated[str, msgspec.Meta(max_length=65_536)] = ""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, kw_only=True):
    """What the receiver decides on: complete before the sender's prefill begins.

    Attributes:
        schema_version: SCHEMA_VERSION of the writer.
        min_reader_version: the oldest reader that may install this cache.
        handoff_id: minted by the sender, unique within its epoch.
        sender_epoch: a new one for every life of the sender's process.
        identity: of the sender's model.
        token_ids: the prefix as little-endian u32.
        position_base: position of the first token; only 0 is accepted.
        space: keys in ``content`` space (RoPE removed) or ``rotated`` as the model caches them.
        block_tokens: tokens of a full block.
        runs: how each block is cut into chunks.
        codec: of the payload.
        packing: of the payload.
        trust: what the installed cache will be worth.
        mapper: digest of the mapper wanted, ``any`` or ``none``.
        rope_tables_digest: of the sender's cos/sin tables at positions 0, 1 and n-1; empty when
            keys travel rotated.
        query_frame: template text around a question.
        lease_s: seconds without progress after which the receiver frees the reservation.
    """

    schema_version: Version
    min_reader_version: Version
    handoff_id: HandoffId
    sender_epoch: HandoffId
    identity: ModelIdentity
    token_ids: Annotated[bytes, msgspec.Meta(max_length=4 * limits.MAX_PREFIX_TOKENS)]
    position_base: Count = 0
    space: Space
    block_tokens: Annotated[
        int, msgspec.Meta(ge=limits.MIN_BLOCK_TOKENS, le=limits.MAX_BLOCK_TOKENS)
    ]
    runs: Annotated[tuple[Run, ...], msgspec.Meta(min_length=1, max_length=limits.MAX_CHUNKS)]
    codec: CodecSpec
    packing: PackingSpec
    trust: Trust
    mapper: Annotated[str, msgspec.Meta(pattern="^(none|any|[0-9a-f]{64})$(?!\\n)")] = MAPPER_NONE
    rope_tables_digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$(?!\\n)")] = ""
    query_frame: QueryFrame = QueryFrame()
    lease_s: Annotated[float, msgspec.Meta(ge=limits.MIN_LEASE_S, le=limits.MAX_LEASE_S)] = (
        limits.DEFAULT_LEASE_S
    )

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The prefix's token ids."""
        return unpack_ids(self.token_ids)

    @property
    def tokens(self) -> int:
        """n, the prefix's length."""
        return len(self.token_ids) // 4

    @cached_property
    def layout(self) -> CacheLayout:
        """The chunk plan that both sides compute."""
        return CacheLayout(
            self.identity.layers,
            self.identity.dtype,
            self.tokens,
            self.block_tokens,
            self.runs,
            self.codec,
        )

    def check(self) -> None:
        """Checks what the types alone do not: that the fields fit each other.

        Raises:
            ManifestError: naming the field and what it contradicts.
            UnknownCodec: the codec's parameters are not ones that this version decodes.
        """
        if len(self.token_ids) % 4:
            raise ManifestError(f"token_ids has {len(self.token_ids)} bytes, not a multiple of 4")
        if self.position_base:
            raise ManifestError(f"position_base is {self.position_base}; only 0 can be installed")
        _check_plain("identity.rope", self.identity.rope)
        for number, layer in enumerate(self.identity.layers):
            _check_geometry(f"identity.layers[{number}]", layer)
        _check_codec(self.codec)
        mapped = self.mapper != MAPPER_NONE
        content = self.codec.quantized or mapped
        if content != (self.space == "content"):
            raise ManifestError(
                f"space is {self.space!r}, but codec {self.codec.id!r} with mapper "
                f"{self.mapper!r} travels in {'content' if content else 'rotated'} space"
            )
        expected = expected_trust(self.codec, self.identity.dtype, mapped=mapped)
        if self.trust != expected:
            raise ManifestError(
                f"trust is {self.trust!r}, but codec {self.codec.id!r} with mapper "
                f"{self.mapper!r} gives {expected!r}"
            )
        if (self.space == "content" and not mapped) != bool(self.rope_tables_digest):
            raise ManifestError(
                f"rope_tables_digest {'has no meaning' if self.rope_tables_digest else 'is missing'} "
                f"in {self.space} space with mapper {self.mapper!r}"
            )
        self.layout.check_tiling()


class SenderTimings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds on the sender's clock, and its timeline relative to the reply to Reserve.

    Each timeline has one entry a block, in order.
    """

    prefill_s: float = 0.0
    encode_s: float = 0.0
    prefilled_at_s: tuple[float, ...] = ()
    encoded_at_s: tuple[float, ...] = ()
    sent_at_s: tuple[float, ...] = ()


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk as the sender sent it."""

    block: Count
    run: Count
    raw_bytes: Count
    wire_bytes: Count
    digest: Bytes16


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The commit: what the whole handoff must have been.

    Attributes:
        handoff_id: as in the header.
        manifest_digest: BLAKE3-256 of the header's bytes.
        chunk_count: how many chunks were sent or were held already.
        chunks: each one, in the order of the plan.
        root: BLAKE3-256 over the manifest digest and the chunk digests.
        timings: of the sender.
    """

    handoff_id: HandoffId
    manifest_digest: Bytes32
    chunk_count: Count
    chunks: Annotated[tuple[ChunkRecord, ...], msgspec.Meta(max_length=limits.MAX_CHUNKS)]
    root: Bytes32
    timings: SenderTimings = SenderTimings()


class _Versions(msgspec.Struct):
    schema_version: Version
    min_reader_version: Version


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32.

    Raises:
        ManifestError: an id is negative or above 2**32 - 1.
    """
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ManifestError(f"token_ids: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The inverse of ``pack_ids``."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def encode_header(header: Header) -> bytes:
    """Canonical bytes of a header."""
    return canonical_bytes(header)


def decode_header(data: bytes) -> Header:
    """Reads a header and checks it.

    The versions are read first, so that a header of a future version is refused by name instead of
    by whatever field happens to be new. Unknown top-level fields of a newer, readable version are
    ignored; of this version they are an error.

    Raises:
        UnsupportedVersion: it needs a newer reader.
        UnknownCodec: an unknown codec id.
        UnknownPacking: an unknown packing id.
        ManifestError: anything else that is wrong with it.
    """
    if len(data) > limits.MAX_HEADER_BYTES:
        raise ManifestError(f"header has {len(data)} bytes; limit {limits.MAX_HEADER_BYTES}")
    try:
        versions = msgspec.msgpack.decode(data, type=_Versions)
        if versions.min_reader_version > SCHEMA_VERSION:
            raise UnsupportedVersion(
                f"min_reader_version is {versions.min_reader_version}; "
                f"this reader has version {SCHEMA_VERSION}"
            )
        plain: dict[str, Any] = msgspec.msgpack.decode(data, type=dict[str, Any])
        _check_ids_known(plain)
        if versions.schema_version > SCHEMA_VERSION:
            known = set(Header.__struct_fields__)
            header = msgspec.convert(
                {key: value for key, value in plain.items() if key in known}, Header
            )
        else:
            header = msgspec.msgpack.decode(data, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"header: {error}") from error
    header.check()
    if versions.schema_version <= SCHEMA_VERSION and encode_header(header) != data:
        raise ManifestError("header: its bytes are not canonical")
    return header


def encode_seal(seal: Seal) -> bytes:
    """Canonical bytes of a seal."""
    return canonical_bytes(seal)


def decode_seal(data: bytes) -> Seal:
    """Reads a seal. What it says is checked by the session, against what arrived.

    Raises:
        ManifestError: it is malformed.
    """
    if len(data) > limits.MAX_SEAL_BYTES:
        raise ManifestError(f"seal has {len(data)} bytes; limit {limits.MAX_SEAL_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=Seal)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"seal: {error}") from error


def digest(data: bytes) -> bytes:
    """BLAKE3-256 of a header's bytes."""
    return blake3(data).digest()


def seal_root(manifest_digest: bytes, chunk_digests: Sequence[bytes]) -> bytes:
    """BLAKE3-256 over the manifest digest and every chunk digest, in the order of the plan."""
    hasher = blake3(manifest_digest)
    for chunk in chunk_digests:
        hasher.update(chunk)
    return hasher.digest()


def header_to_json(header: Header) -> str:
    """The form for people: indented JSON, byte strings in base64."""
    return msgspec.json.format(msgspec.json.encode(header), indent=2).decode()


def header_from_json(text: str | bytes) -> Header:
    """The inverse of ``header_to_json``.

    Raises:
        ManifestError: it is malformed.
    """
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError as error:
        raise ManifestError(f"header: {error}") from error
    header.check()
    return header


def header_schema() -> dict[str, Any]:
    """The JSON Schema of the JSON form."""
    return msgspec.json.schema(Header)


def _check_ids_known(plain: dict[str, Any]) -> None:
    """Unknown codec and packing ids have errors of their own, before the types are checked."""
    codec, packing = plain.get("codec"), plain.get("packing")
    if isinstance(codec, dict) and codec.get("id") not in ("native", "bf16", "int8", "int4"):
        raise UnknownCodec(f"codec.id is {codec.get('id')!r}; known: native, bf16, int8, int4")
    if isinstance(packing, dict) and packing.get("id") not in ("none", "zstd"):
        raise UnknownPacking(f"packing.id is {packing.get('id')!r}; known: none, zstd")


def _check_plain(path: str, value: Any, depth: int = 0) -> None:
    """RoPE parameters are what JSON can say: anything else has no canonical bytes, or no equality."""
    if depth > _MAX_ROPE_DEPTH:
        raise ManifestError(f"{path} is nested deeper than {_MAX_ROPE_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ManifestError(f"{path} has the key {key!r}, not a string")
            _check_plain(f"{path}.{key}", item, depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(f"{path}[{index}]", item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ManifestError(f"{path} is {value}, not a finite number")
    elif value is not None and not isinstance(value, str | int | float):
        raise ManifestError(f"{path} is a {type(value).__name__}")


def _check_geometry(path: str, layer: LayerGeometry) -> None:
    if (layer.attention == "sliding") != (layer.window > 0):
        raise ManifestError(
            f"{path}.window is {layer.window}, which no {layer.attention} layer has"
        )
    if layer.rotary_dim > layer.head_dim:
        raise ManifestError(
            f"{path}.rotary_dim is {layer.rotary_dim}, above head_dim {layer.head_dim}"
        )


def _check_codec(codec: CodecSpec) -> None:
    grouped = codec.key_group_tokens, codec.value_group_channels
    if codec.quantized and (
        codec.key_group_tokens < limits.TOKEN_CUT
        or codec.key_group_tokens % limits.TOKEN_CUT
        or codec.value_group_channels < 1
    ):
        raise UnknownCodec(
            f"codec {codec.id}: key_group_tokens {grouped[0]} must be a multiple of "
            f"{limits.TOKEN_CUT}, value_group_channels {grouped[1]} at least 1"
        )
    if not codec.quantized and (any(grouped) or codec.sink_tokens):
        raise UnknownCodec(
            f"codec {codec.id} has no groups, but key_group_tokens is {grouped[0]}, "
            f"value_group_channels {grouped[1]}, sink_tokens {codec.sink_tokens}"
        )
