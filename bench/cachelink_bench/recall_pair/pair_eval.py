"""What each cache of the recall pair is good for: recall and divergence on held-out documents.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from cachelink_bench.recall_pair.pair import QUERIES, Pair, example
from cachelink_bench.recall_pair.recall import FACT_COUNTS
from cachelink_bench.recall_pair.task import Document, held_out_documents
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.fit.gate import GateResult, continuation_logits, gate_state
from cachelink_core.fit.gate_arms import mapped_cache, own_cache, scored, zeroed_cache
from cachelink_core.fit.losses import forward_kl
from cachelink_core.fit.train_data import Example
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.state import MapperState

NATIVE: Final = "native receiver"
SENDER: Final = "native sender"
MISMATCHED: Final = "another document's CacheLink"
ZEROED: Final = "zeroed"
CACHELINK: Final = "CacheLink"

GATE_SEED: Final = 4
RESULT_SEED: Final = 5
"""Held-out documents of the gate and of the results; training looked at neither."""

HEADROOM: Final = 128
"""Room for a query, or for all queries of a document one after the other."""


@dataclass(slots=True)
class ArmScore:
    """One cache at one number of facts; sums over documents.

    Attributes:
        asked: queries, each on its own.
        right: of them, those whose likeliest next token is the answer.
        tokens: of continuations.
        kl: native receiver ‖ this, summed over them, in nats.
    """

    asked: int = 0
    right: int = 0
    tokens: int = 0
    kl: float = 0.0

    @property
    def recall(self) -> float:
        """Share of right answers."""
        return self.right / self.asked

    @property
    def mean_kl(self) -> float:
        """Nats a token."""
        return self.kl / self.tokens


Scores = dict[int, dict[str, ArmScore]]
"""By facts a document, then by arm."""


@dataclass(frozen=True, slots=True)
class PairEvaluator:
    """Scores the arms of one pair.

    Attributes:
        pair: the models.
        mappers: translated arms by name; ``CacheLink`` is also the mismatched one.
        documents: held-out documents at each number of facts.
        queries: asked of each on its own.
    """

    pair: Pair
    mappers: Mapping[str, Mapper]
    documents: int = 48
    queries: int = 8
    fact_counts: Sequence[int] = field(default=FACT_COUNTS)

    def scores(self) -> Scores:
        """Scores every arm on every document."""
        return {facts: self._at(facts) for facts in self.fact_counts}

    def _at(self, facts: int) -> dict[str, ArmScore]:
        drawn = held_out_documents(self.documents, facts, RESULT_SEED)
        found: dict[str, ArmScore] = {}
        last = self._mapped(CACHELINK, drawn[-1]) if CACHELINK in self.mappers else None
        for document in drawn:
            arms = self._arms(document)
            if last is not None:
                arms[MISMATCHED] = (self.pair.receiver, last)
                last = arms[CACHELINK][1]
            self._score(document, arms, found)
        return found

    def _arms(self, document: Document) -> dict[str, tuple[TransformersEngine, PrefixCache]]:
        receiver, sender = self.pair.receiver, self.pair.sender
        ids = document.prefix_ids
        arms = {
            NATIVE: (receiver, own_cache(receiver, ids, HEADROOM)),
            SENDER: (sender, own_cache(sender, ids, HEADROOM)),
            ZEROED: (receiver, zeroed_cache(receiver, len(ids), HEADROOM)),
        }
        return arms | {name: (receiver, self._mapped(name, document)) for name in self.mappers}

    def _mapped(self, name: str, document: Document) -> PrefixCache:
        mapper, (sender, receiver) = self.mappers[name], (self.pair.sender, self.pair.receiver)
        return mapped_cache(mapper, sender, receiver, document.prefix_ids, HEADROOM)

    def _score(
        self,
        document: Document,
        arms: Mapping[str, tuple[TransformersEngine, PrefixCache]],
        found: dict[str, ArmScore],
    ) -> None:
        whole = example(document, QUERIES)
        native = continuation_logits(scored(*arms[NATIVE], whole.read_ids), whole)
        for name, (engine, cache) in arms.items():
            score = found.setdefault(name, ArmScore())
            for query in document.queries[: self.queries]:
                logits = scored(engine, cache, query.query_ids)
                score.asked += 1
                score.right += int(logits[-1].argmax()) == query.answer_id
            judged = continuation_logits(scored(engine, cache, whole.read_ids), whole)
            score.tokens += judged.shape[0]
            score.kl += float(forward_kl(native, judged).sum())


def place(pair: Pair, state: MapperState) -> Mapper:
    """A mapper as the receiver serves it."""
    return Mapper.place(state, dtype=pair.receiver.model.dtype)


def pair_gate(pair: Pair, state: MapperState, documents: int = 16) -> GateResult:
    """The gate on held-out documents of 8, 16 and 32 facts."""
    judged = gate_examples(documents)
    text = f"recall task, {len(judged)} held-out documents of seed {GATE_SEED}"
    return gate_state(state, pair.sender, pair.receiver, judged, text=text)


def gate_examples(documents: int = 16) -> list[Example]:
    """``documents`` at each number of facts, with their queries."""
    return [
        example(drawn, QUERIES)
        for facts in FACT_COUNTS
        for drawn in held_out_documents(documents, facts, GATE_SEED)
    ]


def recovered(scores: Mapping[str, ArmScore], ridge: str, learned: str) -> tuple[float, float]:
    """Shares of the gap between Ridge and native that CacheLink closes: in recall and in KL."""
    base, best, got = scores[ridge], scores[NATIVE], scores[learned]
    gap = best.recall - base.recall
    share = (got.recall - base.recall) / gap if gap else float("nan")
    return share, 1 - got.mean_kl / base.mean_kl


def set_deterministic() -> None:
    """One thread and deterministic kernels: the figures repeat on one machine."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
