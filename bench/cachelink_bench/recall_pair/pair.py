"""The recall pair as a cross-model pair: its engines, its Ridge, and what its residual learns from.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, overload

from blake3 import blake3

from cachelink_bench.recall_pair.models import Role
from cachelink_bench.recall_pair.task import (
    Document,
    Stream,
    calibration_sequences,
    document,
    generator,
    held_out_documents,
)
from cachelink_bench.recall_pair.words import BOS_ID, EOS_ID
from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.fit.build import SolveOptions, build_mapper
from cachelink_core.fit.calibration import Calibration
from cachelink_core.fit.measure import measure
from cachelink_core.fit.panels import full_panel
from cachelink_core.fit.shards import Shards
from cachelink_core.fit.train_data import Example, TrainingData, data_digest
from cachelink_core.fit.train_settings import TrainSettings
from cachelink_core.identity import canonical_bytes
from cachelink_core.transport.card import CalibrationRecord
from cachelink_core.transport.state import MapperState

MODELS: Final = Path(__file__).parents[2] / "models" / "recall"
"""Both checkpoints and the mappers, where the source tree is at hand."""

SEQUENCES: Final = 220
HELD_OUT_SEQUENCES: Final = 22
LENGTH: Final = 128
"""Ridge sees 220 × 128 tokens, as many as a trained document is long."""

SOLVE: Final = SolveOptions(k=2, lambda_value=1e-2)
"""Two of the sender's four layers; λ as a fraction of the mean diagonal."""

FEWEST_FACTS: Final = 6
QUERIES: Final = 16
"""Asked of each training document, at most."""

RESIDUAL: Final = TrainSettings(
    steps=600,
    batch=12,
    rows=12,
    stem=48,
    fused=96,
    standardised=True,
    learning_rate=4e-3,
    weight_decay=0.0,
    evaluate_every=100,
    save_every=100,
)
"""The committed residual. On a sender stopped earlier, held-out KL after 300 steps was 0.77, 0.43 and
0.33 with learning rates of 1e-3, 2e-3 and 4e-3 (Ridge: 2.8)."""

EXAMPLES: Final = 3_600
"""Documents to train on: each is seen twice."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, loaded.

    Attributes:
        sender: engine whose cache is read.
        receiver: engine whose cache is written.
    """

    sender: TransformersEngine
    receiver: TransformersEngine


def load_pair(models: Path = MODELS, dtype: str = "auto") -> Pair:
    """Loads both checkpoints.

    Args:
        models: folder with ``sender`` and ``receiver``.
        dtype: of both; ``auto`` is the checkpoints' own, which the mappers are for.

    Raises:
        ModelUnavailable: a checkpoint is not there.
    """
    sender, receiver = (load_engine(str(models / role), dtype=dtype, device="cpu") for role in Role)
    return Pair(sender, receiver)


def fit_ridge(pair: Pair, folder: Path, options: SolveOptions = SOLVE) -> MapperState:
    """Fits Ridge on calibration text of the task.

    Args:
        pair: the models.
        folder: for a checkpoint of the pass, which is gone at the end.
        options: how it is solved.
    """
    panels = (full_panel(pair.sender.identity.layers, pair.receiver.identity.layers),)
    checkpoint = folder / "moments.safetensors"
    measured = measure(
        pair.sender, pair.receiver, _calibration(), panels, checkpoint=checkpoint, shards=Shards()
    )
    assert measured is not None, "nobody asked it to stop"
    return build_mapper(measured, options)


def training_data(seed: int, examples: int = EXAMPLES, held_out: int = 48) -> TrainingData:
    """Documents with queries, for one residual.

    Args:
        seed: of the documents to train on. The held-out ones are the same for all.
        examples: how many documents.
        held_out: how many documents are evaluated on during training, a third each of 8, 16 and 32
            facts.
    """
    counts = (8, 16, 32)
    judged = [
        example(drawn, QUERIES)
        for facts in counts
        for drawn in held_out_documents(held_out // len(counts), facts, seed=EVALUATED_SEED)
    ]
    # The documents follow from the seed and the task, so these name them; making all of them only
    # to name them takes longer than the first hundred steps.
    first = RecallExamples(seed, min(examples, 64))
    digest = blake3(canonical_bytes((data_digest(list(first)), seed, examples))).hexdigest()
    name = f"recall task, {examples} documents of seed {seed}"
    return TrainingData(name, digest, RecallExamples(seed, examples), judged)


EVALUATED_SEED: Final = 3
"""Held-out documents that are looked at during training; results are measured on others."""


class RecallExamples(Sequence[Example]):
    """Training documents, each drawn when it is asked for: a function of seed and index."""

    def __init__(self, seed: int, count: int) -> None:
        self._seed = seed
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        rng = generator(Stream.TRAINING, _RESIDUAL_STREAM, self._seed, index)
        return example(document(rng, int(rng.integers(FEWEST_FACTS, MAX_FACTS_READ + 1))), QUERIES)


_RESIDUAL_STREAM: Final = 1_000
"""Keeps these documents apart from those of the base training's steps."""

MAX_FACTS_READ: Final = 32
"""Of a training document, as for the base models."""


def example(drawn: Document, queries: int) -> Example:
    """A document with some of its queries: ``? Ada`` → ``sings <eos> ? Leo cooks <eos> …``."""
    asked = drawn.queries[:queries]
    rest = [token for query in asked for token in (*query.query_ids, query.answer_id, EOS_ID)]
    width = len(asked[0].query_ids)
    return Example(drawn.prefix_ids, tuple(rest[:width]), tuple(rest[width:]))


def _calibration() -> Calibration:
    sequences = calibration_sequences(SEQUENCES + HELD_OUT_SEQUENCES, LENGTH, seed=0)
    parts = tuple(sequences[:SEQUENCES]), tuple(sequences[SEQUENCES:])
    record = CalibrationRecord(
        source="recall task, calibration text",
        digest=blake3(canonical_bytes(parts)).hexdigest(),
        sequences=SEQUENCES,
        held_out_sequences=HELD_OUT_SEQUENCES,
        length=LENGTH,
        stride=1,
        documents=SEQUENCES,
        held_out_documents=HELD_OUT_SEQUENCES,
        seed=0,
    )
    return Calibration(record, BOS_ID, *parts)
