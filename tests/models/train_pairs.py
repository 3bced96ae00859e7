"""A small pair of unrelated models with a Ridge between them, and examples to train on."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from cachelink_core.engine.base import Finish, Sampling
from cachelink_core.fit.build import SolveOptions, build_mapper
from cachelink_core.fit.gate_arms import own_cache
from cachelink_core.fit.measure import measure
from cachelink_core.fit.panels import full_panel
from cachelink_core.fit.shards import Shards
from cachelink_core.fit.train_data import Example, TrainingData, data_digest
from cachelink_core.fit.train_settings import TrainSettings
from cachelink_core.testing.tiny_engines import tiny_engine
from tests.models.fit_pairs import calibration, documents

SMALL = TrainSettings(
    steps=6,
    batch=3,
    rows=2,
    stem=8,
    fused=12,
    learning_rate=1e-2,
    evaluate_every=2,
    save_every=2,
    standardised=True,
    standardise_examples=4,
)


@lru_cache
def engines():
    return tiny_engine("qwen3", seed=0), tiny_engine("qwen3", seed=1, num_hidden_layers=3)


@lru_cache
def ridge():
    sender, receiver = engines()
    panels = (full_panel(sender.identity.layers, receiver.identity.layers),)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(
            sender,
            receiver,
            calibration(sender.tokens, sequences=6),
            panels,
            checkpoint=Path(folder) / "moments",
            shards=Shards(),
        )
    return build_mapper(measured, SolveOptions(k=2))


@lru_cache
def examples(count=9):
    """Documents of unequal length; the continuation is what the receiver itself answers."""
    _, receiver = engines()
    made = []
    for index, text in enumerate(documents(count, words=12, seed=5)):
        ids = receiver.tokens.plain(text)
        prefix, query = (0, *ids[: 16 + 3 * index]), ids[16 + 3 * index :][: 2 + index % 3]
        cache = own_cache(receiver, prefix, 64)
        sampling = Sampling(max_new_tokens=4 + index % 2, ignore_eos=True)
        *_, last = receiver.answer(cache, prefix, query, sampling)
        assert isinstance(last, Finish)
        made.append(Example(prefix, query, last.generated_ids))
    return tuple(made)


def data():
    made = examples()
    return TrainingData("made of bytes", data_digest(made), made[:6], made[6:])
