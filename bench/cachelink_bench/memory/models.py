"""The models of the benchmark on disk, and a random mapper between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cachelink_bench.memory.cases import Size
from cachelink_core.atomic_write import locked, new_folder
from cachelink_core.engine.loading import load_engine
from cachelink_core.identity import ModelIdentity
from cachelink_core.testing.wide_kv import WideShape, wide_kv_folder
from cachelink_core.transport.artifact import save_mapper
from cachelink_core.transport.card import Card, LayerFit
from cachelink_core.transport.state import MapperState, expected_shapes


@dataclass(frozen=True, slots=True)
class Models:
    """Folders.

    Attributes:
        sender: of the model.
        receiver: of the other model, for mapped cases; None without.
        mapper: from the one to the other.
    """

    sender: Path
    receiver: Path | None = None
    mapper: Path | None = None


def make_models(root: Path, size: Size, *, mapped: bool) -> Models:
    """Writes what is not there yet, and digests it, so that daemons start at once.

    Args:
        root: existing or not; one folder for each is made below it.
        size: with the shapes.
        mapped: whether the other model and the mapper are needed.
    """
    sender = wide_kv_folder(root, size.sender)
    ours = load_engine(str(sender), device="cpu").identity
    if not mapped:
        return Models(sender)
    receiver = wide_kv_folder(root, size.receiver)
    theirs = load_engine(str(receiver), device="cpu").identity
    mapper = root / f"mapper-{size.sender.name}-{size.receiver.name}"
    if not mapper.exists():
        with locked(root / f".{mapper.name}.lock"):
            if not mapper.exists():
                with new_folder(mapper) as aside:
                    save_mapper(aside, _random_state(ours, theirs, size.receiver))
    return Models(sender, receiver, mapper)


def _random_state(ours: ModelIdentity, theirs: ModelIdentity, shape: WideShape) -> MapperState:
    """One source layer a target layer, the nearest in depth; random weights that keep the scale."""
    sources, targets = len(ours.layers), len(theirs.layers)
    card = Card(
        sender=ours,
        receiver=theirs,
        layers=tuple(LayerFit(sources=(layer * sources // targets,)) for layer in range(targets)),
        weights_dtype="bfloat16",
    )
    generator = torch.Generator().manual_seed(shape.seed)
    width = (shape.kv_heads * shape.head_dim) ** -0.5
    tensors = {
        name: torch.randn(wanted, generator=generator) * width
        for name, wanted in expected_shapes(card)
    }
    return MapperState(card, tensors)


__all__ = ["Models", "make_models"]
