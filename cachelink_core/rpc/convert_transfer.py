"""Messages of the data plane as plain values and back, and nothing else."""

from __future__ import annotations

from typing import cast

from cachelink_core.codec_spec import Trust
from cachelink_core.rpc.pb.cachelink.v1 import transfer_pb2 as pb
from cachelink_core.rpc.status import from_info, to_info
from cachelink_core.rpc.transfer_types import (
    SCHEMES,
    Endpoint,
    HandoffStatus,
    PushReceipt,
    Reservation,
)


def reservation_to(value: Reservation) -> pb.ReserveResponse:
    """To protobuf."""
    return pb.ReserveResponse(
        handoff_id=value.handoff_id,
        cache_id=value.cache_id,
        receiver_epoch=value.receiver_epoch,
        lease_s=value.lease_s,
        held_blocks=value.held_blocks,
        mapper=value.mapper,
        codec=value.codec,
        endpoints=[
            pb.Endpoint(scheme=e.scheme, address=e.address, ticket=e.ticket)
            for e in value.endpoints
        ],
        already_installed=value.already_installed,
        allocate_s=value.allocate_s,
        check_s=value.check_s,
    )


def reservation_from(message: pb.ReserveResponse) -> Reservation:
    """From protobuf."""
    return Reservation(
        handoff_id=message.handoff_id,
        cache_id=message.cache_id,
        receiver_epoch=message.receiver_epoch,
        lease_s=message.lease_s,
        held_blocks=tuple(message.held_blocks),
        mapper=message.mapper,
        codec=message.codec,
        # A plane that this version does not know is no way for it to send.
        endpoints=tuple(
            Endpoint(e.scheme, e.address, e.ticket)
            for e in message.endpoints
            if e.scheme in SCHEMES
        ),
        already_installed=message.already_installed,
        allocate_s=message.allocate_s,
        check_s=message.check_s,
    )


def push_receipt_to(value: PushReceipt) -> pb.PushChunksResponse:
    """To protobuf."""
    return pb.PushChunksResponse(
        handoff_id=value.handoff_id,
        cache_id=value.cache_id,
        state=value.state,
        trust=value.trust,
        wire_bytes=value.wire_bytes,
        chunk_count=value.chunk_count,
        tail_s=value.tail_s,
        load_s=value.load_s,
        load_busy_s=value.load_busy_s,
        install_s=value.install_s,
        transform_s=value.transform_s,
        device_wait_s=value.device_wait_s,
        verified_at_s=value.verified_at_s,
        installed_at_s=value.installed_at_s,
    )


def push_receipt_from(message: pb.PushChunksResponse) -> PushReceipt:
    """From protobuf."""
    return PushReceipt(
        handoff_id=message.handoff_id,
        cache_id=message.cache_id,
        state=message.state,
        trust=cast(Trust, message.trust),
        wire_bytes=message.wire_bytes,
        chunk_count=message.chunk_count,
        tail_s=message.tail_s,
        load_s=message.load_s,
        load_busy_s=message.load_busy_s,
        install_s=message.install_s,
        transform_s=message.transform_s,
        device_wait_s=message.device_wait_s,
        verified_at_s=tuple(message.verified_at_s),
        installed_at_s=tuple(message.installed_at_s),
    )


def status_to(value: HandoffStatus) -> pb.GetHandoffResponse:
    """To protobuf."""
    return pb.GetHandoffResponse(
        state=value.state,
        verified_blocks=value.verified_blocks,
        cache_id=value.cache_id,
        error=None if value.error is None else to_info(value.error),
        lease_left_s=value.lease_left_s,
    )


def status_from(message: pb.GetHandoffResponse) -> HandoffStatus:
    """From protobuf."""
    return HandoffStatus(
        state=message.state,
        verified_blocks=tuple(message.verified_blocks),
        cache_id=message.cache_id,
        error=from_info(message.error) if message.HasField("error") else None,
        lease_left_s=message.lease_left_s,
    )
