"""Random mappers of any geometry, for tests that need no models."""

from __future__ import annotations

import msgspec
import torch

from cachelink_core.identity import LayerGeometry
from cachelink_core.testing.handoffs import identity
from cachelink_core.transport.card import Card, LayerFit, ResidualShape, local_heads
from cachelink_core.transport.residual import Residual
from cachelink_core.transport.state import MapperState, expected_shapes

SOURCE = LayerGeometry(kv_heads=2, head_dim=12)
TARGET = LayerGeometry(kv_heads=4, head_dim=8)
SETS = ((0, 1), (1, 3), (0, 2, 4), (4,))
SHAPE = ResidualShape(stem=6, fused=10)


def random_state(
    *, sets=SETS, source=SOURCE, target=TARGET, heads="all", residual=None, bos_id=None, seed=0
):
    """A state with weights of the right shapes, its residual's heads not zero."""
    sender = identity((source,) * 5)
    receiver = msgspec.structs.replace(identity((target,) * len(sets)), weights_digest="7" * 64)
    if heads == "local":
        heads = local_heads(source.kv_heads, target.kv_heads)
    card = Card(
        sender=sender,
        receiver=receiver,
        layers=tuple(LayerFit(sources=layers) for layers in sets),
        heads=heads,
        residual=residual,
        bos_id=bos_id,
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) / 8 for name, shape in expected_shapes(card)
    }
    for name, tensor in tensors.items():
        if "inverse_scale" in name:
            tensor.abs_().add_(0.5)
    return MapperState(card, tensors)


def zero_residual(state):
    """The same Ridge with a fresh residual, which must add nothing."""
    return state.with_residual(Residual(state.card))


def random_source(tokens, *, layers=5, geometry=SOURCE, seed=1):
    """Content keys and values ``[L, H, T, D]``."""
    generator = torch.Generator().manual_seed(seed)
    shape = 2, layers, geometry.kv_heads, tokens, geometry.head_dim
    return torch.randn(shape, generator=generator)


def mapped(mapper, source, start=0, ids=()):
    """All layers of one block, as two lists."""
    keys, values = [], []
    for _, key, value in mapper.map_block(source[0], source[1], start, ids):
        keys.append(key)
        values.append(value)
    return keys, values


def reference(state, source, layer, residual=None):
    """One layer in float64, written as the paper writes it."""
    card = state.card
    sides = []
    for kind, tensor in zip(("K", "V"), source.double(), strict=True):
        picked = tensor[list(card.layers[layer].sources)]  # [k, H, T, D]
        sides.append((kind, picked.permute(2, 0, 1, 3).flatten(1)))
    out = {}
    for kind, rows in sides:
        weight = state.tensors[f"ridge.{layer}.{kind}.weight"].double()
        bias = state.tensors[f"ridge.{layer}.{kind}.bias"].double()
        out[kind] = rows @ weight + bias
    if residual is not None:
        with torch.no_grad():
            deltas = residual.double().layer(layer)(sides[0][1], sides[1][1])
        out = {kind: out[kind] + delta for kind, delta in zip(("K", "V"), deltas, strict=True)}
    target = card.receiver.layers[layer]
    return tuple(
        out[kind].view(-1, target.kv_heads, target.head_dim).transpose(0, 1) for kind in ("K", "V")
    )
