"""A handoff without a model: a valid header of any geometry, and chunks of it with made-up bytes.

The payloads are arbitrary bytes of the planned lengths, so nothing here decodes to a cache; sessions,
frames and manifests do not look inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blake3 import blake3

from cachelink_core.codec_spec import (
    NATIVE,
    NO_PACKING,
    CodecSpec,
    DType,
    PackingSpec,
    expected_trust,
)
from cachelink_core.handoff import HandoffSession, chunk_digest, events
from cachelink_core.identity import LayerGeometry, ModelIdentity
from cachelink_core.layout import Run
from cachelink_core.manifest import (
    MAPPER_NONE,
    Header,
    QueryFrame,
    SenderTimings,
    pack_ids,
)

RECEIVER_EPOCH = "receiver-epoch-1"

FULL = LayerGeometry(kv_heads=2, head_dim=8, rotary_dim=8)
SLIDING = LayerGeometry(kv_heads=1, head_dim=16, attention="sliding", window=24, rotary_dim=16)


def identity(
    layers: Sequence[LayerGeometry] = (FULL, SLIDING, FULL), dtype: DType = "bfloat16"
) -> ModelIdentity:
    """An identity of a model that does not exist."""
    return ModelIdentity(
        architecture="PlantedForCausalLM",
        config_digest="1" * 64,
        weights_digest="2" * 64,
        dtype=dtype,
        vocabulary_digest="3" * 64,
        template_digest="4" * 64,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        layers=tuple(layers),
        max_positions=4_096,
    )


def header(
    tokens: int = 40,
    *,
    layers: Sequence[LayerGeometry] = (FULL, SLIDING, FULL),
    dtype: DType = "bfloat16",
    block_tokens: int = 16,
    runs: Sequence[Run] | None = None,
    codec: CodecSpec = NATIVE,
    packing: PackingSpec = NO_PACKING,
    mapper: str = MAPPER_NONE,
    handoff_id: str = "handoff-1",
) -> Header:
    """A header that passes every check; without ``runs``, each layer is one.

    By default layer 1 slides past block 0, whose run 1 therefore has no chunk.
    """
    mapped = mapper != MAPPER_NONE
    content = codec.quantized or mapped
    return Header(
        schema_version=1,
        min_reader_version=1,
        handoff_id=handoff_id,
        sender_epoch="sender-epoch-1",
        identity=identity(layers, dtype),
        token_ids=pack_ids(range(100, 100 + tokens)),
        space="content" if content else "rotated",
        block_tokens=block_tokens,
        runs=tuple(runs or (Run(2 * i, 2, 0, block_tokens) for i in range(len(layers)))),
        codec=codec,
        packing=packing,
        trust=expected_trust(codec, dtype, mapped=mapped),
        mapper=mapper,
        rope_tables_digest="5" * 64 if content and not mapped else "",
        query_frame=QueryFrame("<before>", "<after>"),
    )


def payload(of: Header, block: int, run: int) -> bytes:
    """Made-up bytes of a chunk's planned length; the same for the same indices."""
    return blake3(f"{block}/{run}".encode()).digest(of.layout.raw_bytes(block, run))


def chunk(of: Header, block: int, run: int) -> events.Chunk:
    """A chunk with its right digest."""
    data = payload(of, block, run)
    return events.Chunk(block, run, memoryview(data), chunk_digest(block, run, data))


def chunks(of: Header) -> Iterator[events.Chunk]:
    """Every chunk of a handoff, in order."""
    return (chunk(of, block, run) for block, run in of.layout.chunks())


def admitted(of: Header, held_blocks: frozenset[int] = frozenset()) -> HandoffSession:
    """A session that was just admitted, at time 0."""
    session = HandoffSession(of, RECEIVER_EPOCH, 0.0)
    session.handle(events.Admit("cache-1", held_blocks), 0.0)
    return session


def receiving(of: Header) -> HandoffSession:
    """A session whose stream is open."""
    session = admitted(of)
    session.handle(events.Open(of.handoff_id, RECEIVER_EPOCH), 0.0)
    return session


def commit(of: Header) -> events.Commit:
    """The commit of a sender that sent everything."""
    sender = receiving(of)
    for each in chunks(of):
        sender.handle(each, 0.0)
    return events.Commit(sender.make_seal(SenderTimings()))
