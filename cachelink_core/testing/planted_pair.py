"""Two models of one function with different caches, and the exact map between their caches.

A twin is a copy whose attention is written in other coordinates. For every layer and KV head, with
row vectors: values ``v' = v·B`` for a random invertible B, undone in the output projection; keys
``k' = k·M``, undone in the queries by ``q' = q·M⁻ᵀ``, since ``q'·k' = q·k``. M must commute with
RoPE, so it turns and scales each rotary plane (channels i and i + D/2), which every angle of RoPE
does too. Biases are turned along.

With a norm per head behind the key projection (Qwen3) less is possible, because
``k = w ⊙ x / rms(x)`` must become ``k·M`` by weights alone. A plane's scale goes into the norm's
weight, which all heads share. A turn would need equal weights on both channels of a plane, so the
only turn is by half a circle: a random sign of each head and plane, in the projection, which leaves
the rms alone.

Axes: H KV heads, T tokens, D head dim, P = D/2 planes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cachelink_core.identity import ModelIdentity
from cachelink_core.transport.card import Card, LayerFit
from cachelink_core.transport.state import MapperState, ridge_name


@dataclass(frozen=True, slots=True)
class Twin:
    """A twin and how its cache follows from the original's.

    Attributes:
        model: the twin.
        keys: M of each layer, ``[H, D, D]`` float64: content ``k' = k @ M[h]``.
        values: B of each layer, ``[H, D, D]`` float64.
    """

    model: PreTrainedModel
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@torch.no_grad()
def plant(model: PreTrainedModel, *, seed: int = 0) -> Twin:
    """Makes a twin of a Llama, Qwen2 or Qwen3 model.

    Computed in float64, kept in the model's dtype: below float64 the twin's function equals the
    original's within that dtype's rounding.

    Args:
        model: before an engine was made of it, whose hooks a copy would share.
        seed: of all random coordinates.
    """
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    keys, values = [], []
    for layer in twin.model.layers:
        attention = layer.self_attn
        heads, dim = _kv_shape(attention)
        new_values = _invertible(heads, dim, generator)
        _turn_values(attention, new_values)
        if hasattr(attention, "k_norm"):
            new_keys = _turn_normed_keys(attention, heads, dim, generator)
        else:
            new_keys = _planes(heads, dim, generator)
            _turn_keys(attention, new_keys)
        keys.append(new_keys)
        values.append(new_values)
    return Twin(twin, tuple(keys), tuple(values))


def analytic_state(twin: Twin, sender: ModelIdentity, receiver: ModelIdentity) -> MapperState:
    """The exact map from the original's cache to the twin's: one source layer, block-diagonal.

    Args:
        twin: of the sender's model.
        sender: identity of the original.
        receiver: identity of the twin.
    """
    card = Card(
        sender=sender,
        receiver=receiver,
        layers=tuple(LayerFit(sources=(layer,)) for layer in range(len(twin.keys))),
    )
    tensors: dict[str, Tensor] = {}
    for layer, (keys, values) in enumerate(zip(twin.keys, twin.values, strict=True)):
        tensors[ridge_name(layer, "K", "weight")] = _block_diagonal(keys)
        tensors[ridge_name(layer, "V", "weight")] = _block_diagonal(values)
        for kind, matrix in (("K", keys), ("V", values)):
            width = matrix.shape[0] * matrix.shape[1]
            tensors[f"ridge.{layer}.{kind}.bias"] = torch.zeros(width, dtype=torch.float64)
    return MapperState(card, tensors)


def strip_rope(model: PreTrainedModel, keys: Tensor, *, back: bool = False) -> Tensor:
    """Removes half-split RoPE from cached keys in their own dtype, for proofs beyond float32.

    Args:
        model: whose rotary module gives the tables.
        keys: ``[H, T, D]`` from position 0.
        back: apply RoPE instead.

    Returns:
        ``[H, T, D]``.
    """
    positions = torch.arange(keys.shape[1]).unsqueeze(0)
    cos: Tensor
    sin: Tensor
    cos, sin = (table[0] for table in model.model.rotary_emb(keys, positions))
    first, second = keys.chunk(2, dim=-1)
    half_turned = torch.cat([-second, first], dim=-1)
    if back:
        return keys * cos + half_turned * sin
    return (keys * cos - half_turned * sin) / (cos * cos + sin * sin)


def permuted_heads(state: MapperState, shift: int = 1) -> MapperState:
    """A control: every target head gets the map of its neighbour."""
    tensors = dict(state.tensors)
    for layer, geometry in enumerate(state.card.receiver.layers):
        for kind in ("K", "V"):
            for part in ("weight", "bias"):
                name = f"ridge.{layer}.{kind}.{part}"
                tensors[name] = tensors[name].roll(shift * geometry.head_dim, dims=-1)
    return MapperState(state.card, tensors)


def shuffled_layers(state: MapperState, order: Sequence[int]) -> MapperState:
    """A control: the map of target layer ``l`` is that of ``order[l]``, layer set and all."""
    layers = tuple(state.card.layers[source] for source in order)
    tensors = {}
    for name, tensor in state.tensors.items():
        group, layer, rest = name.split(".", 2)
        for target, source in enumerate(order):
            if int(layer) == source:
                tensors[f"{group}.{target}.{rest}"] = tensor
    card = Card(
        sender=state.card.sender,
        receiver=state.card.receiver,
        layers=layers,
        bos_id=state.card.bos_id,
        heads=state.card.heads,
        residual=state.card.residual,
    )
    return MapperState(card, tensors)


def _kv_shape(attention: Any) -> tuple[int, int]:
    """(H, D)."""
    dim = int(attention.head_dim)
    return attention.k_proj.out_features // dim, dim


def _block_diagonal(matrices: Tensor) -> Tensor:
    """``[H, D, D]`` → ``[H·D, H·D]``."""
    heads, dim, _ = matrices.shape
    whole = matrices.new_zeros(heads, dim, heads, dim)
    for head, matrix in enumerate(matrices):
        whole[head, :, head] = matrix
    return whole.view(heads * dim, heads * dim)


def _orthogonal(count: int, dim: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(count, dim, dim, dtype=torch.float64, generator=generator)
    orthogonal: Tensor = torch.linalg.qr(drawn).Q
    return orthogonal


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Between 0.5 and 2: far enough from one to show, near enough to lose no digits."""
    return 2.0 ** (2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1)


