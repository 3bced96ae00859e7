"""What every arm is given: one model, one prefix in a store, and the questions to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachelink_bench.capture import HEADROOM_TOKENS
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.spill import Spilled
from cachelink_core.engine.store import CacheStore
from cachelink_core.engine.stored_cache import StoredCache
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import ConfigError
from cachelink_core.kv.prefix_cache import PrefixCache

TENANT = "bench"
NAME = "prefix"

_QUESTIONS = (
    "Which persons does the text name, and what is said about the first of them?",
    "What happens at the end of the text, and who could have prevented it at all?",
    "Where and when does the text take place, as far as a reader can tell?",
    "Which sentence of the text would you keep if you had to keep only one?",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One prefix, ready to be asked.

    Attributes:
        engine: with its model loaded.
        store: holding the prefix as ``NAME`` of ``TENANT``.
        cache: the prefix's own.
        ids: of the prefix.
        queries: token ids of each question, all of one length so that they fit one batch.
        sampling: greedy, of a fixed number of tokens.
    """

    engine: TransformersEngine
    store: CacheStore
    cache: PrefixCache
    ids: tuple[int, ...]
    queries: tuple[tuple[int, ...], ...]
    sampling: Sampling

    @property
    def tokens(self) -> int:
        """Of the prefix."""
        return len(self.ids)


def make_subject(
    engine: TransformersEngine, held: Spilled, query_tokens: int, new_tokens: int
) -> Subject:
    """Puts a captured cache into a store with room for copies.

    Raises:
        ConfigError: prefix, question and answer exceed the model's window.
    """
    header, cache = held.header, held.cache
    total = header.tokens + query_tokens + new_tokens
    if total > engine.identity.max_positions:
        raise ConfigError(
            f"prefix {header.tokens} + question {query_tokens} + answer {new_tokens} tokens exceed "
            f"the model's window of {engine.identity.max_positions}"
        )
    store = CacheStore((2 + len(_QUESTIONS)) * (cache.nbytes + 2**20))
    with store.reserve(cache.nbytes) as reservation:
        stored = StoredCache(
            TENANT, NAME, "", cache, header.ids, header.query_frame, "exact", "native",
            engine.identity,
        )  # fmt: skip
        store.put(stored, reservation)
    return Subject(
        engine,
        store,
        cache,
        header.ids,
        _queries(engine, query_tokens),
        Sampling(max_new_tokens=new_tokens, ignore_eos=True),
    )


def _queries(engine: TransformersEngine, tokens: int) -> tuple[tuple[int, ...], ...]:
    return tuple(_cut(engine.tokens.plain(f"\n\n{text}\n"), tokens) for text in _QUESTIONS)


def _cut(ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    repeated = tuple(ids) * (tokens // len(ids) + 1)
    return repeated[:tokens]


__all__ = ["HEADROOM_TOKENS", "NAME", "TENANT", "Subject", "make_subject"]
