"""Two daemons as the benchmark sees them: where they are, and what it has them do."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cachelink_bench.two_node.stopping import Stop
from cachelink_core.cli.connection import Connection
from cachelink_core.errors import CacheLinkError
from cachelink_core.rpc.client import (
    Document,
    HeldCache,
    Question,
    Receipt,
    ReceiverClient,
    Sampling,
    SenderClient,
)
from cachelink_core.rpc.types import Context, Phases

DEADLINE_S: Final = 3600.0
"""For one prefill or answer: a long document on a slow machine."""

FORGET_DEADLINE_S: Final = 3.0
"""For an eviction: after Ctrl-C the daemon may be ending as well."""


class Addresses(msgspec.Struct, frozen=True):
    """Where two daemons are.

    Attributes:
        sender: that reads documents.
        receiver: that answers.
        receiver_name: of the receiver in the sender's list; empty if it has only one.
        token_file: with the bearer token that they ask for; empty for none.
        tls_ca: file of the roots that their certificates need; empty for plaintext.
    """

    sender: str
    receiver: str
    receiver_name: str = ""
    token_file: str = ""
    tls_ca: str = ""

    @property
    def connection(self) -> Connection:
        """What both are reached with."""
        return Connection(
            ca=Path(self.tls_ca) if self.tls_ca else None,
            token_file=Path(self.token_file) if self.token_file else None,
        )


class Said(NamedTuple):
    """One answer."""

    ids: tuple[int, ...]
    first_token_at_s: float
    ended_at_s: float
    path: str
    phases: Phases


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two daemons that work, until they are to stop.

    Attributes:
        sender: that reads documents.
        receiver: that answers.
        receiver_name: of the receiver in the sender's list.
        stop: asked now and then.
    """

    sender: SenderClient
    receiver: ReceiverClient
    receiver_name: str
    stop: Stop

    def read(self, text: str) -> Receipt:
        """Has the sender read a document.

        Raises:
            CacheLinkError: it failed, or shall stop.
        """
        return self.sender.prefill(
            Document(text), on_progress=self.stop.check, deadline_s=DEADLINE_S
        )

    def hand_over(self, codec: str, held: Receipt) -> Receipt:
        """Has the sender hand over a cache that it holds.

        Raises:
            CacheLinkError: it failed, or shall stop.
        """
        self.stop.check()
        return self.sender.handoff(
            HeldCache(held.sender_cache_id),
            self.receiver_name,
            codec=codec,
            on_progress=self.stop.check,
            deadline_s=DEADLINE_S,
        )

    def ask(self, context: Context, question: str, tokens: int) -> Said:
        """Asks the receiver, and goes on past the end of the answer to a number of tokens.

        Raises:
            CacheLinkError: it failed, or shall stop.
        """
        ids: list[int] = []
        first_s = 0.0
        with (
            self.receiver.answer(
                context,
                Question(question),
                sampling=Sampling(max_new_tokens=tokens, ignore_eos=True),
                deadline_s=DEADLINE_S,
            ) as answer,
            self.stop.cancelling(answer.cancel),
        ):
            for delta in answer:
                if delta.token_ids and not ids:
                    first_s = time.monotonic()
                ids += delta.token_ids
            ended_s = time.monotonic()
        assert answer.final is not None, "the answer was read to its end"
        return Said(tuple(ids), first_s, ended_s, answer.final.path, answer.final.phases)


def forget(client: SenderClient | ReceiverClient, cache_id: str) -> None:
    """Evicts a cache, if its node is still there."""
    with suppress(CacheLinkError):  # it is gone, or the node is: nothing to clean up
        client.evict(cache_id, deadline_s=FORGET_DEADLINE_S)
