"""Both models read a sequence; their caches at every strided position are the observations.

Axes: N observations, L layers, H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cachelink_core import limits
from cachelink_core.codec_spec import TensorKind
from cachelink_core.engine.base import Engine
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.transport.card import KINDS
from cachelink_core.transport.state import position0_name

Chunk = dict[TensorKind, tuple[Tensor, Tensor]]
"""By kind: source ``[N, sum of H·D]`` and target, float32, all layers side by side."""


class Observer:
    """Runs a pair of models over sequences of one length.

    Position 0 is never observed: its keys and values are far outside all others, and constant where
    every text begins with the same token.
    """

    def __init__(self, sender: Engine, receiver: Engine, length: int, stride: int) -> None:
        """Allocates a cache of each model, used again for every sequence.

        Args:
            sender: whose cache is read.
            receiver: whose cache is predicted.
            length: tokens of a sequence.
            stride: every how manyth position is observed.
        """
        self._engines = sender, receiver
        self._caches = tuple(e.open_cache(length, 0, whole=True) for e in self._engines)
        self._positions = torch.arange(stride, length, stride)

    def observe(self, sequences: Sequence[Sequence[int]]) -> Chunk:
        """Reads sequences with both models.

        Returns:
            The observations of all of them.
        """
        rows: dict[TensorKind, list[list[Tensor]]] = {kind: [[], []] for kind in KINDS}
        for ids in sequences:
            for side, (engine, cache) in enumerate(zip(self._engines, self._caches, strict=True)):
                cache.truncate(0)
                engine.prefill(cache, ids, limits.DEFAULT_BLOCK_TOKENS)
                for kind in KINDS:
                    rows[kind][side].append(self._sample(engine, cache, kind))
        return {kind: (torch.cat(rows[kind][0]), torch.cat(rows[kind][1])) for kind in KINDS}

    def position0(self) -> dict[str, Tensor]:
        """The receiver's content at position 0 of the last sequence, by the names of the artifact."""
        engine, cache = self._engines[1], self._caches[1]
        return {
            position0_name(layer, kind): content(engine, cache, layer, kind, 1)[:, 0].cpu().clone()
            for layer in range(len(cache.layers))
            for kind in KINDS
        }

    def _sample(self, engine: Engine, cache: PrefixCache, kind: TensorKind) -> Tensor:
        """``[N, sum of H·D]`` of one sequence."""
        positions = self._positions.to(cache.device)
        picked = [
            content(engine, cache, layer, kind, cache.length)[:, positions].transpose(0, 1)
            for layer in range(len(cache.layers))
        ]
        return torch.cat([tensor.flatten(1) for tensor in picked], dim=1)


def content(engine: Engine, cache: PrefixCache, layer: int, kind: TensorKind, stop: int) -> Tensor:
    """Content-space keys, or values, of positions ``[0, stop)``: ``[H, T, D]`` float32."""
    held = cache.tensor(layer, kind, 0, stop)
    return engine.to_content(layer, held, 0) if kind == "K" else held.float()
