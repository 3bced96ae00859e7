"""The cost of a prefix spread over several questions.

``T_build + T_move + T_load + N (T_query + T_decode)`` for a cache that is kept at the receiver, against
``N (T_prefill + T_query + T_decode)`` for a receiver that reads the text for every question.
"""

from __future__ import annotations

import math

import msgspec

from cachelink_core.planner.measures import Job, Measures
from cachelink_core.planner.predict import predict
from cachelink_core.planner.ways import TEXT, Way


def cost_per_question_s(way: Way, job: Job, measures: Measures, questions: int) -> float | None:
    """Seconds a question when ``questions`` of them are asked; None if it cannot be predicted.

    Raises:
        UnknownCodec: there is no such codec.
        UnknownPacking: there is no such packing.
    """
    asked = msgspec.structs.replace(job, questions=questions)
    total_s = predict(way, asked, measures).total_s
    return None if total_s is None else total_s / questions


def break_even_questions(way: Way, job: Job, measures: Measures) -> int | None:
    """The least number of questions from which on a transfer is not slower than re-reading.

    Returns:
        1 if it is for a single one; None if it never is, or if it cannot be predicted.

    Raises:
        UnknownCodec: there is no such codec.
        UnknownPacking: there is no such packing.
    """
    moved, text = predict(way, job, measures), predict(TEXT, job, measures)
    if moved.ready_s is None or text.ready_s is None:
        return None
    prefill_s = text.parts["prefill"]
    if moved.ready_s <= text.ready_s:
        return 1
    if prefill_s <= 0.0:
        return None
    # The receiver's wait is paid once either way; every further question costs a prefill.
    return 1 + math.ceil((moved.ready_s - text.ready_s) / prefill_s)
