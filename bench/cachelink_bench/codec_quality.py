"""How much a changed cache changes what the model says next.

A subject is one text: a prefix whose cache is treated, and a continuation that the model reads
behind it, teacher-forced. The measure is the mean over the continuation of the Kullback-Leibler
divergence, in nats, from the next-token distribution behind the native cache to that behind the
treated one, and how often both have the same most likely token.

Axes: T continuation tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cachelink_core import texts
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import InvalidRequest
from cachelink_core.kv.prefix_cache import PrefixCache

Treatment = Callable[[TransformersEngine, "Subject", PrefixCache], int]
"""Fills an empty cache with what arrives of the subject's native one; returns the bytes sent."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What became of the next-token distribution.

    Attributes:
        kl_nats: mean divergence from native.
        top1: share of positions at which a most likely token is one of native's. bfloat16 logits
            tie often, and which of two equal tokens comes first says nothing.
        top1_first: the same if ties go to the lowest token id on both sides.
        bytes_sent: of the whole prefix.
        bits_per_element: the same over every key and value element of the prefix.
    """

    kl_nats: float
    top1: float
    top1_first: float
    bytes_sent: int
    bits_per_element: float


@dataclass(frozen=True)
class Subject:
    """One text, prefilled.

    Attributes:
        name: of the shipped text.
        prefix: token ids of the treated part.
        continuation: token ids that are scored.
        block_tokens: of the prefill.
        native: the cache of the prefix.
        reference: log-probabilities behind it, float32 ``[T, V]``.
    """

    name: str
    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    block_tokens: int
    native: PrefixCache
    reference: Tensor

    @property
    def elements(self) -> int:
        """Key and value elements of the prefix."""
        return len(self.prefix) * sum(2 * g.kv_heads * g.head_dim for g in self.native.layers)

    @property
    def native_bytes(self) -> int:
        """Bytes of the prefix's cache in the model's dtype."""
        return sum(g.token_bytes(self.native.dtype) for g in self.native.layers) * len(self.prefix)


def make_subject(
    engine: TransformersEngine,
    name: str,
    prefix_tokens: int,
    continuation_tokens: int,
    block_tokens: int,
) -> Subject:
    """Prefills one shipped text in blocks.

    Raises:
        InvalidRequest: the text is too short.
    """
    ids = engine.tokens.plain(texts.read(name))
    if len(ids) < prefix_tokens + continuation_tokens:
        raise InvalidRequest(
            f"text {name!r} has {len(ids)} tokens; prefix_tokens {prefix_tokens} and "
            f"continuation_tokens {continuation_tokens} need more"
        )
    prefix = ids[:prefix_tokens]
    continuation = ids[prefix_tokens : prefix_tokens + continuation_tokens]
    native = engine.open_cache(prefix_tokens, continuation_tokens, whole=True)
    engine.prefill(native, prefix, block_tokens)
    reference = _score(engine, native, continuation)
    return Subject(name, prefix, continuation, block_tokens, native, reference)


def judge(engine: TransformersEngine, subject: Subject, treatment: Treatment) -> Quality:
    """Treats the subject's cache and scores its continuation behind the result."""
    treated = engine.open_cache(len(subject.prefix), len(subject.continuation), whole=True)
    sent = treatment(engine, subject, treated)
    treated.set_length(len(subject.prefix))
    found = _score(engine, treated, subject.continuation)
    wanted = subject.reference
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
    return Quality(
        kl_nats=max(0.0, divergence.item()),
        top1=(_most_likely(wanted) & _most_likely(found)).any(-1).float().mean().item(),
        top1_first=(wanted.argmax(-1) == found.argmax(-1)).float().mean().item(),
        bytes_sent=sent,
        bits_per_element=8 * sent / subject.elements,
    )


def one_shot(engine: TransformersEngine, subject: Subject, out: PrefixCache) -> int:
    """The treatment that gives the noise floor: the same prefix, read in one forward."""
    engine.prefill(out, subject.prefix, len(subject.prefix))
    return subject.native_bytes


def _most_likely(log_probabilities: Tensor) -> Tensor:
    """Bool ``[T, V]``: the tokens that no other beats."""
    return log_probabilities == log_probabilities.amax(-1, keepdim=True)


def _score(engine: TransformersEngine, cache: PrefixCache, ids: tuple[int, ...]) -> Tensor:
    held = cache.length
    logits = engine.score(cache, ids)
    cache.truncate(held)
    return logits.log_softmax(-1)
