"""What one handoff tells about the link, the codec and the receiver."""

from __future__ import annotations

from cachelink_core.codec_spec import codec_name
from cachelink_core.manifest import MAPPER_NONE, Header
from cachelink_core.node.measured import SentSample
from cachelink_core.rpc.transfer_types import PushReceipt, Reservation
from cachelink_sender.pump import PumpTimes


def sent_sample(
    header: Header,
    reservation: Reservation,
    reserve_s: float,
    times: PumpTimes,
    pushed: PushReceipt,
    ended_s: float,
) -> SentSample:
    """Takes a finished handoff apart into the planner's stages.

    The link's time lies between the stream's without the receiver's own tail, and that without the waits
    for frames (prefill, encoding) too; the receiver's clock is not subtracted from ours, only its durations.

    Args:
        header: as reserved.
        reservation: the receiver's reply.
        reserve_s: Reserve, sender's clock.
        times: of the pump.
        pushed: the receipt.
        ended_s: when it came, monotonic.
    """
    layout = header.layout
    share = times.sent_raw_bytes / layout.encoded_bytes if layout.encoded_bytes else 0.0
    total_s = ended_s - (times.first_frame_at_s or ended_s)
    mapped = header.mapper != MAPPER_NONE
    return SentSample(
        codec=codec_name(header.codec, header.packing),
        tokens=round(header.tokens * share),
        native_bytes=round(layout.native_bytes * share),
        raw_bytes=times.sent_raw_bytes,
        wire_bytes=pushed.wire_bytes,
        encode_s=times.encode_s,
        link_s=max(0.0, total_s - times.idle_s - pushed.tail_s),
        fixed_s=max(0.0, reserve_s - reservation.allocate_s),
        allocate_s=reservation.allocate_s,
        load_s=pushed.load_busy_s + (0.0 if mapped else pushed.transform_s),
        map_s=pushed.transform_s if mapped else 0.0,
        total_s=total_s,
        link_most_s=max(0.0, total_s - pushed.tail_s),
    )
