"""A pair of models with the exact map between their caches, made of any one model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM
from transformers.utils import logging

from cachelink_core.engine.loading import load_engine
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.testing.planted_pair import analytic_state, plant
from cachelink_core.transport.artifact import save_mapper


@dataclass(frozen=True, slots=True)
class PlantedPair:
    """Folders of what the receiver of a mapped case needs."""

    model: Path
    mapper: Path


def plant_pair(engine: TransformersEngine, source: Path, folder: Path) -> PlantedPair:
    """Writes a twin of a model, and the mapper from the model's cache to the twin's.

    The twin answers as the model does and caches otherwise, so translating costs what it costs
    between two models of this size.

    Args:
        engine: of the model.
        source: the model's folder.
        folder: existing; both are written below it.
    """
    logging.disable_progress_bar()
    model, mapper = folder / "twin", folder / "mapper"
    # Read anew: an engine's model has hooks, which a copy would share.
    original = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", use_safetensors=True, trust_remote_code=False
    )
    twin = plant(original, seed=1)
    twin.model.save_pretrained(model)
    for pattern in ("tokenizer*", "chat_template*", "special_tokens*", "generation_config.json"):
        for path in source.glob(pattern):
            shutil.copy(path, model)
    twin_identity = load_engine(str(model), device="cpu").identity
    save_mapper(mapper, analytic_state(twin, engine.identity, twin_identity))
    return PlantedPair(model, mapper)
