"""The quality gate: may this mapper's caches be answered from?

It is functional. On held-out text the receiver predicts continuations with its own cache, with the
translated one, with the translation of another document, and with zeros. A mapper passes if its mean
next-token KL to native is at most half the smaller of the last two. Attention cosines, errors of K
and V, and what the residual did are reported beside it and never decide.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.engine.base import Engine
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.figures import (
    ErrorSums,
    ResidualSums,
    mean_cosine,
    next_token_figures,
    prefix_attention_figures,
)
from cachelink_core.fit.gate_arms import (
    attention_outputs,
    last_attention,
    mapped_cache,
    own_cache,
    scored,
    zeroed_cache,
)
from cachelink_core.fit.train_data import Example, data_digest
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.transport.artifact import load_state, save_mapper
from cachelink_core.transport.card import KINDS, Card, GateRecord
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.pairing import check_pair
from cachelink_core.transport.state import MapperState

THRESHOLD: Final = 0.5
"""Largest KL that passes, as a share of the smaller one of the arms that know nothing."""

ARMS: Final = ("own", "mapped", "mismatched", "zeroed")

Place = tuple[int, TensorKind]


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate, with everything that was measured.

    Attributes:
        record: for the card.
        errors: of each layer and kind, the first position left out.
        residuals: likewise; empty where no Ridge was given to compare with.
    """

    record: GateRecord
    errors: dict[Place, ErrorSums]
    residuals: dict[Place, ResidualSums]


def run_gate(
    mapper: Mapper,
    sender: Engine,
    receiver: TransformersEngine,
    held_out: Sequence[Example],
    *,
    text: str = "held-out examples",
    threshold: float = THRESHOLD,
    ridge: Mapper | None = None,
) -> GateResult:
    """Judges a mapper.

    Args:
        mapper: from sender to receiver, as it will be served.
        sender: engine of its sender.
        receiver: engine of its receiver.
        held_out: examples of at least two documents, none of them fitted or trained on.
        text: name of those, for the card.
        threshold: of the rule.
        ridge: the same mapper without its residual, to report what the residual does.

    Raises:
        IdentityMismatch: the mapper is of other models.
        InvalidRequest: fewer than two documents.
    """
    check_pair(mapper.card, sender.identity, receiver.identity)
    documents = by_prefix(held_out)
    if len(documents) < 2:
        raise InvalidRequest(
            f"the gate needs held-out examples of at least 2 documents; {text} has {len(documents)}"
        )
    judge = _Judge(mapper, sender, receiver, ridge)
    prefixes = list(documents)
    other = judge.mapped(prefixes[-1], documents[prefixes[0]])
    for prefix, examples in documents.items():
        other = judge.document(prefix, examples, other)
    return GateResult(
        judge.record(text, data_digest(held_out), threshold), judge.errors, judge.residuals
    )


def gate_artifact(
    folder: Path,
    sender: Engine,
    receiver: TransformersEngine,
    held_out: Sequence[Example],
    *,
    text: str,
    threshold: float = THRESHOLD,
) -> tuple[Card, GateResult]:
    """Judges a mapper on disk and writes the result into its card; raises as ``run_gate``."""
    state = load_state(folder)
    result = gate_state(state, sender, receiver, held_out, text=text, threshold=threshold)
    card = msgspec.structs.replace(state.card, gate=result.record)
    return save_mapper(folder, MapperState(card, state.tensors)), result


def gate_state(
    state: MapperState,
    sender: Engine,
    receiver: TransformersEngine,
    held_out: Sequence[Example],
    *,
    text: str,
    threshold: float = THRESHOLD,
) -> GateResult:
    """Judges what was learned, Ridge beside it if there is a residual; raises as ``run_gate``."""
    device, dtype = receiver.model.device, receiver.model.dtype
    mapper = Mapper.place(state, device=device, dtype=dtype)
    ridge = None
    if state.card.residual is not None:
        ridge = Mapper.place(state.ridge_only(), device=device, dtype=dtype)
    return run_gate(mapper, sender, receiver, held_out, text=text, threshold=threshold, ridge=ridge)


def by_prefix(examples: Sequence[Example]) -> dict[tuple[int, ...], list[Example]]:
    """Examples of each document, in the order of their first one."""
    documents: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        documents.setdefault(example.prefix_ids, []).append(example)
    return documents


def continuation_logits(logits: Tensor, example: Example) -> Tensor:
    """Those logits that predict the continuation: ``[T, V]``, one a token of it."""
    return logits[len(example.query_ids) - 1 :]


