"""What the codecs have to reach on every shipped text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cachelink_bench.codec_runs import BIASES, TextResult

MAX_ZSTD_RATIO = 0.68
MAX_INT8_OVER_FLOOR = 1.25
MAX_INT4_BITS = 4.5
MAX_INT4_MEDIAN_KL = 0.010
MAX_INT4_KL = 0.030
MAX_INT4_OVER_PER_TOKEN = 0.6
MIN_BIASED_TOP1 = 0.95
MAX_BIASED_KL_CHANGE = 0.10
MAX_COLLAPSED_TOP1 = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """One comparison.

    Attributes:
        name: what is compared.
        text: of which text; ``all`` for a statistic over texts.
        value: measured.
        limit: to be kept.
        met: whether it was.
    """

    name: str
    text: str
    value: float
    limit: float
    met: bool


def judge_targets(results: Sequence[TextResult]) -> list[Target]:
    """Compares the results with the limits above."""
    found: list[Target] = []
    for result in results:
        found += _of_text(result)
    kls = [result.arms["int4"].kl_nats for result in results]
    found.append(_at_most("int4 median KL", "all", statistics.median(kls), MAX_INT4_MEDIAN_KL))
    return found


def _of_text(result: TextResult) -> list[Target]:
    arms, name = result.arms, result.text
    int4 = arms["int4"]
    zstd_ratio = arms["native+zstd"].bytes_sent / result.native_bytes
    over_floor = arms["int8"].kl_nats / result.noise_floor.kl_nats
    over_per_token = int4.kl_nats / arms["int4 per token"].kl_nats
    found = [
        _at_most("zstd / native bytes", name, zstd_ratio, MAX_ZSTD_RATIO),
        _at_most("int8 KL / noise floor", name, over_floor, MAX_INT8_OVER_FLOOR),
        _at_most("int4 bits per element", name, int4.bits_per_element, MAX_INT4_BITS),
        _at_most("int4 KL", name, int4.kl_nats, MAX_INT4_KL),
        _at_most("int4 KL / per-token int4 KL", name, over_per_token, MAX_INT4_OVER_PER_TOKEN),
    ]
    for bias in BIASES:
        ours, first_try = arms[f"int4, bias {bias:g}"], arms[f"int4 per token, bias {bias:g}"]
        change = abs(ours.kl_nats / int4.kl_nats - 1)
        found += [
            _at_least(f"int4 top-1, bias {bias:g}", name, ours.top1, MIN_BIASED_TOP1),
            _at_most(f"int4 KL change, bias {bias:g}", name, change, MAX_BIASED_KL_CHANGE),
            _at_most(f"per-token top-1, bias {bias:g}", name, first_try.top1, MAX_COLLAPSED_TOP1),
        ]
    return found


def _at_most(name: str, text: str, value: float, limit: float) -> Target:
    return Target(name, text, value, limit, met=value <= limit)


def _at_least(name: str, text: str, value: float, limit: float) -> Target:
    return Target(name, text, value, limit, met=value >= limit)
