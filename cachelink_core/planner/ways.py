"""The ways to make a receiver know a prefix, and what each costs in exactness."""

from __future__ import annotations

from typing import Final

import msgspec

from cachelink_core.codec_spec import TRUST_ORDER, Trust, expected_trust, parse_codec

CODEC_KL_NATS: Final[dict[str, float]] = {
    "native": 0.0,
    "bf16": 0.00192,
    "int8": 0.00203,
    "int4": 0.00697,
}
"""Next-token KL to the unchanged cache in nats, the worst of six texts (prose, essay, code, table,
dialogue, manual), SmolLM2-135M, 1,536 prefix and 256 continuation tokens. Source:
bench/results/codecs-smollm2.json, ``texts[].arms[].kl_nats``. bf16 is that file's worst noise floor
(another order of bfloat16 operations); it counts only for models of a wider dtype."""


class Way(msgspec.Struct, frozen=True, order=True):
    """One way.

    Attributes:
        codec: ``int4+zstd`` and the like; empty for sending the text and reading it again.
        mapped: whether the cache is translated from another model.
    """

    codec: str = ""
    mapped: bool = False

    @property
    def text(self) -> bool:
        """Whether the receiver reads the prefix itself."""
        return not self.codec

    @property
    def name(self) -> str:
        """``text``, ``int8``, ``mapped:int8``."""
        if self.text:
            return "text"
        return f"mapped:{self.codec}" if self.mapped else self.codec

    def trust(self, dtype: str) -> Trust:
        """What the receiver's cache is worth afterwards.

        Raises:
            UnknownCodec: there is no such codec.
            UnknownPacking: there is no such packing.
        """
        if self.text:
            return "exact"
        return expected_trust(parse_codec(self.codec)[0], dtype, mapped=self.mapped)

    def error_nats(self, dtype: str) -> float | None:
        """Expected next-token KL, or None where nothing was measured: a mapped cache.

        Raises:
            UnknownCodec: there is no such codec.
            UnknownPacking: there is no such packing.
        """
        if self.mapped:
            return None
        if self.trust(dtype) == "exact":
            return 0.0
        return CODEC_KL_NATS[parse_codec(self.codec)[0].id]


TEXT: Final = Way()


def transfer_ways(dtype: str, *, mapped: bool = False) -> tuple[Way, ...]:
    """Every codec that is worth considering for a cache of ``dtype``, the most exact first.

    bf16 of a bfloat16 model is native by another name; packed int8 costs more time than its 3 % of
    bytes save on any link that was measured, but on a very slow one it does not.
    """
    rounded = ("bf16", "bf16+zstd") if dtype == "float32" else ()
    names = ("native", "native+zstd", *rounded, "int8", "int8+zstd", "int4", "int4+zstd")
    return tuple(Way(name, mapped) for name in names)


def trusts_less(one: Trust, other: Trust) -> bool:
    """Whether ``one`` is worth less than ``other``."""
    return TRUST_ORDER.index(one) < TRUST_ORDER.index(other)
