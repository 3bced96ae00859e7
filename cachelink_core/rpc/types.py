"""What crosses a call, as plain frozen values: no protobuf, no torch.

A value that exists is within its limits: the constructors of requests check them, so a client hears
of a wrong argument before it connects, and a server refuses it before it costs anything.

Names ending in ``_s`` are seconds of one host's clock, ``_bytes`` are bytes; token counts are plain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cachelink_core import limits
from cachelink_core.codec_spec import Trust
from cachelink_core.errors import InvalidRequest
from cachelink_core.identity import ModelIdentity
from cachelink_core.planner import Measurement, Plan

Role = Literal["sender", "receiver"]
Path = Literal["exact", "lossy", "mapped", "recompute"]
FinishReason = Literal["stop", "length", "cancelled"]
OnFailure = Literal["recompute", "fail"]
Policy = Literal["cache", "auto"]
DataPlane = Literal["", "grpc", "tcp"]
Recommendation = Literal["", "transfer", "re_read"]
PrefixOrigin = Literal["", "held", "captured", "prefilled"]
Phases = Mapping[str, float]
"""Seconds by phase, in the order in which they ended."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: ``system``, ``user`` or ``assistant``, as the model's template knows them.
        content: its text.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        _check_text("messages.content", self.content)


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be read as a prefix.

    Attributes:
        text: special-token strings in it are plain text.
        chat: whether it goes into the model's chat template; None for yes where there is one.
    """

    text: str
    chat: bool | None = None

    def __post_init__(self) -> None:
        _check_text("document.text", self.text)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids, verbatim."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ids) > limits.MAX_PREFIX_TOKENS:
            raise InvalidRequest(
                f"token_ids: {len(self.ids)} ids; the limit is {limits.MAX_PREFIX_TOKENS}"
            )
        for position, token in enumerate(self.ids):
            if not 0 <= token < 2**32:
                raise InvalidRequest(f"token_ids[{position}] is {token}, not a u32")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, rendered with the model's chat template."""

    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidRequest("messages: none given")


@dataclass(frozen=True, slots=True)
class HeldCache:
    """A cache that the addressed node holds."""

    cache_id: str

    def __post_init__(self) -> None:
        _check_id("cache_id", self.cache_id)


