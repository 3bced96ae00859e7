"""What is moved: a real cache, made as long as a size asks for, as a cache and as plain bytes.

The captured cache is laid behind itself until the size is reached, with the lowest bit of every number
of each copy replaced by a random one, so that no two chunks are equal. Ids repeat with it. Keys of a
copy keep the rotation of the place that they came from: right in size, not in position, which decides
nothing here, because no codec's bytes or time depend on the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from cachelink_bench.capture import HEADROOM_TOKENS, captured
from cachelink_bench.handoff_ends import Subject
from cachelink_core.codec_spec import CODECS, PACKINGS
from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.spill import Spilled, save_cache
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import ConfigError
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.limits import MIB
from cachelink_core.manifest import encode_header

_INTEGERS: Final = {2: torch.int16, 4: torch.int32}
"""Of the same width as a cache's numbers, by bytes."""


@dataclass(frozen=True, slots=True)
class Size:
    """One size.

    Attributes:
        mib: at most so many MiB.
        tokens: as many whole tokens as fit.
        payload_bytes: of them, native.
    """

    mib: float
    tokens: int
    payload_bytes: int

    def stem(self, folder: Path) -> Path:
        """Of its files: ``.payload`` has the bytes, ``.safetensors`` the cache."""
        return folder / f"tokens-{self.tokens}"


@dataclass(frozen=True, slots=True)
class Payloads:
    """What was written.

    Attributes:
        dtype: of the cache.
        token_bytes: of one token.
        sizes: each has its files.
    """

    dtype: str
    token_bytes: int
    sizes: list[Size]


def write_payloads(
    folder: Path, model: str, mibs: Sequence[float], *, base_tokens: int, block_tokens: int
) -> Payloads:
    """Writes the files of every size.

    Args:
        folder: for them.
        model: whose cache it is.
        mibs: the sizes.
        base_tokens: of the captured cache.
        block_tokens: the prefill schedule.

    Raises:
        ConfigError: the model has sliding layers, or a size is smaller than a token.
    """
    engine = load_engine(model, device="cpu")
    if any(layer.first_token(base_tokens) for layer in engine.identity.layers):
        raise ConfigError(f"model {model!r} has sliding layers: its caches do not grow by tokens")
    base = captured(engine, base_tokens, block_tokens)
    token_bytes = engine.identity.token_bytes()
    sizes = [_size(mib, token_bytes) for mib in mibs]
    wide = widened(engine, max(size.tokens for size in sizes))
    for size in sizes:
        header = make_header(
            wide,
            _repeated(base.header.ids, size.tokens),
            CODECS["native"],
            PACKINGS["none"],
            sender_epoch=mint_id(),
            block_tokens=block_tokens,
        )
        cache = _tiled(wide, base.cache, base_tokens, size.tokens)
        save_cache(size.stem(folder).with_suffix(".safetensors"), encode_header(header), cache)
        payload = Subject(wide, Spilled(header, b"", cache), block_tokens).payload()
        assert payload.nbytes == size.payload_bytes, "whole tokens"
        payload.tofile(size.stem(folder).with_suffix(".payload"))
    return Payloads(engine.identity.dtype, token_bytes, sizes)


def widened(engine: TransformersEngine, tokens: int) -> TransformersEngine:
    """The engine with a window of more than ``tokens``; caches are moved there, never read.

    The window is part of an identity, so both ends do this.
    """
    window = max(engine.identity.max_positions, tokens + HEADROOM_TOKENS)
    identity = msgspec.structs.replace(engine.identity, max_positions=window)
    return TransformersEngine(
        engine.model, engine.tokens, identity, engine.rope, eos_ids=engine.eos_ids
    )


def _size(mib: float, token_bytes: int) -> Size:
    tokens = int(mib * MIB) // token_bytes
    if not tokens:
        raise ConfigError(f"--sizes has {mib:g} MiB; a token of this model has {token_bytes} bytes")
    return Size(mib, tokens, tokens * token_bytes)


def _repeated(ids: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(ids[at % len(ids)] for at in range(count))


def _tiled(
    engine: TransformersEngine, base: PrefixCache, base_tokens: int, tokens: int
) -> PrefixCache:
    cache = engine.open_cache(tokens, 0, whole=True)
    random = torch.Generator().manual_seed(tokens)
    for layer in range(len(cache.layers)):
        for kind in ("K", "V"):
            for start in range(0, tokens, base_tokens):
                stop = min(tokens, start + base_tokens)
                piece = base.tensor(layer, kind, 0, stop - start)
                cache.tensor(layer, kind, start, stop).copy_(_scrambled(piece, random))
    cache.set_length(tokens)
    return cache


def _scrambled(rows: Tensor, random: torch.Generator) -> Tensor:
    """``rows`` ``[H, T, D]`` with the lowest bit of each number drawn anew."""
    bits = rows.contiguous().view(_INTEGERS[rows.element_size()])
    drawn = torch.randint(0, 2, bits.shape, dtype=bits.dtype, generator=random)
    return ((bits & ~1) | drawn).view(rows.dtype)
