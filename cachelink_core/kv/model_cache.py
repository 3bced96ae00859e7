"""How a transformers model sees a prefix cache: one cache layer per layer, writing in place.

Works with transformers 5.17 to 5.24. A layer answers three questions of a model: how many tokens
were seen, which keys the attention mask covers, and where new keys and values go.

Axes: H KV heads, T tokens, D head dim; transformers adds a batch axis of 1 in front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from cachelink_core.kv.prefix_cache import PrefixCache


class PrefixCacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer of a ``PrefixCache`` behind the interface of transformers."""

    is_compileable = False

    def __init__(self, owner: PrefixCache, layer: int) -> None:
        """Binds a layer.

        Args:
            owner: holds the buffers and the length.
            layer: its index.
        """
        super().__init__()
        self._owner = owner
        self._index = layer
        self._buffer = owner.buffers[layer]
        self._last = layer == len(owner.buffers) - 1
        self.is_sliding = self._buffer.geometry.attention == "sliding"
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes a forward's keys and values behind the cache.

        Args:
            key_states: ``[1, H, T, D]`` of the new tokens, in the cache's dtype.
            value_states: ``[1, H, T, D]``.

        Returns:
            Views ``[1, H, T', D]`` of everything that these tokens attend to.

        Raises:
            IndexError: no room, or the layer does not hold the window.
        """
        assert key_states.shape[0] == 1, "a prefix cache holds one sequence"
        assert key_states.dtype == self._buffer.keys.dtype, "the model computes in another dtype"
        begin = self._owner.length
        end = begin + key_states.shape[2]
        visible = self._buffer.visible_from(begin)
        keys = self._owner.tensor(self._index, "K", visible, end)
        values = self._owner.tensor(self._index, "V", visible, end)
        keys[:, begin - visible :].copy_(key_states[0])
        values[:, begin - visible :].copy_(value_states[0])
        if self._last:
            # Only now: until the last layer is written the forward may fail and be repeated.
            self._owner.set_length(end)
        return keys.unsqueeze(0), values.unsqueeze(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a forward of ``query_length`` tokens is shown, first position)."""
        length = self._owner.length
        visible = self._buffer.visible_from(length)
        return length + query_length - visible, visible

    def get_seq_length(self) -> int:
        """Tokens seen so far: positions go on from here, also where a window holds fewer."""
        return self._owner.length

    def get_max_length(self) -> int:
        """Absolute positions that fit."""
        return self._owner.capacity

    def reset(self) -> None:
        """Forgets everything."""
        self._owner.truncate(0)


def model_cache(owner: PrefixCache) -> Any:
    """A ``transformers.Cache`` whose layers write into ``owner``'s buffers."""
    return Cache(layers=[PrefixCacheLayer(owner, i) for i in range(len(owner.buffers))])
