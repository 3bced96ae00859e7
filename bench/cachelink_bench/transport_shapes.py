"""Random mappers of a pair's full width, with fewer layers, and the bare GEMMs inside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cachelink_core.errors import ConfigError
from cachelink_core.fit.panels import depth_panels
from cachelink_core.fit.shapes import PairCard, read_pair_card
from cachelink_core.identity import LayerGeometry, ModelIdentity
from cachelink_core.transport.card import Card, LayerFit, ResidualShape
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.precision import Precision
from cachelink_core.transport.state import MapperState, expected_shapes

PAIRS: Final = Path(__file__).parents[2] / "manifests" / "pairs"
DIGEST: Final = "0" * 64
RESIDUAL: Final = ResidualShape()


@dataclass(frozen=True)
class Subject:
    """One mapper to time.

    Attributes:
        card: of the pair.
        mapper: with random weights.
        layers: receiver layers that it has.
        residual: whether it has one.
    """

    card: PairCard
    mapper: Mapper
    layers: int
    residual: bool


def pair_names() -> tuple[str, ...]:
    """The pair cards of this repository."""
    return tuple(sorted(path.stem for path in PAIRS.glob("*.json")))


def pair_card(name: str) -> PairCard:
    """A card by its name here, or by its path.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name)
    if path.suffix != ".json":
        path = PAIRS / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"pair {name!r} is unknown; there are {', '.join(pair_names())}")
    return read_pair_card(path)


def make_subject(
    card: PairCard, layers: int, dtype: torch.dtype, device: torch.device, *, residual: bool
) -> Subject:
    """A mapper of the pair's width, every sender layer, and ``layers`` receiver layers.

    The layer sets are those nearest in depth, so some are neighbours and some are not.
    """
    count = min(layers, card.receiver.layers)
    panels = depth_panels(card.sender.geometry, card.receiver.geometry, card.k)
    # Spread over the depth: neighbouring layer sets are views, others copies.
    picked = [panels[i * len(panels) // count] for i in range(count)]
    described = Card(
        sender=_identity(card.sender.geometry),
        receiver=_identity(card.receiver.geometry[:count]),
        layers=tuple(LayerFit(sources=panel.sources) for panel in picked),
        residual=RESIDUAL if residual else None,
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) / 90
        for name, shape in expected_shapes(described)
    }
    mapper = Mapper.place(MapperState(described, tensors), device=device, dtype=dtype)
    return Subject(card, mapper, count, residual)


class BareGemms:
    """The same multiplications with contiguous operands and ready outputs, and nothing else."""

    def __init__(self, subject: Subject, tokens: int) -> None:
        """Allocates operands.

        Args:
            subject: whose shapes.
            tokens: of a block.
        """
        card, precision = subject.card, subject.mapper.precision
        self.flops = 0.0
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._precision = precision
        inputs, outputs = card.k * card.sender.channels, card.receiver.channels
        stem = RESIDUAL.stem if subject.residual else 0
        shapes = [(inputs, outputs + stem)] * 2
        if subject.residual:
            shapes += [(2 * stem, RESIDUAL.fused), (RESIDUAL.fused, 2 * outputs)]
        rows = {width: _random(tokens, width, precision, subject) for width, _ in set(shapes)}
        for _ in range(subject.layers):
            for width, out in shapes:
                self._calls.append((rows[width], _random(width, out, precision, subject)))
                self.flops += 2.0 * tokens * width * out

    def run(self) -> None:
        """All of them, once."""
        for rows, weight in self._calls:
            if self._precision.storage == self._precision.output:
                torch.mm(rows, weight)  # the whole block at once, not the mapper's tiles
            else:
                self._precision.product(rows, weight)


def _random(rows: int, columns: int, precision: Precision, subject: Subject) -> Tensor:
    tensor = torch.randn(rows, columns) / 90
    return precision.operand(tensor, subject.mapper.device).contiguous()


def _identity(layers: tuple[LayerGeometry, ...]) -> ModelIdentity:
    return ModelIdentity(
        architecture="RandomWeights",
        config_digest=DIGEST,
        weights_digest=DIGEST,
        dtype="bfloat16",
        vocabulary_digest=DIGEST,
        template_digest=DIGEST,
        rope={},
        layers=layers,
        max_positions=1 << 20,
    )