@dataclass
class _Judge:
    """Accumulates one gate."""

    mapper: Mapper
    sender: Engine
    receiver: TransformersEngine
    ridge: Mapper | None
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    cosines: list[Tensor] = field(default_factory=list)
    attention: list[dict[str, Tensor]] = field(default_factory=list)
    errors: dict[Place, ErrorSums] = field(default_factory=dict)
    residuals: dict[Place, ResidualSums] = field(default_factory=dict)

    def mapped(self, prefix: Sequence[int], asked: Sequence[Example]) -> PrefixCache:
        """A translated cache with room for the given examples."""
        return mapped_cache(self.mapper, self.sender, self.receiver, prefix, _room(asked))

    def document(
        self, prefix: tuple[int, ...], examples: Sequence[Example], other: PrefixCache
    ) -> PrefixCache:
        """Judges one document.

        Args:
            prefix: its tokens.
            examples: queries and continuations of it.
            other: another document's translated cache.

        Returns:
            This one's.
        """
        room = _room(examples)
        read = own_cache(self.sender, prefix, 0)
        mapped = mapped_cache(self.mapper, self.sender, self.receiver, prefix, room, read=read)
        native = own_cache(self.receiver, prefix, room)
        caches = {
            # A copy, as a handoff of the same model would bring it.
            "own": native.copy(native.length, room),
            "mapped": mapped,
            "mismatched": other.copy(other.length, room),
            "zeroed": zeroed_cache(self.receiver, len(prefix), room),
        }
        for example in examples:
            self._example(example, native, caches)
        self._compare(caches["own"], mapped)
        if self.ridge is not None:
            plain = mapped_cache(self.ridge, self.sender, self.receiver, prefix, 0, read=read)
            self._explain(caches["own"], plain, mapped)
        return mapped

    def record(self, text: str, digest: str, threshold: float) -> GateRecord:
        """The result for the card."""
        means = {name: value / self.tokens for name, value in self.sums.items()}
        kl = {arm: means[f"{arm}.kl"] for arm in ARMS}
        return GateRecord(
            passed=kl["mapped"] <= threshold * min(kl["mismatched"], kl["zeroed"]),
            threshold=threshold,
            kl=kl,
            tokens=self.tokens,
            text=text,
            text_digest=digest,
            attention_cosine=tuple(torch.stack(self.cosines).mean(0).tolist()),
            reported={n: v for n, v in means.items() if not n.endswith(".kl")} | self._reported(),
        )

    def _example(self, example: Example, own: PrefixCache, caches: dict[str, PrefixCache]) -> None:
        outputs: dict[str, list[Tensor]] = {}
        logits: dict[str, Tensor] = {}
        with attention_outputs(self.receiver) as collected:
            native = scored(self.receiver, own, example.read_ids)
            for arm, cache in caches.items():
                collected.clear()
                logits[arm] = scored(self.receiver, cache, example.read_ids)
                outputs[arm] = list(collected)
        targets = torch.tensor(example.continuation_ids, device=native.device)
        self.tokens += len(targets)
        reference = continuation_logits(native, example)
        for arm in ARMS:
            judged = continuation_logits(logits[arm], example)
            figures = next_token_figures(reference, judged)
            figures["ce"] = torch.nn.functional.cross_entropy(judged, targets, reduction="none")
            for name, values in figures.items():
                place = f"{arm}.{name}"
                self.sums[place] = self.sums.get(place, 0.0) + float(values.sum())
        pairs = zip(outputs["own"], outputs["mapped"], strict=True)
        self.cosines.append(torch.stack([mean_cosine(*pair) for pair in pairs]))
        looks = [last_attention(self.receiver, caches[a], example.query_ids) for a in ARMS[:2]]
        if looks[0] is not None and looks[1] is not None:
            prefix = len(example.prefix_ids)
            self.attention.append(prefix_attention_figures(looks[0], looks[1], prefix))

    def _compare(self, own: PrefixCache, mapped: PrefixCache) -> None:
        for place in self._places(own):
            sums = self.errors.setdefault(place, ErrorSums())
            sums.add(*(_behind_first(cache, place) for cache in (own, mapped)))

    def _explain(self, own: PrefixCache, plain: PrefixCache, mapped: PrefixCache) -> None:
        for place in self._places(own):
            sums = self.residuals.setdefault(place, ResidualSums())
            sums.add(*(_behind_first(cache, place) for cache in (own, plain, mapped)))

    @staticmethod
    def _places(cache: PrefixCache) -> list[Place]:
        return [(layer, kind) for layer in range(len(cache.layers)) for kind in KINDS]

    def _reported(self) -> dict[str, float]:
        """Errors and what the residual did, each the mean over layers; attention over examples."""
        found: dict[str, list[float]] = {}
        for (_, kind), sums in self.errors.items():
            for name in ("mse", "relative_squared_l2", "r_squared", "cosine"):
                found.setdefault(f"{kind}.{name}", []).append(getattr(sums, name))
        for (_, kind), changes in self.residuals.items():
            for name in ("rms_ratio", "cosine", "removed", "error_ratio"):
                found.setdefault(f"{kind}.residual_{name}", []).append(getattr(changes, name))
        for figures in self.attention:
            for name, value in figures.items():
                found.setdefault(name, []).append(float(value))
        return {name: sum(values) / len(values) for name, values in sorted(found.items())}


def _room(examples: Sequence[Example]) -> int:
    return max(len(example.read_ids) for example in examples)


def _behind_first(cache: PrefixCache, place: Place) -> Tensor:
    """``[H, T - 1, D]``: position 0 is far outside all others and would be all that one sees."""
    layer, kind = place
    return cache.tensor(layer, kind, min(1, cache.length - 1), cache.length)
