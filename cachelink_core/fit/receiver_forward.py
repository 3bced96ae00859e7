"""The frozen receiver over caches that gradients flow through.

``PrefixCache`` writes into buffers, which autograd cannot follow. Here a cache is a tensor a layer
and kind, and a forward joins it with its own keys and values and forgets those at once: nothing is
ever appended, so that one cache serves any number of forwards.

The receiver stays in eval mode and is never checkpointed: in train mode transformers drops an
injected cache when it recomputes a layer. Only query and continuation run through the model.

Axes: B rows, L layers, H KV heads, T prefix tokens, Q tokens behind the prefix, D head dim, P pairs,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin

from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.identity import KeyLayout
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.kv.rotation import rotate

PAD_ID: Final = 0
"""Stands where a row has no token; nothing attends to it and no loss counts it."""


@dataclass(frozen=True, slots=True)
class RowCache:
    """One prefix's keys and values as a model caches them.

    Attributes:
        keys: one ``[H, T, D]`` a layer, rotated.
        values: likewise.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return self.keys[0].shape[1]

    @classmethod
    def of(cls, cache: PrefixCache) -> RowCache:
        """An independent copy of a prefix cache that holds every token."""
        layers = range(len(cache.layers))
        keys, values = (
            tuple(cache.tensor(i, kind, 0, cache.length).clone() for i in layers)
            for kind in ("K", "V")
        )
        return cls(keys, values)


class _GivenLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer that shows a given prefix before each forward's own tokens, and keeps nothing."""

    is_compileable = False
    is_sliding = False  # every token is here; the model's own mask makes the window

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors are given."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What this forward attends to: ``[B, H, T + Q, D]`` each."""
        return (
            torch.cat([self.keys, key_states], dim=2),
            torch.cat([self.values, value_states], dim=2),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys shown to a forward of ``query_length`` tokens, first position)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """T."""
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class ReceiverForward:
    """Runs the receiver behind given caches, many rows at once, with gradients to the caches."""

    def __init__(self, engine: TransformersEngine) -> None:
        """Freezes the engine's model."""
        self.engine = engine
        self._model = engine.model.eval().requires_grad_(requires_grad=False)
        self._cache_argument = cache_argument(self._model)
        self.device: torch.device = self._model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = self._model.dtype

    def logits(self, caches: Sequence[RowCache], ids: Sequence[Sequence[int]]) -> Tensor:
        """Logits after each token of ``ids``, read behind their caches in one forward.

        Rows of unequal prefixes are aligned at their end, so that distances between tokens stay
        true also where a layer has a window.

        Args:
            caches: one a row.
            ids: one sequence a row.

        Returns:
            ``[B, Q, V]`` float32; behind a row's own tokens without meaning.
        """
        prefix = max(cache.tokens for cache in caches)
        width = max(map(len, ids))
        starts = torch.tensor([[cache.tokens] for cache in caches])
        input_ids = torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in ids])
        mask = None
        if any(cache.tokens != prefix for cache in caches):
            mask = (torch.arange(prefix + width) >= prefix - starts).to(self.device)
        output = self._model(
            input_ids=input_ids.to(self.device),
            position_ids=(starts + torch.arange(width)).to(self.device),
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: given_cache(caches)},
        )
        logits: Tensor = output.logits.float()
        return logits

    def rotated(self, layer: int, content: Tensor, start: int = 0) -> Tensor:
        """Applies RoPE in the served kernel's arithmetic, differentiable.

        Args:
            layer: of the receiver.
            content: ``[H, T, D]`` float32.
            start: absolute position of the first token.

        Returns:
            ``[H, T, D]`` float32.
        """
        rope = self.engine.rope
        angles = rope.angles(layer, start, start + content.shape[1], content.device)
        if angles is None:
            return content
        rule = rope.layers[layer]
        turned: Tensor = _Rotation.apply(  # type: ignore[no-untyped-call]
            content, *angles, rule.layout, rule.rotary_dim
        )
        return turned


class _Rotation(torch.autograd.Function):
    """``rotate`` with its gradient: the transposed rotation, by the opposite angle."""

    @staticmethod
    def forward(
        ctx: Any, content: Tensor, cos: Tensor, sin: Tensor, layout: KeyLayout, rotary_dim: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.rotary_dim = layout, rotary_dim
        return rotate(content, cos, sin, layout, rotary_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin, ctx.layout, ctx.rotary_dim), None, None, None, None


def given_cache(caches: Sequence[RowCache]) -> Any:
    """A ``transformers.Cache`` of rows aligned at their end."""
    prefix = max(cache.tokens for cache in caches)
    layers = range(len(caches[0].keys))
    return Cache(
        layers=[
            _GivenLayer(
                _stacked([cache.keys[i] for cache in caches], prefix),
                _stacked([cache.values[i] for cache in caches], prefix),
            )
            for i in layers
        ]
    )


def _stacked(rows: Sequence[Tensor], tokens: int) -> Tensor:
    """``[H, T_b, D]`` rows → ``[B, H, T, D]``, zeros in front; one row alone is not copied."""
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.stack([functional.pad(row, (0, 0, tokens - row.shape[1], 0)) for row in rows])
