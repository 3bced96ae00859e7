"""A handoff of nothing: the right header, and zeros for every key and value.

The receiver cannot see it: sizes, digests and the seal are all right. What it shows is that answers
come from the cache and from nowhere else. It is also the whole protocol of a sender in one screen.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence

from cachelink_core import limits
from cachelink_core.codec_spec import BF16, NO_PACKING, expected_trust
from cachelink_core.handoff import HandoffSession, events
from cachelink_core.identity import ModelIdentity
from cachelink_core.layout import plan_runs
from cachelink_core.manifest import (
    MIN_READER_VERSION,
    SCHEMA_VERSION,
    Header,
    QueryFrame,
    SenderTimings,
    encode_header,
    pack_ids,
)
from cachelink_core.rpc import frames
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.transfer_types import PushReceipt


def zeroed_header(identity: ModelIdentity, ids: Sequence[int], frame: QueryFrame) -> Header:
    """The header of a zeroed cache.

    Its codec is ``bf16`` and not ``native``, whose bytes are the same for a bfloat16 model: so the
    cache has a name of its own and is never mistaken for the real one.
    """
    block_tokens = limits.DEFAULT_BLOCK_TOKENS
    return Header(
        schema_version=SCHEMA_VERSION,
        min_reader_version=MIN_READER_VERSION,
        handoff_id=secrets.token_hex(16),
        sender_epoch=secrets.token_hex(16),
        identity=identity,
        token_ids=pack_ids(ids),
        space="rotated",
        block_tokens=block_tokens,
        runs=plan_runs(identity.layers, identity.dtype, block_tokens),
        codec=BF16,
        packing=NO_PACKING,
        trust=expected_trust(BF16, identity.dtype, mapped=False),
        query_frame=frame,
    )


def hand_zeros_over(
    client: TransferClient, header: Header, deadline_s: float = limits.CONTROL_DEADLINE_S
) -> PushReceipt:
    """Reserves, streams zeros and commits.

    Raises:
        CacheLinkError: the receiver refused.
    """
    reservation = client.reserve(encode_header(header))
    session = HandoffSession(header, reservation.receiver_epoch, time.monotonic())
    admitted = events.Admit(reservation.cache_id, frozenset(reservation.held_blocks))
    session.handle(admitted, time.monotonic())
    return client.push(_frames(session), deadline_s=deadline_s)


def _frames(session: HandoffSession) -> Iterator[bytes]:
    header = session.header
    opening = events.Open(header.handoff_id, session.receiver_epoch)
    session.handle(opening, time.monotonic())
    yield frames.encode_open(header.handoff_id, session.receiver_epoch)
    for block, run in header.layout.chunks():
        parts = [memoryview(bytes(header.layout.raw_bytes(block, run)))]
        digest = session.send_chunk(block, run, parts, time.monotonic())
        yield frames.encode_chunk(block, run, digest, parts)
    seal = session.make_seal(SenderTimings())
    session.handle(events.Commit(seal), time.monotonic())
    yield frames.encode_commit(seal)
