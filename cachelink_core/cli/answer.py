"""``cachelink answer``: ask a node, and stream what it says."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from cachelink_core import limits, units
from cachelink_core.cli.connection import (
    DEFAULT_RECEIVER,
    CaOption,
    CertificateOption,
    Connection,
    JsonOption,
    KeyOption,
    NodeOption,
    TlsOption,
    TokenOption,
)
from cachelink_core.cli.output import print_json, reporting
from cachelink_core.cli.sources import only_one, read_messages, read_text, read_token_ids
from cachelink_core.cli.wanted import ErrorOption, LeastTrust, TrustOption
from cachelink_core.rpc import types
from cachelink_core.rpc.client import (
    Answer,
    Delta,
    Document,
    Final,
    HeldCache,
    HeldHandoff,
    Question,
    Sampling,
    VerbatimText,
)


class OnFailure(StrEnum):
    """What happens when the cache cannot be used."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class Policy(StrEnum):
    """Where an answer comes from."""

    CACHE = "cache"
    AUTO = "auto"


@reporting
def answer(
    question: Annotated[
        str | None, typer.Argument(help="A question, put into the cache's chat frame.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instead: a continuation, verbatim.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="FILE|LIST", help="Instead: token ids, verbatim.")
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instead: the whole conversation, as a JSON list."),
    ] = None,
    cache: Annotated[str | None, typer.Option(metavar="ID", help="Answer from this cache.")] = None,
    handoff: Annotated[
        str | None,
        typer.Option(metavar="ID", help="From what this handoff brought, or is still bringing."),
    ] = None,
    document: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="From a document, read by that node now.")
    ] = None,
    prefix_token_ids: Annotated[
        str | None, typer.Option(metavar="FILE|LIST", help="From token ids, read now.")
    ] = None,
    prefix_messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="From a conversation, read now.")
    ] = None,
    node: NodeOption = DEFAULT_RECEIVER,
    max_new_tokens: Annotated[int, typer.Option(help="The answer's length at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 for no cut.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 for no cut.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 for none.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of a sampled answer.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends the answer; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities and so many alternatives.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep question and answer as a new cache.")
    ] = False,
    least_trust: TrustOption = LeastTrust.MAPPED,
    max_error: ErrorOption = None,
    policy: Annotated[
        Policy,
        typer.Option(help="From the cache, or auto: the cache or reading again, as is faster."),
    ] = Policy.CACHE,
    on_failure: Annotated[
        OnFailure, typer.Option(help="When the cache cannot be used: fail, or read it again.")
    ] = OnFailure.FAIL,
    wait: Annotated[
        str, typer.Option(metavar="TIME", help="For a cache that is still arriving.")
    ] = "30s",
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="For the whole answer.")
    ] = units.format_duration(limits.ANSWER_DEADLINE_S),
    tls: TlsOption = False,
    tls_ca: CaOption = None,
    tls_certificate: CertificateOption = None,
    tls_key: KeyOption = None,
    token_file: TokenOption = None,
    json_output: JsonOption = False,
) -> None:
    """Ask a question; the answer streams to standard output, its facts follow on standard error."""
    context = read_context(cache, handoff, document, prefix_token_ids, prefix_messages)
    query = read_query(question, text, token_ids, messages)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    connection = Connection(tls, tls_ca, tls_certificate, tls_key, token_file)
    with connection.node(node) as client:
        running = client.answer(
            context,
            query,
            sampling=sampling,
            least_trust=least_trust.value,
            on_failure=on_failure.value,
            keep=keep,
            wait_s=units.parse_duration(wait),
            policy=policy.value,
            max_error=max_error,
            deadline_s=units.parse_duration(deadline),
        )
        with running:
            if json_output:
                print_json(answer_document(running))
            else:
                _stream(running)


def read_context(
    cache: str | None,
    handoff: str | None,
    document: str | None,
    prefix_token_ids: str | None,
    prefix_messages: str | None,
) -> types.Context:
    """What is answered from.

    Raises:
        InvalidRequest: not exactly one is given, or it cannot be read.
    """
    which = only_one(
        "context",
        cache=cache,
        handoff=handoff,
        document=document,
        prefix_token_ids=prefix_token_ids,
        prefix_messages=prefix_messages,
    )
    if which == "cache":
        return HeldCache(str(cache))
    if which == "handoff":
        return HeldHandoff(str(handoff))
    if which == "document":
        return Document(read_text(str(document)))
    if which == "prefix_token_ids":
        return read_token_ids(str(prefix_token_ids))
    return read_messages(str(prefix_messages))


def read_query(
    question: str | None, text: str | None, token_ids: str | None, messages: str | None
) -> types.Query:
    """What is asked.

    Raises:
        InvalidRequest: not exactly one is given, or it cannot be read.
    """
    which = only_one("query", QUESTION=question, text=text, token_ids=token_ids, messages=messages)
    if which == "text":
        return VerbatimText(str(text))
    if which == "token_ids":
        return read_token_ids(str(token_ids))
    if which == "messages":
        return read_messages(str(messages))
    return Question(str(question))


def answer_document(running: Answer) -> dict[str, Any]:
    """Reads an answer to its end and gives it as one JSON value.

    Raises:
        CacheLinkError: the call failed.
    """
    deltas: list[Delta] = list(running)
    return {
        "text": "".join(delta.text for delta in deltas),
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        "logprobs": [entry for delta in deltas for entry in delta.logprobs],
        "final": running.final,
    }


def _stream(running: Answer) -> None:
    for delta in running:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert running.final is not None, "the answer was read to its end"
    sys.stderr.write(final_line(running.final) + "\n")


def final_line(final: Final) -> str:
    """The facts of an answer in one line."""
    parts = [
        f"path {final.path}",
        f"{final.cached_tokens} cached + {final.fresh_tokens} read + "
        f"{final.generated_tokens} generated tokens",
        f"ended by {final.finish_reason}",
        f"first token {final.first_token_s:.3f} s",
        f"total {final.phases.get('total', 0.0):.3f} s",
    ]
    if final.plan is not None and final.plan.predicted_s is not None:
        parts.append(f"chose {final.plan.chosen}, predicted {final.plan.predicted_s:.3f} s")
    if final.cache_id:
        parts.append(f"cache {final.cache_id}")
    if final.kept_cache_id:
        parts.append(f"kept as {final.kept_cache_id}")
    return "[" + "; ".join(parts) + "]"