@dataclass(frozen=True, slots=True)
class HeldHandoff:
    """The cache that a handoff brought, or is still bringing."""

    handoff_id: str

    def __post_init__(self) -> None:
        _check_id("handoff_id", self.handoff_id)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, to be wrapped in the query frame of the cache."""

    text: str

    def __post_init__(self) -> None:
        _check_text("question", self.text)


@dataclass(frozen=True, slots=True)
class VerbatimText:
    """A continuation of the prefix, taken as it is; special-token strings are plain text."""

    text: str

    def __post_init__(self) -> None:
        _check_text("text", self.text)


PrefixSource = Document | TokenIds | Conversation | HeldCache
"""What a sender makes a prefix of."""

Context = HeldCache | HeldHandoff | Document | TokenIds | Conversation
"""What a question is answered from; the last three are read anew by the addressed node."""

Query = Question | VerbatimText | TokenIds | Conversation
"""What is asked. Messages are the whole conversation and begin with the cached ids."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    Attributes:
        max_new_tokens: the answer's length at most.
        temperature: 0 is greedy.
        top_k: 0 for no cut.
        top_p: 1 for no cut.
        repetition_penalty: 1 for none.
        seed: of a sampled answer.
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

    def __post_init__(self) -> None:
        _check_range("sampling.max_new_tokens", self.max_new_tokens, 1, limits.MAX_NEW_TOKENS)
        _check_range("sampling.temperature", self.temperature, 0.0, limits.MAX_TEMPERATURE)
        _check_range("sampling.top_k", self.top_k, 0, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"sampling.top_p is {self.top_p}, not within (0, 1]")
        if not (self.repetition_penalty > 0.0 and math.isfinite(self.repetition_penalty)):
            raise InvalidRequest(
                f"sampling.repetition_penalty is {self.repetition_penalty}, not above 0"
            )
        _check_range("sampling.seed", self.seed, 0, 2**64 - 1)
        _check_range("sampling.stop", len(self.stop), 0, limits.MAX_STOP_STRINGS)
        if not all(self.stop):
            raise InvalidRequest("sampling.stop holds an empty string")
        if self.logprobs is not None:
            _check_range("sampling.logprobs", self.logprobs, 0, limits.MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One question.

    Attributes:
        context: what it is answered from.
        query: what is asked.
        sampling: how tokens are chosen.
        least_trust: the least that is good enough.
        on_failure: whether to re-read the prefix when the cache cannot be used.
        keep: commit prefix, query and answer as a new cache.
        wait_s: how long to wait for a handoff that is still arriving; None for the node's default.
        policy: ``cache``, or ``auto`` for whatever gives the first token first: the cache, waited
            for if need be, or the prefix read again.
        max_error: largest expected next-token KL of a cache in nats; None for any.
    """

    context: Context
    query: Query
    sampling: Sampling = field(default_factory=Sampling)
    least_trust: Trust = "mapped"
    on_failure: OnFailure = "fail"
    keep: bool = False
    wait_s: float | None = None
    policy: Policy = "cache"
    max_error: float | None = None

    def __post_init__(self) -> None:
        _check_choice("least_trust", self.least_trust, ("exact", "lossy", "mapped"))
        _check_choice("on_failure", self.on_failure, ("recompute", "fail"))
        _check_choice("policy", self.policy, ("cache", "auto"))
        _check_error("max_error", self.max_error)
        if self.wait_s is not None:
            _check_range("wait_s", self.wait_s, 0.0, limits.MAX_LEASE_S)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the chosen token, and of alternatives as (id, value)."""

    chosen: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of an answer.

    Attributes:
        text: whole characters only; may be empty.
        token_ids: the tokens of this step.
        logprobs: one entry a token, when asked for.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Final:
    """The end of an answer.

    Attributes:
        path: what the answer was made from.
        path_reason: why.
        cached_tokens: of the prefix, taken from a cache.
        fresh_tokens: read for this answer.
        generated_tokens: of the answer.
        model_tokens: processed by the model for this answer, counted in it.
        finish_reason: why it ended.
        phases: seconds by phase; ``wait``, ``queue``, ``prefix``, ``prepare``, ``query_prefill``,
            ``decode`` and ``finish`` sum to ``total``.
        first_token_s: from the request to the first token.
        cache_id: the cache it was made from, if any.
        kept_cache_id: the cache that it became, if asked for.
        plan: what was predicted, chosen and took, with policy ``auto``.
    """

    path: Path
    path_reason: str
    cached_tokens: int
    fresh_tokens: int
    generated_tokens: int
    model_tokens: int
    finish_reason: FinishReason
    phases: Phases = field(default_factory=dict)
    first_token_s: float = 0.0
    cache_id: str = ""
    kept_cache_id: str = ""
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """Hand a prefix over to a receiver of the sender's list.

    Attributes:
        prefix: what to hand over.
        receiver: its name in the sender's list.
        codec: ``int4+zstd`` and the like; ``auto`` for the fastest that is good enough, which may
            be to send nothing; empty for the sender's default.
        stream: send each block as soon as it is prefilled.
        lease_s: None for the sender's default.
        mapper: digest of a mapper, ``any`` or ``none``; empty for ``none``.
        least_trust: the least that is good enough.
        max_error: largest expected next-token KL of the cache in nats; None for any.
        questions: that will be asked about the prefix, for ``auto``.
    """

    prefix: PrefixSource
    receiver: str
    codec: str = ""
    stream: bool = True
    lease_s: float | None = None
    mapper: str = ""
    least_trust: Trust = "mapped"
    max_error: float | None = None
    questions: int = 1

    def __post_init__(self) -> None:
        _check_id("receiver", self.receiver)
        _check_choice("least_trust", self.least_trust, ("exact", "lossy", "mapped"))
        _check_error("max_error", self.max_error)
        _check_range("questions", self.questions, 1, 2**31 - 1)
        if self.lease_s is not None:
            _check_range("lease_s", self.lease_s, limits.MIN_LEASE_S, limits.MAX_LEASE_S)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a handoff is.

    Attributes:
        handoff_id: empty for a prefill.
        tokens: of the prefix.
        prefilled_tokens: of these.
        raw_bytes: of the whole payload before packing.
        sent_raw_bytes: of these.
        sent_wire_bytes: as packed.
    """

    handoff_id: str
    tokens: int
    prefilled_tokens: int
    raw_bytes: int = 0
    sent_raw_bytes: int = 0
    sent_wire_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each block passed a stage, one entry a block.

    Each side counts from the reply to Reserve on its own clock; the two are never subtracted.

    Attributes:
        prefilled_at_s: sender.
        encoded_at_s: sender.
        sent_at_s: sender.
        verified_at_s: receiver.
        installed_at_s: receiver.
    """

    prefilled_at_s: tuple[float, ...] = ()
    encoded_at_s: tuple[float, ...] = ()
    sent_at_s: tuple[float, ...] = ()
    verified_at_s: tuple[float, ...] = ()
    installed_at_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The cache is where it was wanted.

    Attributes:
        handoff_id: empty for a prefill.
        cache_id: its name at the receiver; for a prefill, at the sender.
        sender_cache_id: its name at the sender.
        tokens: of the prefix.
        prefilled_tokens: processed by the sender's model for this handoff.
        codec: as used.
        trust: what the installed cache is worth.
        wire_bytes: payload bytes as sent.
        native_bytes: the same tokens in the model's own dtype.
        chunk_count: chunks sent.
        phases: seconds by phase; both clocks, each phase on one. ``start``, ``prefill_wait``,
            ``reserve``, ``send`` and ``tail`` sum to ``total``, ``load`` and ``install`` to
            ``check`` and ``tail``.
        timeline: of every block.
        already_installed: the receiver had it and nothing was sent.
        plan: what was predicted, chosen and took, with codec ``auto``.
        recommendation: with codec ``auto``; ``re_read`` means that nothing was sent.
        data_plane: that carried the chunks; empty if nothing was sent.
        prefix_origin: how the prefix came to the sender's cache: in memory, from disk, or read.
    """

    handoff_id: str
    cache_id: str
    sender_cache_id: str
    tokens: int
    prefilled_tokens: int
    codec: str
    trust: Trust
    wire_bytes: int = 0
    native_bytes: int = 0
    chunk_count: int = 0
    phases: Phases = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    already_installed: bool = False
    plan: Plan | None = None
    recommendation: Recommendation = ""
    data_plane: DataPlane = ""
    prefix_origin: PrefixOrigin = ""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """One cache of a node's store; ``bytes`` includes the headroom, ``pins`` are answers reading."""

    cache_id: str
    handoff_id: str
    tokens: int
    bytes: int
    trust: Trust
    codec: str
    age_s: float
    idle_s: float
    pins: int


@dataclass(frozen=True, slots=True)
class CacheList:
    """A node's store."""

    caches: tuple[CacheInfo, ...]
    used_bytes: int
    reserved_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What ping shows.

    Attributes:
        role: of the daemon.
        version: of the distribution.
        schema_version: the highest manifest version understood.
        epoch: a new one for every life of the process.
        identity: of the model.
        model_name: as the operator configured it.
        codecs: that it encodes or decodes.
        packings: likewise.
        receivers: names that a sender may push to.
        max_positions: the model's window.
        transfers: under way.
        transfer_slots: how many may be.
        answers: under way.
        answer_slots: how many may be.
        measurements: what it measured so far.
        device: where its model computes.
        attention: which implementation; bits are equal only where it is.
    """

    role: Role
    version: str
    schema_version: int
    epoch: str
    identity: ModelIdentity
    model_name: str
    codecs: tuple[str, ...]
    packings: tuple[str, ...]
    receivers: tuple[str, ...] = ()
    max_positions: int = 0
    transfers: int = 0
    transfer_slots: int = 0
    answers: int = 0
    answer_slots: int = 0
    measurements: tuple[Measurement, ...] = ()
    device: str = ""
    attention: str = ""


def _check_text(name: str, text: str) -> None:
    if len(text) > limits.MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"{name}: {len(text)} characters; the limit is {limits.MAX_TEXT_CHARS}"
        )


def _check_id(name: str, value: str) -> None:
    if not 0 < len(value) <= limits.MAX_ID_CHARS:
        raise InvalidRequest(
            f"{name}: {len(value)} characters; it must have 1 to {limits.MAX_ID_CHARS}"
        )


def _check_error(name: str, value: float | None) -> None:
    if value is not None and not value >= 0.0:  # written so that a NaN fails
        raise InvalidRequest(f"{name} is {value}, not a number of nats from 0 on")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # written so that a NaN fails
        raise InvalidRequest(f"{name} is {value}, not within [{low}, {high}]")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequest(f"{name} is {value!r}; known: {', '.join(choices)}")
