"""Builds the header of a handoff from an engine and a prefix."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from cachelink_core import limits
from cachelink_core.codec_spec import CodecSpec, PackingSpec, expected_trust
from cachelink_core.engine.base import Engine
from cachelink_core.layout import plan_runs
from cachelink_core.manifest import (
    MAPPER_NONE,
    MIN_READER_VERSION,
    SCHEMA_VERSION,
    Header,
    QueryFrame,
    pack_ids,
)


def mint_id() -> str:
    """A fresh id for a handoff or an epoch: 128 random bits, so that two daemons never collide."""
    return secrets.token_hex(16)


def make_header(
    engine: Engine,
    ids: Sequence[int],
    codec: CodecSpec,
    packing: PackingSpec,
    *,
    sender_epoch: str,
    handoff_id: str = "",
    block_tokens: int = limits.DEFAULT_BLOCK_TOKENS,
    frame: QueryFrame | None = None,
    lease_s: float = limits.DEFAULT_LEASE_S,
    mapper: str = MAPPER_NONE,
) -> Header:
    """The header that offers the cache of ``ids`` as computed by ``engine``'s model.

    An exact cache for the same model travels in rotated space, so that it arrives bit for bit;
    everything that is quantized or translated travels in content space.

    Raises:
        ManifestError: the parts do not fit each other.
    """
    identity = engine.identity
    mapped = mapper != MAPPER_NONE
    content = codec.quantized or mapped
    header = Header(
        schema_version=SCHEMA_VERSION,
        min_reader_version=MIN_READER_VERSION,
        handoff_id=handoff_id or mint_id(),
        sender_epoch=sender_epoch,
        identity=identity,
        token_ids=pack_ids(ids),
        space="content" if content else "rotated",
        block_tokens=block_tokens,
        runs=plan_runs(identity.layers, identity.dtype, block_tokens),
        codec=codec,
        packing=packing,
        trust=expected_trust(codec, identity.dtype, mapped=mapped),
        mapper=mapper,
        rope_tables_digest=(engine.rope_tables_digest(len(ids)) if content and not mapped else ""),
        query_frame=frame or QueryFrame(),
        lease_s=lease_s,
    )
    header.check()
    return header
