"""The Python client.

    from cachelink_core.rpc.client import Document, HeldCache, Question, ReceiverClient, SenderClient

    with SenderClient("127.0.0.1:52401") as sender, ReceiverClient("127.0.0.1:52402") as receiver:
        receipt = sender.handoff(Document(text), "receiver", codec="int4+zstd")
        answer = receiver.answer(HeldCache(receipt.cache_id), Question("Who wrote it?"))
        for delta in answer:
            print(delta.text, end="", flush=True)
        print(answer.final.path)

``pipelined`` runs many such pairs of calls with the next prefix always under way
(``client_pipeline.py``). ``AsyncSenderClient`` and ``AsyncReceiverClient`` have the same verbs. Every call has a deadline, and
every failure is a ``CacheLinkError``: the class that the node raised, or ``LinkError`` when there was
no node to raise one. Importing this loads neither torch nor transformers.
"""

from cachelink_core.rpc.client_aio import AsyncAnswer, AsyncReceiverClient, AsyncSenderClient
from cachelink_core.rpc.client_pipeline import Answered, HandoffStages, Task, pipelined
from cachelink_core.rpc.client_sync import Answer, ReceiverClient, SenderClient
from cachelink_core.rpc.pipeline import OneSlotPipeline, Outcome, Stop
from cachelink_core.rpc.tls import TlsFiles
from cachelink_core.rpc.types import (
    AnswerRequest,
    CacheInfo,
    CacheList,
    Conversation,
    Delta,
    Document,
    Final,
    HandoffRequest,
    HeldCache,
    HeldHandoff,
    Message,
    NodeInfo,
    Progress,
    Question,
    Receipt,
    Sampling,
    TokenIds,
    VerbatimText,
)

__all__ = [
    "Answer",
    "AnswerRequest",
    "Answered",
    "AsyncAnswer",
    "AsyncReceiverClient",
    "AsyncSenderClient",
    "CacheInfo",
    "CacheList",
    "Conversation",
    "Delta",
    "Document",
    "Final",
    "HandoffRequest",
    "HandoffStages",
    "HeldCache",
    "HeldHandoff",
    "Message",
    "NodeInfo",
    "OneSlotPipeline",
    "Outcome",
    "Progress",
    "Question",
    "Receipt",
    "ReceiverClient",
    "Sampling",
    "SenderClient",
    "Stop",
    "Task",
    "TlsFiles",
    "TokenIds",
    "VerbatimText",
    "pipelined",
]
