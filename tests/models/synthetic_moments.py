"""Moments of made-up data whose best map is known, beside the data themselves."""

from __future__ import annotations

import torch

from cachelink_core.fit.moments import Moments
from cachelink_core.fit.panels import Channels, full_panel
from cachelink_core.identity import LayerGeometry

SENDER = (LayerGeometry(kv_heads=2, head_dim=4),) * 4
RECEIVER = (LayerGeometry(kv_heads=2, head_dim=4),) * 3


def rows(count, layers, *, seed, mean=0.0):
    """Observations ``[N, channels]`` of every layer, float32."""
    generator = torch.Generator().manual_seed(seed)
    width = Channels.of(layers).total
    scales = 4 ** torch.rand(width, generator=generator)
    return torch.randn(count, width, generator=generator) * scales + mean


def accumulate(train, held_out=None, *, chunk=50, sender=SENDER, receiver=RECEIVER, panels=None):
    """Moments of ``{kind: (x, y)}``, read in chunks."""
    panels = panels or (full_panel(sender, receiver),)
    moments = Moments(Channels.of(sender), Channels.of(receiver), panels)
    moments.set_shifts({kind: (x[:chunk], y[:chunk]) for kind, (x, y) in train.items()})
    for split, data in (("train", train), ("held_out", held_out)):
        if data is None:
            continue
        count = data["K"][0].shape[0]
        for low in range(0, count, chunk):
            part = slice(low, low + chunk)
            moments.add(split, {kind: (x[part], y[part]) for kind, (x, y) in data.items()})
    return moments


def linear_data(count, *, seed, noise=0.5, sender=SENDER, receiver=RECEIVER, mean=0.0, only=None):
    """Targets that follow linearly from the sources (or from those of ``only[target]``)."""
    out = {}
    for index, kind in enumerate(("K", "V")):
        x = rows(count, sender, seed=seed + index, mean=mean)
        generator = torch.Generator().manual_seed(100 + index)
        weight = torch.randn(x.shape[1], Channels.of(receiver).total, generator=generator)
        if only is not None:
            columns, sources = Channels.of(receiver), Channels.of(sender)
            mask = torch.zeros_like(weight)
            for target, read in only.items():
                for part in sources.columns(read):
                    mask[part, columns.columns((target,))[0]] = 1
            weight *= mask
        spread = torch.Generator().manual_seed(1_000 + seed + index)
        y = x @ weight + 3 + noise * torch.randn(count, weight.shape[1], generator=spread)
        out[kind] = x, y
    return out
