"""Picks the fastest admissible way and says why, in words that a receipt can carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from cachelink_core.codec_spec import Trust
from cachelink_core.planner.measures import Job, Measures
from cachelink_core.planner.predict import Prediction, predict
from cachelink_core.planner.ways import TEXT, Way, trusts_less

TIE_SHARE: Final = 0.02
"""Ways this close together, as a share of the time to the first token, are equally fast; the more exact
one is taken."""


class Wanted(msgspec.Struct, frozen=True):
    """What a caller asks of a way.

    Attributes:
        least_trust: the least that is good enough.
        max_error_nats: largest expected next-token KL; None for any.
    """

    least_trust: Trust = "mapped"
    max_error_nats: float | None = None

    def refusal(self, way: Way, dtype: str) -> str:
        """Why a way is not good enough; empty if it is.

        Raises:
            UnknownCodec: there is no such codec.
            UnknownPacking: there is no such packing.
        """
        return self.refusal_of(way.trust(dtype), way.error_nats(dtype))

    def refusal_of(self, trust: Trust, error: float | None) -> str:
        """The same for a cache of known trust and expected error in nats (None: unknown)."""
        if trusts_less(trust, self.least_trust):
            return f"trust is {trust}, asked for {self.least_trust}"
        if self.max_error_nats is None:
            return ""
        if error is None:
            return f"error is unknown, asked for {self.max_error_nats:g} nats at most"
        if error > self.max_error_nats:
            return f"error is {error:g} nats, asked for {self.max_error_nats:g} at most"
        return ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted, chosen, and in the end took.

    Attributes:
        chosen: name of the way; empty if none is admissible.
        why: in words.
        predicted_s: of the chosen way: until the prefix is ready in a handoff's plan, until the first
            token in an answer's; None where nothing could be predicted.
        took_s: the same as measured afterwards; None until then.
        predictions: of every way that was considered.
        assumed: values that stood in for measured ones.
    """

    chosen: str
    why: str
    predicted_s: float | None = None
    took_s: float | None = None
    predictions: tuple[Prediction, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def text(self) -> bool:
        """Whether re-reading was chosen."""
        return self.chosen == TEXT.name


def choose(ways: Sequence[Way], job: Job, measures: Measures, wanted: Wanted | None = None) -> Plan:
    """Predicts every way and picks the one whose questions are all answered first.

    Args:
        ways: to consider, the most exact first; ``TEXT`` among them if re-reading is possible.
        job: to be done.
        measures: as of now.
        wanted: what the caller asks for.

    Raises:
        UnknownCodec: a way names no codec.
        UnknownPacking: a way names no packing.
    """
    wanted = wanted or Wanted()
    found: list[Prediction] = []
    for way in ways:
        refusal = wanted.refusal(way, job.shape.dtype)
        prediction = predict(way, job, measures)
        found.append(
            msgspec.structs.replace(prediction, excluded=refusal) if refusal else prediction
        )
    return decide(found, job, measures)


def decide(found: Sequence[Prediction], job: Job, measures: Measures) -> Plan:
    """Picks the least total of the admissible predictions; of equally fast ones the first."""
    best = _fastest(found)
    return Plan(
        chosen=best.way if best else "",
        why=_reason(best, found, job),
        predicted_s=best.ready_s if best else None,
        predictions=tuple(found),
        assumed=measures.assumed,
    )


def _fastest(found: Sequence[Prediction]) -> Prediction | None:
    timed = [(p.total_s, p) for p in found if p.total_s is not None and not p.excluded]
    if not timed:
        return None
    least, best = min(timed, key=lambda each: each[0])
    allowance = TIE_SHARE * (best.first_token_s or 0.0)
    close = [p for total, p in timed if total <= least + allowance]
    return min(close, key=lambda p: p.way == TEXT.name)


def _reason(best: Prediction | None, found: Sequence[Prediction], job: Job) -> str:
    if best is None or best.total_s is None:
        listed = "; ".join(f"{p.way}: {p.excluded}" for p in found)
        return f"no way is admissible: {listed}"
    others = [
        p for p in found if not p.excluded and p.total_s is not None
        and (p.way == TEXT.name) != (best.way == TEXT.name)
    ]  # fmt: skip
    about = f"{job.tokens} tokens, {job.questions} question" + "s" * (job.questions != 1)
    said = f"{best.way}: {best.total_s:.3f} s for {about}, mostly {_largest(best)}"
    if not others:
        missing = [f"{p.way}: {p.excluded}" for p in found if (p.way == TEXT.name) and p.excluded]
        return "; ".join([said, *missing])
    other = min(others, key=lambda p: p.total_s or 0.0)
    return f"{said}; {other.way}: {other.total_s:.3f} s, mostly {_largest(other)}"


def _largest(prediction: Prediction) -> str:
    if not prediction.parts:
        return "nothing"
    name = max(prediction.parts, key=lambda part: prediction.parts[part])
    return f"{name} {prediction.parts[name]:.3f} s"
