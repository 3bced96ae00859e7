"""The receipt of an installed handoff, and what it moves in the metrics."""

from __future__ import annotations

from cachelink_core.codec_spec import codec_name
from cachelink_core.handoff import State
from cachelink_core.logs import logger
from cachelink_core.metrics import Metrics
from cachelink_core.rpc.transfer_types import PushReceipt
from cachelink_receiver.incoming import ChunkSink, Incoming

_log = logger(__name__)


def make_receipt(incoming: Incoming, sink: ChunkSink, installed_s: float) -> PushReceipt:
    """The receipt, on the receiver's clock.

    Args:
        incoming: published.
        sink: that took its chunks.
        installed_s: when it was published, monotonic.
    """
    header, marks, session = incoming.header, incoming.marks, incoming.session
    times = sink.installer.times
    return PushReceipt(
        handoff_id=header.handoff_id,
        cache_id=session.cache_id,
        state=State.INSTALLED.value,
        trust=header.trust,
        wire_bytes=session.wire_bytes,
        chunk_count=session.recorded_chunks,
        tail_s=installed_s - marks.last_frame_s,
        load_s=max(0.0, marks.decoded_s - marks.last_frame_s) + incoming.check_s,
        load_busy_s=marks.verify_s + times.decode_s,
        install_s=installed_s - max(marks.decoded_s, marks.last_frame_s),
        transform_s=times.transform_s + times.map_s,
        device_wait_s=marks.device_wait_s,
        verified_at_s=tuple(marks.verified_at_s),
        installed_at_s=tuple(marks.installed_at_s),
    )


def count_install(
    metrics: Metrics, receipt: PushReceipt, incoming: Incoming, installed_s: float
) -> None:
    """Counts and logs one installed handoff."""
    header = incoming.header
    codec = codec_name(header.codec, header.packing)
    metrics.handoffs.labels(outcome="installed").inc()
    metrics.transfer_seconds.labels(role="receiver", codec=codec).observe(
        installed_s - incoming.marks.opened_s
    )
    metrics.validate_seconds.observe(receipt.load_busy_s)
    if incoming.mapper is not None:
        metrics.map_seconds.observe(receipt.transform_s)
    metrics.install_seconds.observe(receipt.install_s)
    metrics.device_wait_seconds.labels(kind="install").observe(receipt.device_wait_s)
    metrics.wire_bytes.inc(receipt.wire_bytes)
    metrics.raw_bytes.inc(header.layout.encoded_bytes)
    metrics.handoff_bytes.observe(receipt.wire_bytes)
    _log.info(
        "installed", handoff_id=header.handoff_id, cache_id=receipt.cache_id, codec=codec,
        tokens=header.tokens, wire_bytes=receipt.wire_bytes, tail_s=round(receipt.tail_s, 6),
    )  # fmt: skip
