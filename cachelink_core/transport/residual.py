"""The late-fusion residual: what Ridge misses, learned through the frozen receiver.

One independent network a target layer (CacheLink, equations 9 to 12): a stem each for keys and
values, both fused before either correction is made, heads that start at zero. All five linears have
biases: only then do the published 5,508,096 parameters a layer come out.

Axes: T tokens, I = k·H_s·D_s input channels, O = H_t·D_t output channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from cachelink_core.transport.card import Card, ResidualShape


class ResidualLayer(nn.Module):
    """The residual of one target layer, for training and as the source of inference weights."""

    mean_k: Tensor
    mean_v: Tensor
    inverse_scale_k: Tensor
    inverse_scale_v: Tensor

    def __init__(
        self, inputs: int, outputs: int, shape: ResidualShape, device: torch.device | str = "cpu"
    ) -> None:
        """Makes a layer whose corrections are exactly zero.

        Args:
            inputs: I.
            outputs: O.
            shape: its widths.
            device: ``meta`` to count parameters.
        """
        super().__init__()
        self.standardised = shape.standardised
        self.stem_k = nn.Linear(inputs, shape.stem, device=device)
        self.stem_v = nn.Linear(inputs, shape.stem, device=device)
        self.fuse = nn.Linear(2 * shape.stem, shape.fused, device=device)
        self.head_k = nn.Linear(shape.fused, outputs, device=device)
        self.head_v = nn.Linear(shape.fused, outputs, device=device)
        for head in (self.head_k, self.head_v):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        if shape.standardised:
            for kind in ("k", "v"):
                self.register_buffer(f"mean_{kind}", torch.zeros(inputs, device=device))
                self.register_buffer(f"inverse_scale_{kind}", torch.ones(inputs, device=device))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Corrections of both kinds.

        Args:
            keys: X_K ``[T, I]``, content space.
            values: X_V ``[T, I]``.

        Returns:
            ΔK and ΔV, ``[T, O]`` each.
        """
        if self.standardised:
            keys = (keys - self.mean_k) * self.inverse_scale_k
            values = (values - self.mean_v) * self.inverse_scale_v
        stems = torch.cat(
            [functional.gelu(self.stem_k(keys)), functional.gelu(self.stem_v(values))], dim=-1
        )
        fused = functional.gelu(self.fuse(stems))
        return self.head_k(fused), self.head_v(fused)

    @torch.no_grad()
    def standardise(self, kind: str, mean: Tensor, scale: Tensor) -> None:
        """Sets the fixed input standardisation of one kind (``K`` or ``V``); it is never trained."""
        getattr(self, f"mean_{kind.lower()}").copy_(mean)
        getattr(self, f"inverse_scale_{kind.lower()}").copy_(1 / scale)


class Residual(nn.ModuleList):
    """One ``ResidualLayer`` a target layer, in order; names of its state begin with the layer."""

    def __init__(self, card: Card, device: torch.device | str = "cpu") -> None:
        """Makes the residual that a card describes.

        Args:
            card: with ``residual`` set.
            device: where it lies.
        """
        shape = card.residual
        assert shape is not None, "the card has no residual"
        super().__init__(
            ResidualLayer(card.source_channels(i), card.target_channels(i), shape, device)
            for i in range(len(card.layers))
        )

    def layer(self, index: int) -> ResidualLayer:
        """The network of one target layer."""
        return cast("ResidualLayer", self[index])


def adds_nothing(tensors: Sequence[Tensor]) -> bool:
    """Whether heads (weights and biases) are all zero: then Ridge alone is the same, bit for bit."""
    return not any(bool(tensor.any()) for tensor in tensors)
