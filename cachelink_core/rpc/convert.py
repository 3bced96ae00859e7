"""Messages of the two node services as plain values and back, and nothing else.

What a request may hold is checked by the constructors in ``types``; here an absent field becomes its
default, and a ``oneof`` becomes one of the classes of a union.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from cachelink_core.codec_spec import Trust
from cachelink_core.errors import InvalidRequest
from cachelink_core.rpc import types
from cachelink_core.rpc.convert_plan import plan_from, plan_to
from cachelink_core.rpc.pb.cachelink.v1 import common_pb2 as pb
from cachelink_core.rpc.pb.cachelink.v1 import sender_pb2


def prefix_to(value: types.PrefixSource) -> pb.PrefixSource:
    """To protobuf."""
    match value:
        case types.Document(text, chat):
            return pb.PrefixSource(document=pb.Document(text=text, chat=chat))
        case types.TokenIds(ids):
            return pb.PrefixSource(token_ids=pb.TokenIds(ids=ids))
        case types.Conversation():
            return pb.PrefixSource(messages=_messages_to(value))
        case types.HeldCache(cache_id):
            return pb.PrefixSource(cache_id=cache_id)


def prefix_from(message: pb.PrefixSource) -> types.PrefixSource:
    """From protobuf.

    Raises:
        InvalidRequest: no source, or one beyond its limits.
    """
    match message.WhichOneof("source"):
        case "document":
            chat = message.document.chat if message.document.HasField("chat") else None
            return types.Document(message.document.text, chat)
        case "token_ids":
            return types.TokenIds(tuple(message.token_ids.ids))
        case "messages":
            return _messages_from(message.messages)
        case "cache_id":
            return types.HeldCache(message.cache_id)
        case _:
            raise InvalidRequest("prefix: give one of document, token_ids, messages, cache_id")


def answer_request_to(value: types.AnswerRequest) -> pb.AnswerRequest:
    """To protobuf."""
    message = pb.AnswerRequest(
        sampling=_sampling_to(value.sampling),
        least_trust=value.least_trust,
        on_failure=value.on_failure,
        keep=value.keep,
        wait_s=value.wait_s,
        logprobs=value.sampling.logprobs,
        policy=value.policy,
        max_error=value.max_error,
    )
    match value.context:
        case types.HeldCache(cache_id):
            message.cache_id = cache_id
        case types.HeldHandoff(handoff_id):
            message.handoff_id = handoff_id
        case prefix:
            message.read.CopyFrom(prefix_to(prefix))
    match value.query:
        case types.Question(text):
            message.question = text
        case types.VerbatimText(text):
            message.text = text
        case types.TokenIds(ids):
            message.token_ids.ids.extend(ids)
            message.token_ids.SetInParent()
        case types.Conversation() as conversation:
            message.messages.CopyFrom(_messages_to(conversation))
    return message


def answer_request_from(message: pb.AnswerRequest) -> types.AnswerRequest:
    """From protobuf.

    Raises:
        InvalidRequest: a field is missing, unknown or beyond its limits.
    """
    return types.AnswerRequest(
        context=_context_from(message),
        query=_query_from(message),
        sampling=_sampling_from(message),
        least_trust=cast(Trust, message.least_trust or "mapped"),
        on_failure=cast(types.OnFailure, message.on_failure or "fail"),
        keep=message.keep,
        wait_s=message.wait_s if message.HasField("wait_s") else None,
        policy=cast(types.Policy, message.policy or "cache"),
        max_error=message.max_error if message.HasField("max_error") else None,
    )


def answer_event_to(value: types.Delta | types.Final) -> pb.AnswerEvent:
    """To protobuf."""
    if isinstance(value, types.Delta):
        delta = pb.AnswerDelta(text=value.text, token_ids=value.token_ids)
        for entry in value.logprobs:
            alternatives = [pb.TokenLogprob(token_id=t, logprob=p) for t, p in entry.alternatives]
            delta.logprobs.add(chosen=entry.chosen, alternatives=alternatives)
        return pb.AnswerEvent(delta=delta)
    return pb.AnswerEvent(
        final=pb.AnswerFinal(
            path=value.path,
            path_reason=value.path_reason,
            cached_tokens=value.cached_tokens,
            fresh_tokens=value.fresh_tokens,
            generated_tokens=value.generated_tokens,
            model_tokens=value.model_tokens,
            finish_reason=value.finish_reason,
            phases=_phases_to(value.phases),
            first_token_s=value.first_token_s,
            kept_cache_id=value.kept_cache_id,
            cache_id=value.cache_id,
            plan=plan_to(value.plan),
        )
    )


def answer_event_from(message: pb.AnswerEvent) -> types.Delta | types.Final:
    """From protobuf."""
    if message.WhichOneof("event") == "delta":
        logprobs = tuple(
            types.TokenLogprobs(
                entry.chosen, tuple((a.token_id, a.logprob) for a in entry.alternatives)
            )
            for entry in message.delta.logprobs
        )
        return types.Delta(message.delta.text, tuple(message.delta.token_ids), logprobs)
    final = message.final
    return types.Final(
        path=cast(types.Path, final.path),
        path_reason=final.path_reason,
        cached_tokens=final.cached_tokens,
        fresh_tokens=final.fresh_tokens,
        generated_tokens=final.generated_tokens,
        model_tokens=final.model_tokens,
        finish_reason=cast(types.FinishReason, final.finish_reason),
        phases=_phases_from(final.phases),
        first_token_s=final.first_token_s,
        cache_id=final.cache_id,
        kept_cache_id=final.kept_cache_id,
        plan=plan_from(final.plan) if final.HasField("plan") else None,
    )


def handoff_request_to(value: types.HandoffRequest) -> sender_pb2.HandoffRequest:
    """To protobuf."""
    return sender_pb2.HandoffRequest(
        prefix=prefix_to(value.prefix),
        receiver=value.receiver,
        codec=value.codec,
        stream=value.stream,
        lease_s=value.lease_s,
        mapper=value.mapper,
        least_trust=value.least_trust,
        max_error=value.max_error,
        questions=value.questions,
    )


def handoff_request_from(message: sender_pb2.HandoffRequest) -> types.HandoffRequest:
    """From protobuf.

    Raises:
        InvalidRequest: a field is missing or beyond its limits.
    """
    return types.HandoffRequest(
        prefix=prefix_from(message.prefix),
        receiver=message.receiver,
        codec=message.codec,
        stream=message.stream if message.HasField("stream") else True,
        lease_s=message.lease_s if message.HasField("lease_s") else None,
        mapper=message.mapper,
        least_trust=cast(Trust, message.least_trust or "mapped"),
        max_error=message.max_error if message.HasField("max_error") else None,
        questions=message.questions if message.HasField("questions") else 1,
    )


def handoff_event_to(value: types.Progress | types.Receipt) -> sender_pb2.HandoffEvent:
    """To protobuf."""
    if isinstance(value, types.Progress):
        return sender_pb2.HandoffEvent(
            progress=sender_pb2.HandoffProgress(
                handoff_id=value.handoff_id,
                tokens=value.tokens,
                prefilled_tokens=value.prefilled_tokens,
                raw_bytes=value.raw_bytes,
                sent_raw_bytes=value.sent_raw_bytes,
                sent_wire_bytes=value.sent_wire_bytes,
            )
        )
    return sender_pb2.HandoffEvent(
        receipt=sender_pb2.HandoffReceipt(
            handoff_id=value.handoff_id,
            cache_id=value.cache_id,
            sender_cache_id=value.sender_cache_id,
            tokens=value.tokens,
            prefilled_tokens=value.prefilled_tokens,
            codec=value.codec,
            trust=value.trust,
            wire_bytes=value.wire_bytes,
            native_bytes=value.native_bytes,
            chunk_count=value.chunk_count,
            phases=_phases_to(value.phases),
            timeline=_timeline_to(value.timeline),
            already_installed=value.already_installed,
            plan=plan_to(value.plan),
            recommendation=value.recommendation,
            data_plane=value.data_plane,
            prefix_origin=value.prefix_origin,
        )
    )


def handoff_event_from(message: sender_pb2.HandoffEvent) -> types.Progress | types.Receipt:
    """From protobuf."""
    if message.WhichOneof("event") == "progress":
        progress = message.progress
        return types.Progress(
            handoff_id=progress.handoff_id,
            tokens=progress.tokens,
            prefilled_tokens=progress.prefilled_tokens,
            raw_bytes=progress.raw_bytes,
            sent_raw_bytes=progress.sent_raw_bytes,
            sent_wire_bytes=progress.sent_wire_bytes,
        )
    receipt = message.receipt
    return types.Receipt(
        handoff_id=receipt.handoff_id,
        cache_id=receipt.cache_id,
        sender_cache_id=receipt.sender_cache_id,
        tokens=receipt.tokens,
        prefilled_tokens=receipt.prefilled_tokens,
        codec=receipt.codec,
        trust=cast(Trust, receipt.trust),
        wire_bytes=receipt.wire_bytes,
        native_bytes=receipt.native_bytes,
        chunk_count=receipt.chunk_count,
        phases=_phases_from(receipt.phases),
        timeline=_timeline_from(receipt.timeline),
        already_installed=receipt.already_installed,
        plan=plan_from(receipt.plan) if receipt.HasField("plan") else None,
        recommendation=cast(types.Recommendation, receipt.recommendation),
        data_plane=cast(types.DataPlane, receipt.data_plane),
        prefix_origin=cast(types.PrefixOrigin, receipt.prefix_origin),
    )


def _context_from(message: pb.AnswerRequest) -> types.Context:
    match message.WhichOneof("context"):
        case "cache_id":
            return types.HeldCache(message.cache_id)
        case "handoff_id":
            return types.HeldHandoff(message.handoff_id)
        case "read":
            prefix = prefix_from(message.read)
            if isinstance(prefix, types.HeldCache):
                raise InvalidRequest("context.read.cache_id: a held cache is context.cache_id")
            return prefix
        case _:
            raise InvalidRequest("context: give one of cache_id, handoff_id, read")


def _query_from(message: pb.AnswerRequest) -> types.Query:
    match message.WhichOneof("query"):
        case "question":
            return types.Question(message.question)
        case "text":
            return types.VerbatimText(message.text)
        case "token_ids":
            return types.TokenIds(tuple(message.token_ids.ids))
        case "messages":
            return _messages_from(message.messages)
        case _:
            raise InvalidRequest("query: give one of question, text, token_ids, messages")


def _sampling_to(value: types.Sampling) -> pb.Sampling:
    return pb.Sampling(
        max_new_tokens=value.max_new_tokens,
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        repetition_penalty=value.repetition_penalty,
        seed=value.seed,
        stop=value.stop,
        ignore_eos=value.ignore_eos,
    )


def _sampling_from(message: pb.AnswerRequest) -> types.Sampling:
    sampling = message.sampling
    given = {
        name: getattr(sampling, name)
        for name in (
            "max_new_tokens",
            "temperature",
            "top_k",
            "top_p",
            "repetition_penalty",
            "seed",
            "ignore_eos",
        )
        if sampling.HasField(name)
    }
    logprobs = message.logprobs if message.HasField("logprobs") else None
    return types.Sampling(**given, stop=tuple(sampling.stop), logprobs=logprobs)


def _messages_to(value: types.Conversation) -> pb.ChatMessages:
    return pb.ChatMessages(
        messages=[pb.ChatMessage(role=m.role, content=m.content) for m in value.messages]
    )


def _messages_from(message: pb.ChatMessages) -> types.Conversation:
    return types.Conversation(tuple(types.Message(m.role, m.content) for m in message.messages))


def _phases_to(value: types.Phases) -> list[pb.Phase]:
    return [pb.Phase(name=name, seconds=seconds) for name, seconds in value.items()]


def _phases_from(phases: Iterable[pb.Phase]) -> types.Phases:
    return {phase.name: phase.seconds for phase in phases}


def _timeline_to(value: types.Timeline) -> pb.BlockTimeline:
    return pb.BlockTimeline(
        prefilled_at_s=value.prefilled_at_s,
        encoded_at_s=value.encoded_at_s,
        sent_at_s=value.sent_at_s,
        verified_at_s=value.verified_at_s,
        installed_at_s=value.installed_at_s,
    )


def _timeline_from(message: pb.BlockTimeline) -> types.Timeline:
    return types.Timeline(
        prefilled_at_s=tuple(message.prefilled_at_s),
        encoded_at_s=tuple(message.encoded_at_s),
        sent_at_s=tuple(message.sent_at_s),
        verified_at_s=tuple(message.verified_at_s),
        installed_at_s=tuple(message.installed_at_s),
    )
