"""The translation while it is learned: frozen Ridge, and a residual that gradients reach.

Ridge, position 0 and the rotation are computed by the served kernels. The residual is computed in
float32; serving rounds its weights to the receiver's dtype.

Axes: H KV heads, T tokens, D head dim, R rows (tokens of all prefixes), I input channels, O = H·D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cachelink_core import limits
from cachelink_core.engine.base import Engine
from cachelink_core.fit.observe import content
from cachelink_core.fit.receiver_forward import ReceiverForward, RowCache
from cachelink_core.transport.card import KINDS, ResidualShape
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.residual import Residual, ResidualLayer
from cachelink_core.transport.source_block import SourceBlock
from cachelink_core.transport.state import MapperState


@dataclass(frozen=True, slots=True)
class Source:
    """A prefix as the mapper reads it.

    Attributes:
        block: the whole prefix, one block.
        first_id: its first token.
    """

    block: SourceBlock
    first_id: int


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Translated prefixes.

    Attributes:
        caches: one a prefix.
        penalty: mean of ``‖Δ‖² / ‖Ridge‖²`` over layers and kinds, a scalar.
    """

    caches: tuple[RowCache, ...]
    penalty: Tensor


class TrainableMapper:
    """Ridge as served, and a float32 residual on top.

    Attributes:
        ridge: the frozen part.
        residual: the learned part.
    """

    def __init__(
        self, state: MapperState, shape: ResidualShape, receiver: ReceiverForward, seed: int
    ) -> None:
        """Starts at Ridge exactly: the heads of the residual are zero.

        Args:
            state: Ridge; a residual in it is left out.
            shape: of the residual to learn.
            receiver: whose caches are wanted.
            seed: of the residual's stems.
        """
        ridge = state.ridge_only()
        self.state = MapperState(msgspec.structs.replace(ridge.card, residual=shape), ridge.tensors)
        self.ridge = Mapper.place(ridge, device=receiver.device, dtype=receiver.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.residual = Residual(self.state.card)
        self.residual.to(receiver.device)
        self._receiver = receiver

    def read(self, sender: Engine, ids: Sequence[int]) -> Source:
        """Has the sender read a prefix."""
        cache = sender.open_cache(len(ids), 0, whole=True)
        sender.prefill(cache, ids, limits.DEFAULT_BLOCK_TOKENS)
        block = self.ridge.open_block(0, len(ids))
        for layer in sorted({j for fit in self.state.card.layers for j in fit.sources}):
            for kind in KINDS:
                block.write(layer, kind, 0, content(sender, cache, layer, kind, len(ids)))
        return Source(block, ids[0])

    def standardise(self, sources: Sequence[Source]) -> None:
        """Fixes the residual's input standardisation from some prefixes."""
        for index, fit in enumerate(self.state.card.layers):
            for kind in KINDS:
                rows = torch.cat([_inputs(source, kind, fit.sources) for source in sources])
                scale = rows.std(0)
                # A channel that never varies carries nothing, whatever its scale.
                scale = scale.clamp_min(1e-6 * float(scale.max()) or 1.0)
                self.residual.layer(index).standardise(kind, rows.mean(0), scale)

    def rows(self, sources: Sequence[Source]) -> MappedRows:
        """Translates prefixes; differentiable in the residual.

        Activations of the residual are not kept for the backward pass but computed again, layer by
        layer: at full size those of all layers would be several times the cache.
        """
        layers = range(len(self.state.card.layers))
        keys: list[list[Tensor]] = [[] for _ in sources]
        values: list[list[Tensor]] = [[] for _ in sources]
        penalties = []
        for layer in layers:
            ridge = [self._ridge(layer, source) for source in sources]
            outcome: tuple[Tensor, Tensor, Tensor] = checkpoint(
                self._corrections, layer, sources, ridge, use_reentrant=False
            )
            delta_k, delta_v, penalty = outcome
            penalties.append(penalty)
            start = 0
            for row, (ridge_k, ridge_v) in enumerate(ridge):
                tokens = ridge_k.shape[1]
                part = slice(start, start + tokens)
                rotated = self._receiver.rotated(layer, ridge_k + _heads(delta_k[part], ridge_k))
                keys[row].append(rotated.to(self._receiver.dtype))
                value = ridge_v + _heads(delta_v[part], ridge_v)
                values[row].append(value.to(self._receiver.dtype))
                start += tokens
        caches = tuple(RowCache(tuple(k), tuple(v)) for k, v in zip(keys, values, strict=True))
        return MappedRows(caches, torch.stack(penalties).mean())

    def learned(self) -> MapperState:
        """Ridge with the residual as it is now."""
        return self.state.with_residual(self.residual)

    @torch.no_grad()
    def _ridge(self, layer: int, source: Source) -> tuple[Tensor, Tensor]:
        return self.ridge.map_layer(layer, source.block, source.first_id)

    def _corrections(
        self, layer: int, sources: Sequence[Source], ridge: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ΔK and ΔV of all prefixes ``[R, O]``, zero where the receiver's own position 0 is used.

        The third is ``‖Δ‖² / ‖Ridge‖²``, the mean of both kinds.
        """
        read = self.state.card.layers[layer].sources
        inputs = [torch.cat([_inputs(s, kind, read) for s in sources]) for kind in KINDS]
        module: ResidualLayer = self.residual.layer(layer)
        keep = self._learned_rows(sources, inputs[0].device)
        deltas = [delta * keep for delta in module(*inputs)]
        ratios = []
        for index, delta in enumerate(deltas):
            energy = torch.stack([pair[index].square().sum() for pair in ridge]).sum()
            ratios.append(delta.square().sum() / energy)
        return deltas[0], deltas[1], torch.stack(ratios).mean()

    def _learned_rows(self, sources: Sequence[Source], device: torch.device) -> Tensor:
        """``[R, 1]``: 0 for a first token whose native keys and values are known, else 1."""
        keep = torch.ones(sum(source.block.tokens for source in sources), 1, device=device)
        start = 0
        for source in sources:
            if source.first_id == self.state.card.bos_id:
                keep[start] = 0
            start += source.block.tokens
        return keep


def _inputs(source: Source, kind: str, layers: Sequence[int]) -> Tensor:
    """X of one prefix: ``[T, I]`` float32."""
    low, high = source.block.row_range
    return source.block.gather(kind, layers)[low:high].float()  # type: ignore[arg-type]


def _heads(rows: Tensor, like: Tensor) -> Tensor:
    """``[T, O]`` → ``[H, T, D]``."""
    heads, tokens, dim = like.shape
    return rows.view(tokens, heads, dim).transpose(0, 1)
