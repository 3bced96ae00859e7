"""The caches that a gate compares: the receiver's own, a translation, and two that know nothing.

All are filled and read exactly as a receiver does it: translated in blocks, by the served kernels,
into a ``PrefixCache``.

Axes: H KV heads, T tokens, D head dim, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cachelink_core import limits
from cachelink_core.engine.base import Engine
from cachelink_core.engine.model_runner import cache_argument
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.fit.observe import content
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.transport.mapper import Mapper


def own_cache(engine: Engine, ids: Sequence[int], headroom: int) -> PrefixCache:
    """A model's own cache of a prefix."""
    cache = engine.open_cache(len(ids), headroom, whole=True)
    engine.prefill(cache, ids, limits.DEFAULT_BLOCK_TOKENS)
    return cache


@torch.no_grad()
def mapped_cache(
    mapper: Mapper,
    sender: Engine,
    receiver: Engine,
    ids: Sequence[int],
    headroom: int,
    *,
    read: PrefixCache | None = None,
) -> PrefixCache:
    """The receiver's cache of a prefix that only the sender reads.

    Args:
        mapper: from sender to receiver.
        sender: reads the prefix.
        receiver: whose cache is made.
        ids: the prefix.
        headroom: tokens of room behind it.
        read: the sender's cache, if it has read the prefix already.
    """
    source = read or own_cache(sender, ids, 0)
    target = receiver.open_cache(len(ids), headroom, whole=True)
    layers = range(len(source.layers))
    whole = [
        [content(sender, source, layer, kind, len(ids)) for layer in layers]
        for kind in ("K", "V")
    ]  # fmt: skip
    for start in range(0, len(ids), limits.DEFAULT_BLOCK_TOKENS):
        stop = min(len(ids), start + limits.DEFAULT_BLOCK_TOKENS)
        keys, values = ([tensor[:, start:stop] for tensor in kind] for kind in whole)
        for layer, new_keys, new_values in mapper.map_block(keys, values, start, ids[start:stop]):
            receiver.rotate_into(layer, new_keys, start, target.tensor(layer, "K", start, stop))
            target.tensor(layer, "V", start, stop).copy_(new_values)
    target.set_length(len(ids))
    return target


def zeroed_cache(engine: Engine, tokens: int, headroom: int) -> PrefixCache:
    """A cache of zeros: attention to it reads nothing."""
    cache = engine.open_cache(tokens, headroom, whole=True)
    cache.set_length(tokens)
    return cache


def scored(engine: TransformersEngine, cache: PrefixCache, ids: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` after each of ``ids`` behind a cache, which stays as it was."""
    length = cache.length
    logits = engine.score(cache, ids)
    cache.truncate(length)
    return logits


@contextmanager
def attention_outputs(engine: TransformersEngine) -> Iterator[list[Tensor]]:
    """Collects, while the model runs, what each layer's attention adds: ``[T, width]`` a layer."""
    collected: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        collected.append(tensor[0].float())

    hooks = [module.register_forward_hook(keep) for module in _attention_modules(engine.model)]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def last_attention(
    engine: TransformersEngine, cache: PrefixCache, ids: Sequence[int]
) -> Tensor | None:
    """Where the last of ``ids`` looks: attention probabilities ``[L, H, T]``.

    Only eager attention keeps them, so the model is switched to it for this forward.

    Returns:
        None for a model whose layers show different numbers of tokens (windows).
    """
    model, length = engine.model, cache.length
    implementation = model.config._attn_implementation  # noqa: SLF001 - no public name has it
    model.set_attn_implementation("eager")
    try:
        with engine.device_turn(urgent=False):
            output = model(
                input_ids=torch.tensor([list(ids)], device=cache.device),
                position_ids=torch.arange(length, length + len(ids), device=cache.device)[None],
                output_attentions=True,
                use_cache=True,
                **{cache_argument(model): cache.for_model()},
            )
    finally:
        model.set_attn_implementation(implementation)
        cache.truncate(length)
    rows = [layer[0, :, -1].float() for layer in output.attentions]
    return torch.stack(rows) if len({row.shape[-1] for row in rows}) == 1 else None


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention of each layer, in order."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
