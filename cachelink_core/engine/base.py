"""What CacheLink needs of a model runtime: prefill in blocks, open a prefix cache, answer.

``transformers_engine.py`` is the first implementation. An engine owns one model and one device; its
methods are called from several threads, and it orders them itself (``engine/executor.py``).

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.codecs.kernels import Kernels, PairAngles
from cachelink_core.engine.staging import Staging
from cachelink_core.identity import ModelIdentity
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import QueryFrame

Message = dict[str, str]
"""``{"role": …, "content": …}``."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    Attributes:
        max_new_tokens: the answer's length at most.
        temperature: 0 is greedy.
        top_k: 0 for no cut.
        top_p: 1 for no cut.
        repetition_penalty: 1 for none; it sees prefix, query and answer.
        seed: of the random generator of a sampled answer.
        stop: texts at which the answer ends; they are no part of it.
        ignore_eos: go on past the end-of-sequence token.
        logprobs: alternatives a token to report, None for no log-probabilities.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities after the processors' raw logits: chosen token, alternatives."""

    chosen: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of an answer.

    Attributes:
        text: whole characters that became certain with this token; may be empty.
        token_ids: the tokens of this step; empty only in a last delta that flushes held-back text.
        logprobs: one entry a token, when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer.

    Attributes:
        reason: why it ended.
        query_tokens: tokens of the query, all processed in one forward.
        generated_ids: every generated token, the end-of-sequence token included.
        model_tokens: tokens that the model processed for this answer, counted in the model.
        query_prefill_s: the query's forward, including its wait for the device.
        decode_s: from the first token to the last.
        device_wait_s: of both, the wait for the device.
    """

    reason: FinishReason
    query_tokens: int
    generated_ids: tuple[int, ...]
    model_tokens: int
    query_prefill_s: float
    decode_s: float
    device_wait_s: float


@dataclass(frozen=True, slots=True)
class Prefix:
    """A tokenized prefix.

    Attributes:
        ids: token ids from position 0.
        frame: template text around a later question.
        messages: the conversation it was rendered from, if it was.
    """

    ids: tuple[int, ...]
    frame: QueryFrame = field(default_factory=QueryFrame)
    messages: tuple[Message, ...] = ()


class Tokens(Protocol):
    """Text to ids and back, for one model. Nothing here adds special tokens on its own."""

    def document(self, text: str, *, chat: bool | None = None) -> Prefix:
        """Tokenizes a document as a prefix.

        In the chat template where the model has one (or ``chat`` says so): the template around a
        user message that begins with the document, cut where the question will go. Otherwise the
        beginning-of-sequence token, if the model has one, and the plain text. Special-token strings
        in the document are plain text.
        """

    def conversation(self, messages: Sequence[Message]) -> Prefix:
        """Renders a conversation as a prefix; the frame wraps the next user message."""

    def question(self, text: str, frame: QueryFrame) -> tuple[int, ...]:
        """Ids of a question in its frame."""

    def plain(self, text: str) -> tuple[int, ...]:
        """Ids of a text verbatim, special-token strings plain."""

    def continuation(self, messages: Sequence[Message], cached: Sequence[int]) -> tuple[int, ...]:
        """Ids that follow ``cached`` when ``messages`` are rendered for an answer.

        Raises:
            PrefixMismatch: the rendered ids do not begin with ``cached``; names the first differing
                position with both ids.
        """

    def next_frame(self, frame: QueryFrame, last_id: int) -> QueryFrame:
        """The frame of the next turn, after an answer that ended with ``last_id``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens skipped."""


class Engine(Protocol):
    """A model that can fill a prefix cache and answer from one."""

    kernels: Kernels
    """What quantizing codecs compute with; set once, before the first handoff."""

    @property
    def identity(self) -> ModelIdentity:
        """Of the model."""

    @property
    def tokens(self) -> Tokens:
        """Of the model's tokenizer."""

    @property
    def device(self) -> torch.device:
        """Where caches lie and are computed."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the caches."""

    @property
    def attention(self) -> str:
        """Implementation of attention, by transformers' name. Bits are equal only where it is."""

    @property
    def vocabulary_size(self) -> int:
        """Ids below it can be read."""

    @property
    def bytes_only(self) -> bool:
        """Whether the model is made to be moved only: its text means nothing."""

    @property
    def model_tokens(self) -> int:
        """Tokens that the model has processed since it was loaded, counted by a hook in it."""

    def open_cache(
        self, tokens: int, headroom: int, *, whole: bool, capacity_bytes: int | None = None
    ) -> PrefixCache:
        """Allocates and pre-faults an empty cache.

        Args:
            tokens: of the prefix.
            headroom: tokens of room behind it.
            whole: keep every token of sliding layers too, as a prefill needs; otherwise those
                layers hold the window only, as a receiver gets it.
            capacity_bytes: refuse to allocate more.

        Raises:
            BudgetExceeded: it would be larger than ``capacity_bytes``.
        """

    def cache_bytes(self, tokens: int, headroom: int, *, whole: bool) -> int:
        """Bytes that ``open_cache`` would allocate."""

    def prefill(
        self,
        cache: PrefixCache,
        ids: Sequence[int],
        block_tokens: int,
        on_block: Callable[[int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Reads ``ids[cache.length:]`` into ``cache``: *the* prefill schedule of the project.

        One forward for each block of ``block_tokens`` positions, aligned to position 0; a cache that
        holds a part of a block already gets the rest of that block first.

        Args:
            cache: with room for all of ``ids``.
            ids: the whole prefix.
            block_tokens: tokens of a block.
            on_block: called with the block's index when its keys and values are in ``cache``; the
                device is free meanwhile.
            cancelled: asked before each block.

        Raises:
            HandoffAborted: ``cancelled`` said so.
            QueryTooLong: beyond the model's window.
            InvalidRequest: an id outside the vocabulary.
        """

    def answer(
        self,
        cache: PrefixCache,
        prefix_ids: Sequence[int],
        query_ids: Sequence[int],
        sampling: Sampling,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Delta | Finish]:
        """Reads the query in one forward and generates; the last item is a ``Finish``.

        The query and the answer are written behind the prefix, into the cache's headroom, which the
        caller has leased. The last generated token is not processed: the model processes
        ``len(query_ids) + generated - 1`` tokens.

        Args:
            cache: holding the prefix.
            prefix_ids: its ids, for the repetition penalty.
            query_ids: at least one.
            sampling: how tokens are chosen.
            cancelled: asked before each token.

        Raises:
            EmptyQuery: no query ids.
            QueryTooLong: beyond the model's window.
            InvalidRequest: an id outside the vocabulary.
            HeadroomExceeded: the cache has no room for query and answer; before any token.
        """

    def to_content(self, layer: int, keys: Tensor, start: int) -> Tensor:
        """Removes RoPE: ``[H, T, D]`` cached keys from position ``start`` → float32, same shape."""

    def rotate_into(self, layer: int, content: Tensor, start: int, out: Tensor) -> None:
        """Applies RoPE to float32 ``[H, T, D]`` keys and casts them into ``out``, same shape."""

    def half_angles(self, layer: int, start: int, stop: int, *, inverse: bool) -> PairAngles | None:
        """What turns channels i and P + i of the keys of positions ``[start, stop)``.

        Args:
            layer: index.
            start: first absolute position.
            stop: one beyond the last.
            inverse: to remove the rotation, not to apply it.

        Returns:
            cos and sin, ``[T, P]`` float32 each, not to be changed; None for a layer without RoPE
            or with other pairs, whose keys only the two methods above can turn.
        """

    def rope_tables_digest(self, tokens: int) -> str:
        """BLAKE3 of the cos/sin tables at positions 0, 1 and ``tokens - 1``, in hexadecimal."""

    def staging(self) -> Staging | None:
        """New staging for one side of one handoff; None where caches lie in the host's memory."""

    def device_turn(self, *, urgent: bool) -> DeviceTurn:
        """Waits for the device. Answers (``urgent``) go before installs."""


class DeviceTurn(Protocol):
    """A context manager that holds the device; ``waited_s`` is how long that took."""

    waited_s: float

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


__all__ = [
    "Delta",
    "DeviceTurn",
    "Engine",
    "Finish",
    "FinishReason",
    "Message",
    "Prefix",
    "Sampling",
    "TensorKind",
    "TokenLogprobs",
    "Tokens",
]
