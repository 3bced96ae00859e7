"""One question to one cache: as a node answers it, and its floors and rivals.

Axes: B batch of 1, H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import sdpa_mask

from cachelink_bench.answer.subject import NAME, TENANT, Subject
from cachelink_core.engine.base import Delta
from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.kv.branch import Branch
from cachelink_core.kv.grouped_attention import GROUPED_SDPA, grouped_sdpa_forward

_TIMED: Final = "bench_timed_sdpa"


@dataclass(frozen=True, slots=True)
class Run:
    """One answer.

    Attributes:
        first_s: from the call to the first token.
        decode_s: from the first token to the last; 0 where no further token was made.
        attention_s: of ``first_s``, inside the attention function; 0 where that was not timed.
        ids: generated.
    """

    first_s: float
    decode_s: float
    attention_s: float
    ids: tuple[int, ...]


def ours(subject: Subject) -> Run:
    """As a node answers: a share of the stored cache, text streamed token by token."""
    at: list[float] = []
    ids: list[int] = []
    began = time.perf_counter()
    with subject.store.share(TENANT, NAME) as entry:
        branch = Branch(entry.cache)
        answer = subject.engine.answer(branch, entry.ids, subject.queries[0], subject.sampling)
        for item in answer:
            if isinstance(item, Delta) and item.token_ids:
                at.append(time.perf_counter())
                ids += item.token_ids
        branch.close()
    return Run(at[0] - began, at[-1] - at[0], 0.0, tuple(ids))


def bare(subject: Subject) -> Run:
    """The model called on the query over the same cache, and the likeliest token taken."""
    engine, cache = subject.engine, subject.cache
    begin = cache.length
    query = torch.tensor([subject.queries[0]])
    began = time.perf_counter()
    with torch.inference_mode():
        output = engine.model(
            input_ids=query,
            position_ids=torch.arange(begin, begin + query.shape[1]).unsqueeze(0),
            logits_to_keep=1,
            **{cache_argument(engine.model): cache.for_model()},
        )
        token = int(output.logits[0, -1].argmax())
    first_s = time.perf_counter() - began
    cache.truncate(begin)
    return Run(first_s, 0.0, 0.0, (token,))


def bare_timed(subject: Subject) -> Run:
    """``bare`` with a clock around each layer's attention: what may grow with the prefix."""
    spent = 0.0

    def timed(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        nonlocal spent
        began = time.perf_counter()
        result = grouped_sdpa_forward(*args, **kwargs)
        spent += time.perf_counter() - began
        return result

    AttentionInterface.register(_TIMED, timed)
    with _attention(subject, _TIMED):
        run = bare(subject)
    return Run(run.first_s, 0.0, spent, run.ids)


def generate(subject: Subject, cache: Any, attention: str) -> Run:
    """Transformers' ``generate`` over a cache of its own that holds the prefix."""
    model = subject.engine.model
    clock = _Clock()
    whole = torch.tensor([[*subject.ids, *subject.queries[0]]])
    count = subject.sampling.max_new_tokens
    with _attention(subject, attention):
        began = time.perf_counter()
        out = model.generate(
            whole,
            attention_mask=torch.ones_like(whole),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
            **{cache_argument(model): cache},
        )
    at = clock.at[1:]  # the first is the prompt
    return Run(at[0] - began, at[-1] - at[0], 0.0, tuple(out[0, whole.shape[1] :].tolist()))


def dynamic_cache(subject: Subject) -> Any:
    """A native ``DynamicCache`` that holds the prefix."""
    return _filled(subject, DynamicCache(config=subject.engine.model.config))


def static_cache(subject: Subject) -> Any:
    """A native ``StaticCache`` that holds the prefix and has room for question and answer."""
    room = len(subject.queries[0]) + subject.sampling.max_new_tokens
    return _filled(
        subject,
        StaticCache(config=subject.engine.model.config, max_cache_len=subject.tokens + room),
    )


def arms(subject: Subject) -> dict[str, Callable[[], Run]]:
    """Every arm by its name; a native cache is built outside its arm's clock."""
    return {
        "CacheLink": lambda: ours(subject),
        "bare forward": lambda: bare(subject),
        "bare forward, attention timed": lambda: bare_timed(subject),
        "generate, DynamicCache": lambda: generate(subject, dynamic_cache(subject), "sdpa"),
        "generate, DynamicCache, our attention": lambda: generate(
            subject, dynamic_cache(subject), GROUPED_SDPA
        ),
        "generate, StaticCache": lambda: generate(subject, static_cache(subject), "sdpa"),
    }


class _Clock:
    """A streamer of ``generate`` that notes when each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _token: Tensor) -> None:
        """A token is there."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """The last one was."""


def _filled(subject: Subject, cache: Any) -> Any:
    held = subject.cache
    with torch.no_grad():  # an inference tensor could not be written by generate
        for layer, geometry in enumerate(held.layers):
            first = geometry.first_token(subject.tokens)
            keys, values = (
                held.tensor(layer, kind, first, subject.tokens).unsqueeze(0).clone()
                for kind in ("K", "V")
            )
            cache.update(keys, values, layer)
    return cache


@contextmanager
def _attention(subject: Subject, name: str) -> Iterator[None]:
    model = subject.engine.model
    usual = model.config._attn_implementation  # noqa: SLF001 - no public name has it
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


AttentionMaskInterface.register(_TIMED, sdpa_mask)
