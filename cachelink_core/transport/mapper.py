"""A mapper: blocks of the sender's cache in, the receiver's keys and values out, layer by layer.

Nothing here knows about positions beyond position 0: keys come and go in content space, and every
token is mapped alone. So blocks can be mapped as they land, in any order.

Axes: L layers, H KV heads, T tokens, D head dim; subscripts s sender, t receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cachelink_core.transport.card import KINDS, Card
from cachelink_core.transport.layer_map import LayerMap
from cachelink_core.transport.precision import Precision, precision_for
from cachelink_core.transport.source_block import SourceBlock
from cachelink_core.transport.state import MapperState, residual_prefix

Layered = Tensor | Sequence[Tensor]
"""``[L_s, H_s, T, D_s]``, or one ``[H_s, T, D_s]`` a layer where layers differ."""


class Mapper:
    """A learned transport on a device. Reading only: one instance serves every thread.

    Attributes:
        card: its description.
        precision: number formats.
        device: where it computes.
    """

    def __init__(
        self,
        card: Card,
        layers: Sequence[LayerMap],
        precision: Precision,
        device: torch.device,
    ) -> None:
        """Wraps placed layers; use ``place`` or ``artifact.load_mapper``."""
        self.card = card
        self.precision = precision
        self.device = device
        self._layers = tuple(layers)

    @classmethod
    def place(
        cls, state: MapperState, *, device: torch.device | str = "cpu", dtype: torch.dtype
    ) -> Mapper:
        """Prepares a learned map for a receiver.

        Args:
            state: what was learned.
            device: where to compute: the receiver's.
            dtype: of the receiver's cache; float64 for proofs.

        Raises:
            ManifestError: the tensors are not those of the card.
        """
        state.check()
        where = torch.device(device)
        precision = precision_for(dtype, where)
        layers = [
            LayerMap(state.card, index, layer_tensors(state.tensors, index), precision, where)
            for index in range(len(state.card.layers))
        ]
        return cls(state.card, layers, precision, where)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(layer.nbytes for layer in self._layers)

    def open_block(self, start: int, tokens: int) -> SourceBlock:
        """An empty block to write the sender's tensors into."""
        return SourceBlock(self.card.sender.layers, start, tokens, self.precision, self.device)

    def map_layer(
        self, layer: int, block: SourceBlock, first_id: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """One receiver layer of a filled block.

        Args:
            layer: of the receiver.
            block: with every source tensor written.
            first_id: token id at the block's start. At position 0, if it is the card's BOS, the
                receiver's own keys and values of it are used.

        Returns:
            Content keys and values, ``[H_t, T, D_t]`` each, float32.
        """
        native_first = block.start == 0 and first_id is not None and first_id == self.card.bos_id
        return self._layers[layer].apply(block, native_first=native_first)

    def map_block(
        self, keys: Layered, values: Layered, start: int, token_ids: Sequence[int] = ()
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Maps a block, giving layer after layer, so that none needs to be kept.

        Args:
            keys: content space, ``[L_s, H_s, T, D_s]``.
            values: likewise.
            start: absolute position of the first token.
            token_ids: of the block; only the first one is looked at.

        Yields:
            (layer, content keys ``[H_t, T, D_t]``, values ``[H_t, T, D_t]``).
        """
        block = self.open_block(start, keys[0].shape[1])
        for kind, tensors in zip(KINDS, (keys, values), strict=True):
            for layer, tensor in enumerate(tensors):
                block.write(layer, kind, start, tensor)
        first_id = token_ids[0] if len(token_ids) else None
        for layer in range(len(self._layers)):
            yield layer, *self.map_layer(layer, block, first_id)


def layer_tensors(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The tensors of one target layer."""
    prefixes = (f"ridge.{layer}.", f"position0.{layer}.", residual_prefix(layer))
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
