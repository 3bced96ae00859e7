"""From measured values to seconds: how long until the receiver's first token, by each way.

A handoff is a pipeline: prefill → encode → link → load (and translate). Encode, link and load pass on
chunks: with C chunks and stages of total time t_i they take ``max t_i + (sum of the others) / C``, since
the slowest runs all the time and the others show only their first or last chunk. Prefill passes on
blocks: either it is the slowest and its last block follows, or its first block precedes the rest. What
must be waited for at the receiver's device runs beside the whole transfer, because a cache travels while
others are answered.
"""

from __future__ import annotations

import msgspec

from cachelink_core.planner.measures import Job, Measures
from cachelink_core.planner.ways import Way


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What one way would take.

    Attributes:
        way: its name.
        ready_s: until the receiver knows the prefix; None where a needed value was never measured.
        first_token_s: until the first token of an answer; None likewise.
        total_s: for all questions with their answers; None likewise.
        wire_bytes: payload.
        parts: seconds of each stage, overlapped or not, and of each wait.
        excluded: why it may not be chosen; empty if it may.
    """

    way: str
    ready_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    wire_bytes: int = 0
    parts: dict[str, float] = {}
    excluded: str = ""


def predict(way: Way, job: Job, measures: Measures) -> Prediction:
    """Predicts one way.

    Raises:
        UnknownCodec: there is no such codec.
        UnknownPacking: there is no such packing.
    """
    if way.text:
        return _text(job, measures)
    missing = _missing(way, job, measures)
    wire_bytes = wire_bytes_of(way, job, measures)
    if missing:
        return Prediction(way=way.name, wire_bytes=wire_bytes, excluded=f"{missing} not measured")
    stages = _stages(way, job, measures, wire_bytes)
    native_bytes = job.shape.native_bytes(job.tokens)
    allocate = measures.link.allocate_bytes_per_s
    parts = {
        **stages,
        "fixed": measures.link.fixed_s,
        "allocate": native_bytes / allocate if allocate else 0.0,
        "link_wait": measures.link_queue.wait_s,
        "receiver_wait": measures.receiver_queue.wait_s,
    }
    if job.held_tokens < job.tokens:
        parts["sender_wait"] = measures.sender_queue.wait_s
    moved_s = parts["fixed"] + parts["allocate"] + parts["link_wait"]
    moved_s += parts.get("sender_wait", 0.0) + _pipeline(stages, job)
    ready_s = max(moved_s, parts["receiver_wait"])
    return _finished(way, job, measures, ready_s, wire_bytes, parts)


def wire_bytes_of(way: Way, job: Job, measures: Measures) -> int:
    """Payload bytes of a way: 4 a token for text, else what the codec and its packing leave."""
    if way.text:
        return 4 * job.tokens
    raw = job.shape.encoded_bytes(way.codec, job.tokens)
    return round(raw * measures.rates(way.codec).packed_share)


def _text(job: Job, measures: Measures) -> Prediction:
    wire_bytes = 4 * job.tokens
    if measures.receiver_prefill is None:
        return Prediction(
            way="text", wire_bytes=wire_bytes, excluded="the receiver's prefill not measured"
        )
    parts = {
        "receiver_wait": measures.receiver_queue.wait_s,
        "prefill": measures.receiver_prefill.seconds(0, job.tokens),
    }
    return _finished(Way(), job, measures, sum(parts.values()), wire_bytes, parts)


def _finished(
    way: Way,
    job: Job,
    measures: Measures,
    ready_s: float,
    wire_bytes: int,
    parts: dict[str, float],
) -> Prediction:
    """Adds the answers: what is re-read is forgotten with its answer, a cache is not."""
    answer_s = measures.query_s + job.answer_tokens * measures.decode_token_s
    again_s = parts["prefill"] if way.text else 0.0
    return Prediction(
        way=way.name,
        ready_s=ready_s,
        first_token_s=ready_s + measures.query_s,
        total_s=ready_s + again_s * (job.questions - 1) + answer_s * job.questions,
        wire_bytes=wire_bytes,
        parts=parts,
    )


def _missing(way: Way, job: Job, measures: Measures) -> str:
    if job.held_tokens < job.tokens and measures.sender_prefill is None:
        return "the sender's prefill"
    if way.mapped and measures.map_token_s is None:
        return "the receiver's translation"
    return ""


def _stages(way: Way, job: Job, measures: Measures, wire_bytes: int) -> dict[str, float]:
    rates = measures.rates(way.codec)
    native_bytes = job.shape.native_bytes(job.tokens)
    stages = {
        "encode": native_bytes / rates.encode_bytes_per_s,
        "link": wire_bytes / measures.link.bytes_per_s,
        "load": native_bytes / rates.load_bytes_per_s,
    }
    if way.mapped and measures.map_token_s is not None:
        stages["map"] = measures.map_token_s * job.tokens
    if job.held_tokens < job.tokens and measures.sender_prefill is not None:
        stages["prefill"] = measures.sender_prefill.seconds(job.held_tokens, job.tokens)
    return stages


def _pipeline(stages: dict[str, float], job: Job) -> float:
    """Seconds of all stages together. Load and translation share a thread: they are one stage."""
    if not job.overlap:
        return sum(stages.values())
    lanes = (stages["encode"], stages["link"], stages["load"] + stages.get("map", 0.0))
    slowest = max(lanes)
    rest_s = (sum(lanes) - slowest) / job.shape.chunks(job.tokens)
    prefill_s = stages.get("prefill", 0.0)
    if not job.stream:
        return prefill_s + slowest + rest_s
    last_s = slowest / job.shape.blocks(job.tokens)
    first_s = prefill_s / max(1, job.shape.blocks(job.tokens - job.held_tokens))
    return max(prefill_s + last_s, first_s + slowest) + rest_s