def _invertible(heads: int, dim: int, generator: torch.Generator) -> Tensor:
    left, right = _orthogonal(heads, dim, generator), _orthogonal(heads, dim, generator)
    return left @ torch.diag_embed(_scales((heads, dim), generator)) @ right


def _planes(heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """Turns and scales of every rotary plane, as ``[H, D, D]``."""
    half = dim // 2
    angle = 2 * torch.pi * torch.rand(heads, half, dtype=torch.float64, generator=generator)
    scale = _scales((heads, half), generator)
    cos, sin = torch.diag_embed(scale * angle.cos()), torch.diag_embed(scale * angle.sin())
    return torch.cat([torch.cat([cos, sin], dim=2), torch.cat([-sin, cos], dim=2)], dim=1)


def _turn_rows(linear: nn.Linear, matrices: Tensor) -> None:
    """Outputs ``y`` of each head become ``y @ matrices[h]``; query heads share in order."""
    heads, dim, _ = matrices.shape
    rows = linear.weight.data.double().view(-1, dim, linear.in_features)
    each = matrices.repeat_interleave(rows.shape[0] // heads, dim=0)
    linear.weight.data.copy_((each.mT @ rows).flatten(0, 1))
    if linear.bias is not None:
        bias = linear.bias.data.double().view(-1, 1, dim)
        linear.bias.data.copy_((bias @ each).flatten())


def _turn_values(attention: Any, matrices: Tensor) -> None:
    _turn_rows(attention.v_proj, matrices)
    heads, dim, _ = matrices.shape
    weight = attention.o_proj.weight.data
    columns = weight.double().view(weight.shape[0], -1, dim).transpose(0, 1)
    back = torch.linalg.inv(matrices).mT.repeat_interleave(columns.shape[0] // heads, dim=0)
    weight.copy_((columns @ back).transpose(0, 1).flatten(1))


def _turn_keys(attention: Any, matrices: Tensor) -> None:
    _turn_rows(attention.k_proj, matrices)
    _turn_rows(attention.q_proj, torch.linalg.inv(matrices).mT)


def _turn_normed_keys(attention: Any, heads: int, dim: int, generator: torch.Generator) -> Tensor:
    half = dim // 2
    scale = _scales((half,), generator).repeat(2)
    sign = torch.randint(0, 2, (heads, half), generator=generator).double().mul_(2).sub_(1)
    signs = torch.diag_embed(sign.repeat(1, 2))
    _turn_rows(attention.k_proj, signs)
    _turn_rows(attention.q_proj, signs)
    for norm, factor in ((attention.k_norm, scale), (attention.q_norm, 1 / scale)):
        norm.weight.data.copy_(norm.weight.data.double() * factor)
    return signs * scale
