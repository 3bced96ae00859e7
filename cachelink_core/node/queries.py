"""Turns the context and the query of an answer request into token ids."""

from __future__ import annotations

from collections.abc import Sequence

from cachelink_core.engine.base import Prefix, Tokens
from cachelink_core.engine.base import Sampling as EngineSampling
from cachelink_core.errors import EmptyQuery
from cachelink_core.manifest import QueryFrame
from cachelink_core.rpc import types


def prefix_of(
    tokens: Tokens, source: types.Document | types.TokenIds | types.Conversation
) -> Prefix:
    """Tokenizes what a prefix is made of; ids are taken verbatim, with an empty frame."""
    match source:
        case types.Document(text, chat):
            return tokens.document(text, chat=chat)
        case types.TokenIds(ids):
            return Prefix(ids)
        case types.Conversation(messages):
            return tokens.conversation([_plain(message) for message in messages])


def query_ids(
    tokens: Tokens, query: types.Query, frame: QueryFrame, cached: Sequence[int]
) -> tuple[int, ...]:
    """Ids of a query behind the ids ``cached``.

    Raises:
        EmptyQuery: there are none.
        PrefixMismatch: messages that do not begin with the cached ids.
    """
    match query:
        case types.Question(text):
            if not text:
                raise EmptyQuery("question is empty")
            ids = tokens.question(text, frame)
        case types.VerbatimText(text):
            ids = tokens.plain(text)
        case types.TokenIds(verbatim):
            ids = verbatim
        case types.Conversation(messages):
            ids = tokens.continuation([_plain(message) for message in messages], cached)
    if not ids:
        raise EmptyQuery("the query has no tokens")
    return ids


def engine_sampling(sampling: types.Sampling) -> EngineSampling:
    """The same values as the engine takes them."""
    return EngineSampling(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop=sampling.stop,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def _plain(message: types.Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
