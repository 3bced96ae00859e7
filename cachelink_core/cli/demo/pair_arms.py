"""Asks every held-out question of every arm, through two daemons of different models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachelink_core import limits
from cachelink_core.cli.demo.daemons import RECEIVER_NAME
from cachelink_core.cli.demo.pair_plan import Asked, HeldOut, PairPlan
from cachelink_core.cli.demo.zeroed import hand_zeros_over, zeroed_header
from cachelink_core.errors import InternalError
from cachelink_core.manifest import QueryFrame
from cachelink_core.rpc.client import (
    HeldCache,
    ReceiverClient,
    Sampling,
    SenderClient,
    TokenIds,
)
from cachelink_core.rpc.transfer_client import TransferClient
from cachelink_core.rpc.types import Context

NATIVE: Final = "native receiver"
SENDER: Final = "native sender"
RIDGE: Final = "ridge"
CACHELINK: Final = "cachelink"
MISMATCHED: Final = "another document"
ZEROED: Final = "zeroed"
ARMS: Final = (NATIVE, SENDER, RIDGE, CACHELINK, MISMATCHED, ZEROED)

ONE_TOKEN: Final = Sampling(max_new_tokens=1, ignore_eos=True, logprobs=limits.MAX_LOGPROBS)

Distribution = dict[int, float]
"""Natural-log probability by token id."""


@dataclass
class Tally:
    """What one arm did with documents of one number of facts.

    Attributes:
        asked: questions.
        right: of these.
        kl: sum over the questions of KL(native receiver ‖ arm), in nats.
        example: the first question with this arm's answer.
    """

    asked: int = 0
    right: int = 0
    kl: float = 0.0
    example: str = ""

    @property
    def recall(self) -> float:
        """Share of right answers."""
        return self.right / max(1, self.asked)

    @property
    def mean_kl(self) -> float:
        """Nats a question."""
        return self.kl / max(1, self.asked)


@dataclass
class PairResult:
    """Every arm by number of facts, and what the handoffs reported.

    Attributes:
        tallies: by (arm, facts).
        model_tokens: largest number of tokens that the receiver's model processed for one answer
            from a translated cache.
        reasons: path and reason of an answer, by arm.
    """

    tallies: dict[tuple[str, int], Tally] = field(default_factory=dict)
    model_tokens: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def of(self, arm: str, facts: int) -> Tally:
        """The tally of one cell."""
        return self.tallies.setdefault((arm, facts), Tally())


class PairDemonstration:
    """One run over two nodes."""

    def __init__(
        self,
        plan: PairPlan,
        sender: SenderClient,
        receiver: ReceiverClient,
        words: Callable[[int], str],
    ) -> None:
        """Binds a plan to two nodes.

        Args:
            plan: what to ask.
            sender: of the one model.
            receiver: of the other.
            words: a token as people read it.
        """
        self._plan = plan
        self._sender = sender
        self._receiver = receiver
        self._words = words
        self._identity = receiver.ping().identity

    def run(self, step: Callable[[int, int], None]) -> PairResult:
        """Asks everything.

        Args:
            step: told of documents done and documents.

        Raises:
            CacheLinkError: a node refused or failed.
        """
        result = PairResult()
        documents = self._plan.documents
        for done, document in enumerate(documents):
            step(done, len(documents))
            self._one(document, self._another(document), result)
        step(len(documents), len(documents))
        return result

    def _another(self, document: HeldOut) -> HeldOut:
        """Another document with as many facts."""
        alike = [other for other in self._plan.documents if other.facts == document.facts]
        return alike[(alike.index(document) + 1) % len(alike)]

    def _one(self, document: HeldOut, other: HeldOut, result: PairResult) -> None:
        prefix = TokenIds(document.prefix_ids)
        native = [self._ask(self._receiver, prefix, query)[1] for query in document.queries]
        contexts: dict[str, tuple[SenderClient | ReceiverClient, Context]] = {
            NATIVE: (self._receiver, prefix),
            SENDER: (self._sender, prefix),
            RIDGE: (self._receiver, self._handed(document, "ridge")),
            CACHELINK: (self._receiver, self._handed(document, "cachelink")),
            MISMATCHED: (self._receiver, self._handed(other, "cachelink")),
            ZEROED: (self._receiver, self._zeros(document)),
        }
        for arm, (node, context) in contexts.items():
            self._tally(arm, node, context, document, native, result)

    def _tally(
        self,
        arm: str,
        node: SenderClient | ReceiverClient,
        context: Context,
        document: HeldOut,
        native: Sequence[Distribution],
        result: PairResult,
    ) -> None:
        tally = result.of(arm, document.facts)
        for query, expected in zip(document.queries, native, strict=True):
            answered, distribution = self._ask(node, context, query, arm, result)
            tally.asked += 1
            tally.right += answered == query.answer_id
            tally.kl += divergence(expected, distribution)
            if not tally.example:
                tally.example = f"{query.question} {self._words(answered)}"

    def _ask(
        self,
        node: SenderClient | ReceiverClient,
        context: Context,
        query: Asked,
        arm: str = "",
        result: PairResult | None = None,
    ) -> tuple[int, Distribution]:
        answer = node.answer(context, TokenIds(query.query_ids), sampling=ONE_TOKEN)
        deltas = list(answer)
        assert answer.final is not None, "the answer was read to its end"
        if result is not None and arm in (RIDGE, CACHELINK):
            result.model_tokens = max(result.model_tokens, answer.final.model_tokens)
            result.reasons[arm] = f"{answer.final.path}: {answer.final.path_reason}"
        token = next(ids for delta in deltas for ids in delta.token_ids)
        entries = next(entry for delta in deltas for entry in delta.logprobs)
        return token, dict(entries.alternatives)

    def _handed(self, document: HeldOut, mapper: str) -> HeldCache:
        receipt = self._sender.handoff(
            TokenIds(document.prefix_ids), RECEIVER_NAME, mapper=self._plan.mappers[mapper]
        )
        if receipt.trust != "mapped":
            raise InternalError(f"{mapper}: the cache is {receipt.trust}, not mapped")
        return HeldCache(receipt.cache_id)

    def _zeros(self, document: HeldOut) -> HeldCache:
        header = zeroed_header(self._identity, document.prefix_ids, QueryFrame())
        with TransferClient(self._receiver.address) as transfer:
            return HeldCache(hand_zeros_over(transfer, header).cache_id)


def divergence(native: Distribution, arm: Distribution) -> float:
    """KL(native ‖ arm) in nats over the tokens that both reported."""
    return sum(math.exp(p) * (p - arm[token]) for token, p in native.items() if token in arm)
