"""What is measured: codec, data plane, and whether the receiver has another model."""

from __future__ import annotations

from typing import Final

import msgspec

from cachelink_core import limits
from cachelink_core.codec_spec import parse_codec
from cachelink_core.errors import CacheLinkError, ConfigError
from cachelink_core.testing.wide_kv import WIDE, WideShape

MAPPED: Final = "mapped"
"""Name of the case in which the receiver translates."""

RECEIVER_SHARE: Final = 0.25
"""Target: of the cache, above model and installed cache, for a receiver of the same model."""

SENDER_BLOCKS: Final = 4
"""Target: blocks above model and cache at the sender."""

LEAST_BYTES: Final = 500_000_000
"""Below it no verdict: what every process needs beside weighs more than the cache."""

SCRATCH_ITEM_BYTES: Final = 4
"""A mapper on a CPU keeps its source block in float32 (``transport/precision.py``)."""


class Case(msgspec.Struct, frozen=True):
    """One kind of handoff.

    Attributes:
        codec: by name.
        plane: data plane.
        mapped: whether the receiver has another model.
    """

    codec: str
    plane: str
    mapped: bool = False

    @property
    def name(self) -> str:
        """As people read it."""
        return f"{MAPPED + ' ' if self.mapped else ''}{self.codec}, {self.plane}"


class Size(msgspec.Struct, frozen=True):
    """What is moved.

    Attributes:
        sender: shape of the sender's model.
        receiver: shape of another model, for mapped cases.
        tokens: of the prefix.
        block_tokens: of a block.
    """

    sender: WideShape
    receiver: WideShape
    tokens: int
    block_tokens: int = limits.DEFAULT_BLOCK_TOKENS

    @property
    def cache_bytes(self) -> int:
        """Of the prefix at the sender."""
        return self.tokens * self.sender.token_bytes

    @property
    def block_bytes(self) -> int:
        """Of one block at the sender."""
        return self.block_tokens * self.sender.token_bytes

    @property
    def scratch_bytes(self) -> int:
        """The receiver's budget for a source block that is being translated."""
        return self.block_bytes // 2 * SCRATCH_ITEM_BYTES


FULL: Final = Size(WIDE, WideShape(seed=1), 4_608)
"""604 MB."""

_SMALL: Final = {"layers": 4, "kv_heads": 4, "head_dim": 64, "hidden": 64, "positions": 2_048}
SMOKE: Final = Size(WideShape(**_SMALL), WideShape(**_SMALL, seed=1), 1_100)


def make_cases(codecs: str, planes: str, *, mapped: bool) -> tuple[Case, ...]:
    """Every codec over every plane, then the mapped one over the first plane.

    Args:
        codecs: names that commas separate.
        planes: likewise.
        mapped: whether there is a mapped case.

    Raises:
        ConfigError: an unknown codec or plane.
    """
    names = [name.strip() for name in codecs.split(",") if name.strip()]
    ways = [name.strip() for name in planes.split(",") if name.strip()]
    for name in names:
        try:
            parse_codec(name)
        except CacheLinkError as error:
            raise ConfigError(f"codec {name!r}: {error}") from error
    for way in ways:
        if way not in ("tcp", "grpc"):
            raise ConfigError(f"plane {way!r} is not one of tcp, grpc")
    if not names or not ways:
        raise ConfigError(f"codecs is {codecs!r} and planes is {planes!r}: some of each")
    cases = [Case(name, way) for name in names for way in ways]
    return (*cases, Case("native", ways[0], mapped=True)) if mapped else tuple(cases)


__all__ = ["FULL", "LEAST_BYTES", "MAPPED", "RECEIVER_SHARE", "SENDER_BLOCKS", "SMOKE", "Case"]
