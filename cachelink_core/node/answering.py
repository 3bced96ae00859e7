"""Answer, as both daemons serve it: open a context, read the query, stream, and perhaps keep."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from cachelink_core import names
from cachelink_core.codec_spec import NATIVE
from cachelink_core.engine.base import Delta, Engine, Finish
from cachelink_core.engine.store import CacheStore, StoredCache
from cachelink_core.errors import InternalError, QueryTooLong, UnsupportedModel
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.logs import logger
from cachelink_core.manifest import MAPPER_NONE, pack_ids
from cachelink_core.metrics import Metrics
from cachelink_core.node.contexts import Contexts, Opened
from cachelink_core.node.measured import Measured
from cachelink_core.node.queries import engine_sampling, query_ids
from cachelink_core.rpc import types
from cachelink_core.rpc.handlers import Call

_log = logger(__name__)


class AnswerService:
    """Answers questions from the caches of one node."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: CacheStore,
        contexts: Contexts,
        metrics: Metrics,
        measured: Measured,
        block_tokens: int,
        headroom_tokens: int,
    ) -> None:
        """Binds the node's parts."""
        self._engine = engine
        self._store = store
        self._contexts = contexts
        self._metrics = metrics
        self._measured = measured
        self._block_tokens = block_tokens
        self._headroom_tokens = headroom_tokens

    def answer(
        self, request: types.AnswerRequest, call: Call
    ) -> Iterator[types.Delta | types.Final]:
        """See ``NodeHandler.answer``.

        Raises:
            UnsupportedModel: the model is made to be moved only.
        """
        if self._engine.bytes_only:
            raise UnsupportedModel(
                "the model is bytes-only: its caches are moved, verified and listed, but its text "
                "means nothing, so that it answers no question and re-reads for none"
            )
        began = time.monotonic()
        room = max(self._headroom_tokens, request.sampling.max_new_tokens)
        with self._contexts.open(request, room, call) as opened:
            query = query_ids(self._engine.tokens, request.query, opened.frame, opened.ids)
            self._check_window(opened, query, request.sampling)
            needed = len(query) + request.sampling.max_new_tokens
            with self._contexts.grown(opened, needed) as cache:
                yield from self._stream(request, call, opened, cache, query, began)

    def _stream(
        self,
        request: types.AnswerRequest,
        call: Call,
        opened: Opened,
        cache: PrefixCache,
        query: tuple[int, ...],
        began: float,
    ) -> Iterator[types.Delta | types.Final]:
        first_s = 0.0
        # Tokenizing the question, growing the cache: what is none of the context's own phases.
        asked_s = time.monotonic()
        opened.phases["prepare"] = asked_s - began - sum(opened.phases.values())
        sampling = engine_sampling(request.sampling)
        steps = self._engine.answer(cache, opened.ids, query, sampling, call.cancelled)
        for item in steps:
            if isinstance(item, Finish):
                kept = self._keep(request, call, opened, cache, query, item)
                yield self._final(opened, query, item, first_s, began, asked_s, kept)
                return
            if not first_s and item.token_ids:
                first_s = time.monotonic() - began
            yield _delta(item)
        raise InternalError("the engine's answer has no end")

    def _check_window(
        self, opened: Opened, query: tuple[int, ...], sampling: types.Sampling
    ) -> None:
        window = self._engine.identity.max_positions
        total = len(opened.ids) + len(query) + sampling.max_new_tokens - 1
        if total > window:
            raise QueryTooLong(
                f"prefix {len(opened.ids)} + query {len(query)} + answer "
                f"{sampling.max_new_tokens} tokens exceed the model's window of {window}"
            )

    def _keep(
        self,
        request: types.AnswerRequest,
        call: Call,
        opened: Opened,
        cache: PrefixCache,
        query: tuple[int, ...],
        finish: Finish,
    ) -> str:
        """Commits prefix, query and answer as a cache of their own.

        The last generated token was not processed yet; it is now, alone, as the next decoding step
        would have done. So the kept cache holds every token of the conversation, and a later turn
        or a handoff of it starts from the same tensors on whichever node it runs.
        """
        if not request.keep or finish.reason == "cancelled":
            return ""
        ids = (*opened.ids, *query, *finish.generated_ids)
        tokens = self._engine.tokens
        size = self._engine.cache_bytes(len(ids), self._headroom_tokens, whole=True)
        with self._store.reserve(size) as reservation:
            kept = cache.copy(cache.length, self._headroom_tokens + 1)
            self._engine.prefill(kept, ids, self._block_tokens)
            identity = self._engine.identity
            name = names.cache_id(
                tenant=call.tenant,
                receiver=identity,
                sender=identity,
                block_tokens=self._block_tokens,
                token_ids=pack_ids(ids),
                codec=NATIVE,
                # What was rounded or translated must not pass for the exact cache of these ids.
                mapper=MAPPER_NONE if opened.trust == "exact" else opened.cache_id,
            )
            self._store.put(
                StoredCache(
                    tenant=call.tenant,
                    cache_id=name,
                    handoff_id="",
                    cache=kept,
                    ids=ids,
                    frame=tokens.next_frame(opened.frame, ids[-1]),
                    trust=opened.trust,
                    codec="",
                    producer=identity,
                ),
                reservation,
            )
        _log.info("kept", cache_id=name, tokens=len(ids), trust=opened.trust)
        return name

    def _final(
        self,
        opened: Opened,
        query: tuple[int, ...],
        finish: Finish,
        first_s: float,
        began: float,
        asked_s: float,
        kept: str,
    ) -> types.Final:
        metrics = self._metrics
        metrics.answers.labels(path=opened.path).inc()
        metrics.query_prefill_seconds.observe(finish.query_prefill_s)
        metrics.first_token_seconds.observe(first_s)
        metrics.decode_seconds.observe(finish.decode_s)
        metrics.device_wait_seconds.labels(kind="answer").observe(finish.device_wait_s)
        metrics.tokens.labels(kind="query").inc(len(query))
        metrics.tokens.labels(kind="generated").inc(len(finish.generated_ids))
        self._measured.answered(
            prefix_s=opened.phases.get("prefix", 0.0),
            query_s=finish.query_prefill_s,
            decode_s=finish.decode_s,
            generated=len(finish.generated_ids),
        )
        plan = opened.plan and msgspec.structs.replace(opened.plan, took_s=first_s)
        now = time.monotonic()
        return types.Final(
            path=opened.path,
            path_reason=opened.why,
            cached_tokens=opened.cached_tokens,
            fresh_tokens=opened.fresh_tokens + len(query),
            generated_tokens=len(finish.generated_ids),
            model_tokens=opened.fresh_tokens + finish.model_tokens + bool(kept),
            finish_reason=finish.reason.value,
            phases={
                **opened.phases,
                "query_prefill": finish.query_prefill_s,
                "decode": finish.decode_s,
                "finish": now - asked_s - finish.query_prefill_s - finish.decode_s,
                "device_wait": finish.device_wait_s,
                "total": now - began,
            },
            first_token_s=first_s,
            cache_id=opened.cache_id,
            kept_cache_id=kept,
            plan=plan,
        )


def _delta(delta: Delta) -> types.Delta:
    return types.Delta(
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=tuple(
            types.TokenLogprobs(entry.chosen, entry.alternatives) for entry in delta.logprobs
        ),
    )
