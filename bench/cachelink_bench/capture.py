"""A real model's cache of real text, prefilled once and kept on disk.

Transfers are measured on it without paying for the prefill each time. The file is a spilled cache
(``engine/spill.py``): every byte of it is checked whenever it is read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128

from cachelink_bench.kept import bench_folder
from cachelink_core import limits, texts
from cachelink_core.codec_spec import CODECS, PACKINGS
from cachelink_core.engine.base import Engine
from cachelink_core.engine.offer import make_header, mint_id
from cachelink_core.engine.spill import Spilled, load_cache, save_cache
from cachelink_core.errors import CacheLinkError, ConfigError
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import encode_header

HEADROOM_TOKENS = limits.DEFAULT_HEADROOM_TOKENS
"""Room behind the prefix at both ends, as in a daemon: it sets the stride between heads."""


def captured(
    engine: Engine, tokens: int, block_tokens: int, cache_dir: Path | None = None
) -> Spilled:
    """The cache of the first ``tokens`` tokens of the evaluation texts, from disk if it is there.

    Args:
        engine: with its model loaded.
        tokens: of the prefix.
        block_tokens: the prefill schedule.
        cache_dir: folder of the file; ``bench`` in the user's cache folder by default.

    Raises:
        ConfigError: the texts or the model's window are shorter.
    """
    folder = cache_dir or bench_folder()
    ids = _ids(engine, tokens)
    path = folder / f"{engine.identity.digest()[:16]}-{tokens}-{block_tokens}.safetensors"
    held = _read(path)
    if held is not None and held.header.ids == ids:
        return held
    folder.mkdir(parents=True, exist_ok=True)
    cache = engine.open_cache(tokens, 0, whole=True)
    engine.prefill(cache, ids, block_tokens)
    cache.use_window()
    header = make_header(
        engine,
        ids,
        CODECS["native"],
        PACKINGS["none"],
        sender_epoch=mint_id(),
        block_tokens=block_tokens,
    )
    save_cache(path, encode_header(header), cache)
    return load_cache(path, headroom=HEADROOM_TOKENS)


def cache_digest(cache: PrefixCache, tokens: int) -> str:
    """XXH3-128 over every tensor of the first ``tokens`` tokens, as a receiver would hold them."""
    hasher = xxh3_128()
    for layer, geometry in enumerate(cache.layers):
        first = geometry.first_token(tokens)
        for rows in (cache.tensor(layer, kind, first, tokens) for kind in ("K", "V")):
            hasher.update(_bytes(rows))
    return hasher.hexdigest()


def _bytes(rows: Tensor) -> memoryview:
    data: memoryview = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _read(path: Path) -> Spilled | None:
    """The file's cache; None if there is none, or a damaged one, which is then written anew."""
    try:
        return load_cache(path, headroom=HEADROOM_TOKENS)
    except (CacheLinkError, FileNotFoundError):
        return None


def _ids(engine: Engine, tokens: int) -> tuple[int, ...]:
    text = "\n\n".join(texts.read(name) for name in texts.EVALUATION)
    ids = engine.tokens.plain(text)
    most = min(len(ids), engine.identity.max_positions)
    if not 1 <= tokens <= most:
        raise ConfigError(f"tokens is {tokens}; texts and model allow 1 to {most}")
    return ids[:tokens]
