"""What a node says of itself, as plain values and back, and nothing else."""

from __future__ import annotations

from typing import cast

import msgspec

from cachelink_core.codec_spec import Trust
from cachelink_core.errors import ManifestError
from cachelink_core.identity import ModelIdentity, canonical_bytes
from cachelink_core.planner import Measurement
from cachelink_core.rpc import types
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2 as pb


def cache_list_to(value: types.CacheList) -> pb.ListCachesResponse:
    """To protobuf."""
    return pb.ListCachesResponse(
        caches=[
            pb.CacheInfo(
                cache_id=cache.cache_id,
                handoff_id=cache.handoff_id,
                tokens=cache.tokens,
                bytes=cache.bytes,
                trust=cache.trust,
                codec=cache.codec,
                age_s=cache.age_s,
                idle_s=cache.idle_s,
                pins=cache.pins,
            )
            for cache in value.caches
        ],
        used_bytes=value.used_bytes,
        reserved_bytes=value.reserved_bytes,
        budget_bytes=value.budget_bytes,
    )


def cache_list_from(message: pb.ListCachesResponse) -> types.CacheList:
    """From protobuf."""
    return types.CacheList(
        caches=tuple(
            types.CacheInfo(
                cache_id=cache.cache_id,
                handoff_id=cache.handoff_id,
                tokens=cache.tokens,
                bytes=cache.bytes,
                trust=cast(Trust, cache.trust),
                codec=cache.codec,
                age_s=cache.age_s,
                idle_s=cache.idle_s,
                pins=cache.pins,
            )
            for cache in message.caches
        ),
        used_bytes=message.used_bytes,
        reserved_bytes=message.reserved_bytes,
        budget_bytes=message.budget_bytes,
    )


def node_info_to(value: types.NodeInfo) -> pb.GetNodeInfoResponse:
    """To protobuf."""
    return pb.GetNodeInfoResponse(
        role=value.role,
        version=value.version,
        schema_version=value.schema_version,
        epoch=value.epoch,
        identity=canonical_bytes(value.identity),
        model_name=value.model_name,
        codecs=value.codecs,
        packings=value.packings,
        receivers=value.receivers,
        max_positions=value.max_positions,
        transfers=value.transfers,
        transfer_slots=value.transfer_slots,
        answers=value.answers,
        answer_slots=value.answer_slots,
        measurements=[
            pb.Measurement(name=m.name, value=m.value, unit=m.unit, samples=m.samples)
            for m in value.measurements
        ],
        device=value.device,
        attention=value.attention,
    )


def node_info_from(message: pb.GetNodeInfoResponse) -> types.NodeInfo:
    """From protobuf.

    Raises:
        ManifestError: the identity is malformed.
    """
    try:
        identity = msgspec.msgpack.decode(message.identity, type=ModelIdentity)
    except msgspec.DecodeError as error:
        raise ManifestError(f"identity: {error}") from error
    return types.NodeInfo(
        role=cast(types.Role, message.role),
        version=message.version,
        schema_version=message.schema_version,
        epoch=message.epoch,
        identity=identity,
        model_name=message.model_name,
        codecs=tuple(message.codecs),
        packings=tuple(message.packings),
        receivers=tuple(message.receivers),
        max_positions=message.max_positions,
        transfers=message.transfers,
        transfer_slots=message.transfer_slots,
        answers=message.answers,
        answer_slots=message.answer_slots,
        measurements=tuple(
            Measurement(m.name, m.value, m.unit, m.samples) for m in message.measurements
        ),
        device=message.device,
        attention=message.attention,
    )
