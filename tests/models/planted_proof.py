"""Judging a map of a planted pair: the mapped cache against the twin's own, with controls."""

from __future__ import annotations

import torch

from cachelink_core.transport.mapper import Mapper


def source_content(engine, cache, tokens):
    """Content keys and values of every layer, ``[H, T, D]``."""
    layers = range(len(cache.layers))
    keys = [engine.to_content(i, cache.tensor(i, "K", 0, tokens), 0) for i in layers]
    return keys, [cache.tensor(i, "V", 0, tokens) for i in layers]


def filled(engine, ids, block=256):
    """The model's own cache of a prefix."""
    cache = engine.open_cache(len(ids), 64, whole=True)
    engine.prefill(cache, ids, block)
    return cache


def translated(receiver, state, source, ids):
    """The receiver's cache through a map; the source's content as it is without one."""
    cache = receiver.open_cache(len(ids), 64, whole=True)
    if state is None:
        layers = ((i, k, v) for i, (k, v) in enumerate(zip(*source, strict=True)))
    else:
        layers = Mapper.place(state, dtype=torch.float32).map_block(*source, 0, ids)
    for layer, keys, values in layers:
        receiver.rotate_into(layer, keys, 0, cache.tensor(layer, "K", 0, len(ids)))
        cache.tensor(layer, "V", 0, len(ids)).copy_(values)
    cache.set_length(len(ids))
    return cache


def scores(engine, cache, query):
    """Logits ``[T, V]`` behind a cache, which is left as it was."""
    length = cache.length
    logits = engine.score(cache, query)
    cache.truncate(length)
    return logits


def mean_kl(native, other):
    """Of the next-token distributions, in nats."""
    p, q = native.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def top1(native, other):
    """Share of positions with the same best token."""
    return float((native.argmax(-1) == other.argmax(-1)).float().mean())
