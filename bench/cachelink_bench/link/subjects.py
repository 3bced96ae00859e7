"""The caches that are moved: of which model, and of which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from cachelink_bench.link.cases import Case
from cachelink_core import texts
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError
from cachelink_core.testing.tiny_models import save_tiny
from cachelink_core.testing.wide_kv import wide_kv_folder

ANSWER_TOKENS: Final = 32
"""Of the window, left for an answer, as in the two-node benchmark."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sender is asked to hold.

    Attributes:
        model: name, folder or GGUF file, for the daemons.
        ids: of the prefix.
    """

    model: str
    ids: tuple[int, ...]


def make_prefix(case: Case, model: str, folder: Path) -> Prefix:
    """Makes a case's model ready, so that the daemons find it, and cuts its prefix.

    Args:
        case: to be run.
        model: the real one, for cases that move its cache.
        folder: in which models of random weights are made.

    Raises:
        ConfigError: texts or window are shorter than the case's tokens.
        CacheLinkError: the model cannot be loaded.
    """
    if case.subject == "wide":
        model = str(wide_kv_folder(folder / "models"))
    if case.subject == "tiny":
        model = str(save_tiny("llama", folder / "tiny", dtype=torch.bfloat16))
    engine = load_engine(model, device="cpu")
    ids = engine.tokens.plain("\n\n".join(texts.read(name) for name in texts.EVALUATION))
    tokens = case.tokens
    if not tokens:
        frame = engine.tokens.document("").frame
        asked = engine.tokens.question(texts.DEMO_QUESTION, frame)
        tokens = engine.identity.max_positions - ANSWER_TOKENS - len(asked)
    if tokens > min(len(ids), engine.identity.max_positions):
        raise ConfigError(f"{case.name}: the texts or the window of {model} end before {tokens}")
    return Prefix(model, ids[:tokens])
