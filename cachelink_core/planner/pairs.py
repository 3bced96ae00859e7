"""The four published cross-model pairs, for planning without nodes.

Latencies are those of the CacheLink paper (arXiv 2610.15509, Figure 7 and its text): at 32,768 tokens on
two H100s, translation takes 0.969 s (Qwen3 14B→32B) and 0.406 s (Ministral 8B→14B), which is 7.27 and
6.18 times faster than reading the prefix again. It publishes none for the other two; their numbers here
are scaled from the first pair (prefill by the receiver's parameters, translation by its layers) and are
marked as estimates. Geometries are those of the published configurations. What a codec costs on such
machines is not published; here it is nothing, so that a plan is a bound.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cachelink_core.errors import InvalidRequest
from cachelink_core.planner.measures import DEFAULT_RATES, CodecRates, Link, Measures, Prefill
from cachelink_core.planner.shape import CacheShape, LayerShape

_TOKENS: Final = 32_768
_MAP_S: Final = 0.969
_PREFILL_S: Final = 0.969 * 7.27
_FREE: Final = 1e18
"""Bytes a second of work that takes no time."""

_QWEN_32B: Final = (32.8e9, 64)
"""Parameters and layers of the receiver of the first pair."""


class Pair(msgspec.Struct, frozen=True):
    """A sender model, a receiver model, and what a handoff between them costs.

    Attributes:
        name: as the command line takes it.
        shape: of the sender's cache, which is what travels.
        prefill_s: of 32,768 tokens at the receiver.
        map_s: of translating them.
        estimated: whether the two times are scaled from another pair.
    """

    name: str
    shape: CacheShape
    prefill_s: float
    map_s: float
    estimated: bool = False

    def measures(self, link_bytes_per_s: float) -> Measures:
        """The pair over a link; the sender holds the cache, and codecs take no time."""
        free = {
            codec: CodecRates(_FREE, _FREE, usual.packed_share)
            for codec, usual in DEFAULT_RATES.items()
        }
        return Measures(
            link=Link(link_bytes_per_s),
            codecs=free,
            receiver_prefill=Prefill(self.prefill_s / _TOKENS),
            map_token_s=self.map_s / _TOKENS,
            assumed=(
                "codecs take no time",
                *("prefill and translation: scaled from qwen3-14b-32b",) * self.estimated,
            ),
        )


def _shape(layers: int, kv_heads: int) -> CacheShape:
    return CacheShape((LayerShape(kv_heads, 128, count=layers),), "bfloat16")


def _scaled(name: str, shape: CacheShape, parameters: float, layers: int) -> Pair:
    return Pair(
        name,
        shape,
        _PREFILL_S * parameters / _QWEN_32B[0],
        _MAP_S * layers / _QWEN_32B[1],
        estimated=True,
    )


PAIRS: Final[dict[str, Pair]] = {
    pair.name: pair
    for pair in (
        Pair("qwen3-14b-32b", _shape(40, 8), _PREFILL_S, _MAP_S),
        Pair("ministral-8b-14b", _shape(34, 8), 0.406 * 6.18, 0.406),
        _scaled("qwen3-8b-14b", _shape(36, 8), 14.8e9, 40),
        _scaled("yi-9b-34b", _shape(48, 4), 34.4e9, 60),
    )
}
"""By name."""


def pair_named(name: str) -> Pair:
    """One of ``PAIRS``.

    Raises:
        InvalidRequest: there is none of that name.
    """
    if name not in PAIRS:
        raise InvalidRequest(f"pair is {name!r}; known: {', '.join(PAIRS)}")
    return PAIRS[name]
