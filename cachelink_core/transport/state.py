"""What was learned: a card and its tensors, as they are stored; ``mapper.py`` applies them.

Tensors, for each target layer l and kind (K, V):

- ``ridge.l.K.weight`` ``[I, O]``, head-local ``[H_t, I, D_t]``, and ``ridge.l.K.bias`` ``[O]``;
- ``position0.l.K`` ``[H_t, D_t]``: the receiver's own content at position 0, if the card has a BOS;
- ``residual.l.…``: state of ``residual.ResidualLayer``, if the card has a residual.

Axes: I input channels (heads of S_l), O = H_t·D_t output channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.errors import ManifestError
from cachelink_core.transport.card import KINDS, Card
from cachelink_core.transport.residual import Residual


def ridge_name(layer: int, kind: TensorKind, part: str) -> str:
    """Name of a Ridge tensor; ``part`` is ``weight`` or ``bias``."""
    return f"ridge.{layer}.{kind}.{part}"


def position0_name(layer: int, kind: TensorKind) -> str:
    """Name of the receiver's own content at position 0."""
    return f"position0.{layer}.{kind}"


def residual_prefix(layer: int) -> str:
    """What the names of a layer's residual tensors begin with."""
    return f"residual.{layer}."


@dataclass(frozen=True)
class MapperState:
    """A learned map.

    Attributes:
        card: its description.
        tensors: by name, on the CPU.
    """

    card: Card
    tensors: Mapping[str, Tensor]

    def check(self) -> None:
        """Holds the tensors against the card.

        Raises:
            ManifestError: a tensor is missing, too many or of another shape; it is named.
        """
        self.card.check()
        check_shapes(self.card, {name: tuple(t.shape) for name, t in self.tensors.items()})

    def with_residual(self, residual: Residual) -> MapperState:
        """The same Ridge with another residual; the card's ``residual`` must describe it."""
        kept = {n: t for n, t in self.tensors.items() if not n.startswith("residual.")}
        added = {
            f"residual.{name}": tensor.detach().cpu().clone()
            for name, tensor in residual.state_dict().items()
        }
        return MapperState(self.card, kept | added)

    def ridge_only(self) -> MapperState:
        """The same map without its residual and without what is said about it."""
        card = msgspec.structs.replace(self.card, residual=None, training=None, gate=None)
        kept = {n: t for n, t in self.tensors.items() if not n.startswith("residual.")}
        return MapperState(card, kept)

    def load_residual(self) -> Residual:
        """The residual as a module, in float32.

        Raises:
            ManifestError: a tensor is missing or of another shape.
        """
        self.check()
        residual = Residual(self.card)
        residual.load_state_dict(
            {
                name.removeprefix("residual."): tensor.float()
                for name, tensor in self.tensors.items()
                if name.startswith("residual.")
            }
        )
        return residual


def check_shapes(card: Card, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compares names and shapes with what the card implies.

    Raises:
        ManifestError: the first tensor that is missing, too many or of another shape.
    """
    expected = dict(expected_shapes(card))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ManifestError(
                f"tensor {name!r} has shape {list(found[name]) if name in found else 'none'}; "
                f"the card says {list(expected[name]) if name in expected else 'none'}"
            )


def expected_shapes(card: Card) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a card implies."""
    for layer in range(len(card.layers)):
        yield from _ridge_shapes(card, layer)
    if card.residual is not None:
        yield from (
            (f"residual.{name}", tuple(tensor.shape))
            for name, tensor in Residual(card, device="meta").state_dict().items()
        )


def _ridge_shapes(card: Card, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    target = card.receiver.layers[layer]
    inputs, outputs = card.source_channels(layer), card.target_channels(layer)
    weight: tuple[int, ...] = (inputs, outputs)
    if card.heads != "all":
        sources = card.layers[layer].sources
        width = len(card.heads[0]) * card.sender.layers[sources[0]].head_dim
        weight = (target.kv_heads, len(sources) * width, target.head_dim)
    for kind in KINDS:
        yield ridge_name(layer, kind, "weight"), weight
        yield ridge_name(layer, kind, "bias"), (outputs,)
        if card.bos_id is not None:
            yield position0_name(layer, kind), (target.kv_heads, target.head_dim)


def stored_dtype(name: str, weights: torch.dtype) -> torch.dtype:
    """In which dtype a tensor is stored: weights as the card says, everything else float32."""
    is_weight = name.endswith(".weight")
    return weights if is_weight else torch.float32
