"""Which moments are kept: pairs of source layers and target layers.

With everything in one panel, any layer set can be solved afterwards. Where that does not fit, each
target layer gets a panel of its own layer set, chosen beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachelink_core.errors import InvalidRequest
from cachelink_core.identity import LayerGeometry


@dataclass(frozen=True, slots=True)
class Panel:
    """Moments of some source layers, crossed with some target layers; both ascending."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """Where each layer's channels lie when all layers stand side by side.

    Attributes:
        widths: H·D of each layer.
    """

    widths: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerGeometry]) -> Channels:
        """Those of a model's layers."""
        return cls(tuple(layer.kv_heads * layer.head_dim for layer in layers))

    @property
    def total(self) -> int:
        """Channels of all layers."""
        return sum(self.widths)

    def columns(self, layers: Sequence[int]) -> list[slice]:
        """One slice a layer, into the channels of all layers."""
        starts = [sum(self.widths[:layer]) for layer in layers]
        return [
            slice(start, start + self.widths[layer])
            for start, layer in zip(starts, layers, strict=True)
        ]

    def width(self, layers: Sequence[int]) -> int:
        """Channels of some layers."""
        return sum(self.widths[layer] for layer in layers)


def full_panel(sender: Sequence[LayerGeometry], receiver: Sequence[LayerGeometry]) -> Panel:
    """Every source layer that holds every token, with every target layer.

    Raises:
        InvalidRequest: the sender has no layer of full attention.
    """
    sources = tuple(i for i, layer in enumerate(sender) if layer.attention == "full")
    if not sources:
        raise InvalidRequest("every layer of the sender slides: none holds the whole prefix")
    return Panel(sources, tuple(range(len(receiver))))


def depth_panels(
    sender: Sequence[LayerGeometry], receiver: Sequence[LayerGeometry], k: int
) -> tuple[Panel, ...]:
    """One panel a target layer: the k source layers nearest to it in relative depth.

    For hosts where the full moments do not fit, and no moments exist yet to choose by.
    """
    candidates = full_panel(sender, receiver).sources
    last_source, last_target = max(len(sender) - 1, 1), max(len(receiver) - 1, 1)
    panels = []
    for target in range(len(receiver)):
        depth = target / last_target
        nearest = sorted(candidates, key=lambda j: (abs(j / last_source - depth), j))
        panels.append(Panel(tuple(sorted(nearest[:k])), (target,)))
    return tuple(panels)
