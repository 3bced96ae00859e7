"""The engine on transformers: one model, one device, prefix caches written in place.

Axes: H KV heads, T tokens, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cachelink_core.codecs.kernels import PLAIN, Kernels, PairAngles
from cachelink_core.engine.base import (
    Delta,
    DeviceTurn,
    Finish,
    Sampling,
    TokenLogprobs,
    Tokens,
)
from cachelink_core.engine.bytes_only import is_bytes_only
from cachelink_core.engine.decoding import Step, TokenLoop
from cachelink_core.engine.executor import DeviceExecutor
from cachelink_core.engine.model_runner import ModelRunner
from cachelink_core.engine.sampling import TokenChooser, check_sampling, token_logprobs
from cachelink_core.engine.staging import Staging, staging_for
from cachelink_core.engine.text_stream import TextStream
from cachelink_core.errors import (
    BudgetExceeded,
    EmptyQuery,
    HandoffAborted,
    HeadroomExceeded,
    InvalidRequest,
    QueryTooLong,
)
from cachelink_core.identity import ModelIdentity
from cachelink_core.kv.grouped_attention import prefer_grouped
from cachelink_core.kv.prefix_cache import TORCH_DTYPES, PrefixCache, cache_bytes
from cachelink_core.kv.rope import KeyRope


class TransformersEngine:
    """An ``Engine`` over a loaded transformers model. Safe to call from several threads.

    The device is held for one forward at a time, never while a caller consumes a delta.

    Attributes:
        kernels: see ``Engine.kernels``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Tokens,
        identity: ModelIdentity,
        rope: KeyRope,
        *,
        attention: str = "auto",
        eos_ids: Iterable[int] = (),
        executor: DeviceExecutor | None = None,
        staging: Callable[[torch.device], Staging | None] = staging_for,
    ) -> None:
        """Takes ready parts; ``engine/loading.py`` makes them.

        Args:
            model: a causal language model, on its device, in eval mode.
            tokens: of its tokenizer.
            identity: of the model.
            rope: verified for the model.
            attention: implementation by transformers' name; ``auto`` leaves the model's own, but
                for ``sdpa`` on a CPU, which is ``kv/grouped_attention.py``'s then.
            eos_ids: end-of-sequence ids beside those of the model's configurations, such as the
                tokenizer's.
            executor: orders the turns at the device; a new one if the engine is alone on it.
            staging: makes what a handoff's bytes get to the device with, and from it.
        """
        if attention != "auto":
            model.set_attn_implementation(attention)
        else:
            prefer_grouped(model)
        self._runner = ModelRunner(model, executor or DeviceExecutor())
        self._make_staging = staging
        self._tokens = tokens
        self._identity = identity
        self._rope = rope
        self.kernels: Kernels = PLAIN
        self._eos_ids = self._runner.eos_ids | frozenset(eos_ids)

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, in eval mode, for what differentiates or looks into it."""
        return self._runner.model

    @property
    def rope(self) -> KeyRope:
        """How the model rotates its keys."""
        return self._rope

    @property
    def identity(self) -> ModelIdentity:
        """Of the model."""
        return self._identity

    @property
    def tokens(self) -> Tokens:
        """Of the model's tokenizer."""
        return self._tokens

    @property
    def device(self) -> torch.device:
        """Where caches lie and are computed."""
        return self._runner.device

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the caches."""
        return TORCH_DTYPES[self._identity.dtype]

    @property
    def attention(self) -> str:
        """Implementation of attention, by transformers' name."""
        config = self._runner.model.config.get_text_config()
        return str(config._attn_implementation)  # noqa: SLF001 - there is no public way to ask

    @property
    def vocabulary_size(self) -> int:
        """Rows of the input embedding: ids below it can be read."""
        return self._runner.vocabulary

    @property
    def bytes_only(self) -> bool:
        """Whether the model is made to be moved only: its text means nothing."""
        return is_bytes_only(self._runner.model.config)

    @property
    def model_tokens(self) -> int:
        """Tokens that went through the model's input embedding since it was loaded."""
        return self._runner.model_tokens

    @property
    def executor(self) -> DeviceExecutor:
        """Orders the turns at the device."""
        return self._runner.executor

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._eos_ids

    def open_cache(
        self, tokens: int, headroom: int, *, whole: bool, capacity_bytes: int | None = None
    ) -> PrefixCache:
        """Allocates and pre-faults an empty cache on the model's device.

        Args:
            tokens: of the prefix.
            headroom: tokens of room behind it.
            whole: keep every token of sliding layers too, as a prefill needs.
            capacity_bytes: refuse to allocate more.

        Raises:
            BudgetExceeded: it would be larger than ``capacity_bytes``.
        """
        needed = self.cache_bytes(tokens, headroom, whole=whole)
        if capacity_bytes is not None and needed > capacity_bytes:
            raise BudgetExceeded(f"the cache needs {needed} bytes, the budget has {capacity_bytes}")
        identity = self._identity
        return PrefixCache.allocate(
            identity.layers, identity.dtype, tokens, headroom, self._runner.device, whole=whole
        )

    def cache_bytes(self, tokens: int, headroom: int, *, whole: bool) -> int:
        """Bytes that ``open_cache`` would allocate."""
        identity = self._identity
        return cache_bytes(identity.layers, identity.dtype, tokens, headroom, whole=whole)

    def prefill(
        self,
        cache: PrefixCache,
        ids: Sequence[int],
        block_tokens: int,
        on_block: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Reads ``ids[cache.length:]`` into ``cache``: *the* prefill schedule of the project.

        One forward for each block of ``block_tokens`` positions, aligned to position 0; a cache
        that holds a part of a block already gets the rest of that block first.

        Args:
            cache: with room for all of ``ids``, allocated ``whole``.
            ids: the whole prefix.
            block_tokens: tokens of a block.
            on_block: called with the block's index when its keys and values are in ``cache``; the
                device is free meanwhile.
            cancelled: asked before each block.

        Raises:
            HandoffAborted: ``cancelled`` said so.
            HeadroomExceeded: the cache is too small for ``ids``.
            InvalidRequest: an id outside the vocabulary.
            QueryTooLong: beyond the model's window.
        """
        self._check_ids("prefix", ids)
        self._check_room(cache, "the prefix", len(ids))
        while cache.length < len(ids):
            if cancelled is not None and cancelled():
                raise HandoffAborted(f"prefill given up at token {cache.length} of {len(ids)}")
            block = cache.length // block_tokens
            stop = min(len(ids), (block + 1) * block_tokens)
            self._runner.forward(cache, ids[cache.length : stop], urgent=False)
            if on_block is not None:
                on_block(block)

    def answer(
        self,
        cache: PrefixCache,
        prefix_ids: Sequence[int],
        query_ids: Sequence[int],
        sampling: Sampling,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Delta | Finish]:
        """Reads the query in one forward and generates; the last item is a ``Finish``.

        Query and answer are written behind ``cache.length``, into room that the caller has leased.
        The cache is not truncated at the end: its length is then prefix + query + generated − 1,
        and the caller either keeps that or truncates.

        Args:
            cache: holding the prefix.
            prefix_ids: its ids, for the repetition penalty.
            query_ids: at least one.
            sampling: how tokens are chosen.
            cancelled: asked before each token.

        Raises:
            EmptyQuery: no query ids.
            HeadroomExceeded: the cache has no room for query and answer; before any token.
            InvalidRequest: an id outside the vocabulary, or a sampling parameter out of range.
            QueryTooLong: beyond the model's window.
        """
        loop = self._loop(cache, prefix_ids, query_ids, sampling, cancelled)
        return self._deltas(loop, sampling)

    def generate_steps(
        self,
        cache: PrefixCache,
        prefix_ids: Sequence[int],
        query_ids: Sequence[int],
        sampling: Sampling,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Step]:
        """What ``answer`` is built on: tokens with the logits that they were chosen from.

        Stop strings play no part here. Arguments and errors are those of ``answer``.
        """
        return iter(self._loop(cache, prefix_ids, query_ids, sampling, cancelled))

    def score(self, cache: PrefixCache, ids: Sequence[int]) -> Tensor:
        """Logits ``[T, V]`` (float32) after each of ``ids``, read behind the cache in one forward.

        Teacher forcing: how well a cache predicts a text that is known.

        Args:
            cache: holding the prefix; it grows by ``ids``.
            ids: at least one.

        Raises:
            HeadroomExceeded: the cache has no room for ``ids``.
            InvalidRequest: an id outside the vocabulary.
            QueryTooLong: beyond the model's window.
        """
        self._check_ids("text", ids)
        self._check_room(cache, "the text", cache.length + len(ids))
        return self._runner.forward(cache, ids, urgent=False, every_logit=True).logits

    def to_content(self, layer: int, keys: Tensor, start: int) -> Tensor:
        """Removes RoPE: ``[H, T, D]`` cached keys from position ``start`` → float32, same shape."""
        return self._rope.to_content(layer, keys, start)

    def rotate_into(self, layer: int, content: Tensor, start: int, out: Tensor) -> None:
        """Applies RoPE to float32 ``[H, T, D]`` keys and casts them into ``out``, same shape."""
        self._rope.rotate_into(layer, content, start, out)

    def half_angles(self, layer: int, start: int, stop: int, *, inverse: bool) -> PairAngles | None:
        """See ``Engine.half_angles``."""
        return self._rope.half_angles(layer, start, stop, self.device, inverse=inverse)

    def rope_tables_digest(self, tokens: int) -> str:
        """BLAKE3 of the cos/sin tables at positions 0, 1 and ``tokens - 1``, in hexadecimal."""
        return self._rope.tables_digest(tokens)

    def staging(self) -> Staging | None:
        """New staging for one side of one handoff; None on a CPU."""
        return self._make_staging(self._runner.device)

    def device_turn(self, *, urgent: bool) -> DeviceTurn:
        """A turn at the device, to be entered. Answers (``urgent``) go before installs."""
        return self._runner.executor.turn(urgent=urgent)

    def _loop(
        self,
        cache: PrefixCache,
        prefix_ids: Sequence[int],
        query_ids: Sequence[int],
        sampling: Sampling,
        cancelled: Callable[[], bool] | None,
    ) -> TokenLoop:
        """Checks everything, then prepares the token loop; no forward yet."""
        if not query_ids:
            raise EmptyQuery("the query has 0 tokens, at least 1 is needed")
        check_sampling(sampling)
        self._check_ids("query", query_ids)
        seen_ids: list[int] = []
        if sampling.repetition_penalty != 1.0:
            self._check_ids("prefix", prefix_ids)
            seen_ids = [*prefix_ids, *query_ids]
        end = cache.length + len(query_ids) + sampling.max_new_tokens - 1
        self._check_room(cache, "prefix, query and answer", end)
        return TokenLoop(
            lambda ids: self._runner.forward(cache, ids, urgent=True),
            TokenChooser(sampling, seen_ids, self._runner.device),
            query_ids,
            max_new_tokens=sampling.max_new_tokens,
            eos_ids=() if sampling.ignore_eos else self._eos_ids,
            cancelled=cancelled,
        )

    def _deltas(self, loop: TokenLoop, sampling: Sampling) -> Iterator[Delta | Finish]:
        text = TextStream(self._tokens.decode, sampling.stop)
        for step in loop:
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sampling.logprobs is not None:
                logprobs = (token_logprobs(step.logits, step.token_id, sampling.logprobs),)
            yield Delta(text.push(step.token_id), (step.token_id,), logprobs)
            if text.stopped:
                loop.stop()
                break
        if rest := text.flush():
            yield Delta(rest, ())
        yield loop.finish()

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self._runner.vocabulary:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"{what} id {wrong} is outside the vocabulary of {self._runner.vocabulary}"
            )

    def _check_room(self, cache: PrefixCache, what: str, tokens: int) -> None:
        if tokens > self._identity.max_positions:
            raise QueryTooLong(
                f"{what} take {tokens} positions, the model has {self._identity.max_positions}"
            )
        if tokens > cache.capacity:
            raise HeadroomExceeded(
                f"{what} take {tokens} positions, the cache has room for {cache.capacity}"
            )


__all__ = ["TransformersEngine"]
