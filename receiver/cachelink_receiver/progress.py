"""How far a handoff is, and from that how long it will still take."""

from __future__ import annotations

from cachelink_core.codec_spec import codec_name
from cachelink_core.engine.base import Prefix
from cachelink_core.node.arrivals import Arriving
from cachelink_receiver.incoming import Incoming


def arriving(incoming: Incoming, now_s: float) -> Arriving:
    """A handoff as those who wait for it see it.

    The time that is left follows from the chunks so far. While there is none, it is taken to be as
    long as the handoff has been waited for already.

    Args:
        incoming: under way.
        now_s: monotonic.
    """
    header = incoming.header
    arrived, chunks = incoming.session.recorded_chunks, header.layout.chunk_count
    passed_s = max(0.0, now_s - incoming.admitted_s)
    left_s = passed_s * (chunks - arrived) / arrived if arrived else passed_s
    return Arriving(
        prefix=Prefix(header.ids, header.query_frame),
        trust=header.trust,
        codec=codec_name(header.codec, header.packing),
        left_s=left_s,
    )
