"""Several questions in one batch: one forward a token for all of them, each over a copy of the prefix.

Not what a node does. It is here to show what batching would give, and what it costs: one matrix product
over several rows adds in another order than over one.

Axes: B questions, H KV heads, C capacity, T tokens, D head dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from cachelink_core.kv.prefix_cache import PrefixCache


class BatchLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer's copies of a prefix with room behind them, written in place."""

    is_compileable = False
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, batch: int, room: int) -> None:
        """Copies ``[H, T, D]`` of a prefix ``batch`` times.

        Args:
            keys: of the prefix.
            values: of the prefix.
            batch: questions.
            room: tokens behind it.
        """
        super().__init__()
        self._length = keys.shape[1]
        self._keys, self._values = (_copies(rows, batch, room) for rows in (keys, values))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes ``[B, H, T, D]`` behind the cache and returns all of it, as views."""
        begin, end = self._length, self._length + key_states.shape[2]
        self._keys[:, :, begin:end] = key_states
        self._values[:, :, begin:end] = value_states
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that are seen, first position)."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self._length

    def get_max_length(self) -> int:
        """Positions that fit."""
        return self._keys.shape[2]

    def reset(self) -> None:
        """Forgets everything."""
        self._length = 0


def batch_cache(prefix: PrefixCache, batch: int, room: int) -> Any:
    """A ``transformers.Cache`` of ``batch`` copies of a prefix without sliding layers."""
    tokens = prefix.length
    return Cache(
        layers=[
            BatchLayer(
                prefix.tensor(layer, "K", 0, tokens),
                prefix.tensor(layer, "V", 0, tokens),
                batch,
                room,
            )
            for layer in range(len(prefix.layers))
        ]
    )


def _copies(rows: Tensor, batch: int, room: int) -> Tensor:
    heads, tokens, dim = rows.shape
    out = rows.new_empty((batch, heads, tokens + room, dim))
    out[:, :, :tokens] = rows
    out[:, :, tokens:].zero_()
    return out


def forward(model: Any, argument: str, cache: Any, ids: Tensor) -> Tensor:
    """Reads ids ``[B, T]`` behind the cache; float32 logits ``[B, V]`` after the last."""
    begin = cache.get_seq_length()
    with torch.inference_mode():
        output = model(
            input_ids=ids,
            position_ids=torch.arange(begin, begin + ids.shape[1]).expand(ids.shape[0], -1),
            logits_to_keep=1,
            **{argument: cache},
        )
    logits: Tensor = output.logits[:, -1].float()
    return logits
