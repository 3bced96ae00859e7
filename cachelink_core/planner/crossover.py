"""Where the decision flips: in tokens for a given link, in link rate for given tokens."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from cachelink_core import limits
from cachelink_core.planner.measures import Job, Measures
from cachelink_core.planner.predict import predict
from cachelink_core.planner.ways import TEXT, Way

_RATE_BOUNDS: Final = (1.0, 1e15)
"""Bytes a second between which a break-even rate is looked for."""

_STEP: Final = 1.1
"""Ratio of two lengths at which a flip is looked for: a gain shorter than 10 % of its length may be
missed."""


def crossover_tokens(
    way: Way, job: Job, measures: Measures, most: int = limits.MAX_PREFIX_TOKENS
) -> int | None:
    """The shortest prefix from which on a transfer beats re-reading, as far as ``most``.

    The job's own length is not used; a share of it that the sender holds stays that share.

    Returns:
        None if re-reading is faster at ``most`` tokens, or if nothing can be predicted.

    Raises:
        UnknownCodec: there is no such codec.
        UnknownPacking: there is no such packing.
    """
    if not _gains(way, _sized(job, most), measures):
        return None
    high = most
    while high > 1:
        low = max(1, int(high / _STEP))
        low = low if low < high else high - 1
        if not _gains(way, _sized(job, low), measures):
            return _bisect(way, job, measures, low, high)
        high = low
    return 1


def break_even_rate(way: Way, job: Job, measures: Measures) -> float | None:
    """The slowest link, in bytes a second, on which a transfer is not slower than re-reading.

    With ``job.overlap`` False and nothing but link, translation and prefill this is
    ``bytes a token / (prefill - map) a token``.

    Returns:
        None if no link is fast enough, or if nothing can be predicted.

    Raises:
        UnknownCodec: there is no such codec.
        UnknownPacking: there is no such packing.
    """
    low, high = _RATE_BOUNDS
    if not _gains(way, job, _at_rate(measures, high)):
        return None
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if _gains(way, job, _at_rate(measures, middle)):
            high = middle
        else:
            low = middle
    return high


def _gains(way: Way, job: Job, measures: Measures) -> bool:
    moved, text = predict(way, job, measures).total_s, predict(TEXT, job, measures).total_s
    return moved is not None and text is not None and moved <= text


def _sized(job: Job, tokens: int) -> Job:
    held = round(tokens * job.held_tokens / job.tokens) if job.tokens else 0
    return msgspec.structs.replace(job, tokens=tokens, held_tokens=held)


def _at_rate(measures: Measures, bytes_per_s: float) -> Measures:
    link = msgspec.structs.replace(measures.link, bytes_per_s=bytes_per_s)
    return msgspec.structs.replace(measures, link=link)


def _bisect(way: Way, job: Job, measures: Measures, low: int, high: int) -> int:
    """The least length in ``(low, high]`` that gains; ``low`` does not, ``high`` does."""
    while high - low > 1:
        middle = (low + high) // 2
        if _gains(way, _sized(job, middle), measures):
            high = middle
        else:
            low = middle
    return high
