"""One target layer of a mapper, ready to apply.

Ridge and the residual's stems read the same X, so they are one GEMM a kind, ``[I, O + stem]``; the
two heads read the same fused units, so they are one GEMM too.

Axes: R rows of a block, I input channels, O = H_t·D_t output channels, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cachelink_core.codec_spec import TensorKind
from cachelink_core.transport.card import KINDS, Card
from cachelink_core.transport.precision import Precision
from cachelink_core.transport.residual import adds_nothing
from cachelink_core.transport.source_block import SourceBlock
from cachelink_core.transport.state import position0_name, residual_prefix, ridge_name


@dataclass(slots=True)
class _Wide:
    """Ridge and stem of one kind.

    Attributes:
        weight: ``[I, O + stem]``; ``[I, stem]`` if Ridge is head-local.
        bias: of its columns, in the output's precision.
        local: head-local Ridge ``[H_t, I_h, D_t]``, or None.
        local_bias: ``[O]``.
    """

    weight: Tensor | None
    bias: Tensor
    local: Tensor | None = None
    local_bias: Tensor | None = None


@dataclass(slots=True)
class _Fusion:
    """The residual behind its stems: fused units and both heads."""

    fuse: Tensor
    fuse_bias: Tensor
    heads: Tensor
    heads_bias: Tensor


class LayerMap:
    """Maps blocks to one target layer's content.

    Attributes:
        sources: S_l.
    """

    def __init__(
        self,
        card: Card,
        layer: int,
        tensors: Mapping[str, Tensor],
        precision: Precision,
        device: torch.device,
    ) -> None:
        """Folds and places one layer's tensors.

        Args:
            card: of the mapper.
            layer: of the receiver.
            tensors: at least this layer's, by their stored names.
            precision: of the mapper.
            device: where it computes.
        """
        self.sources = card.layers[layer].sources
        geometry = card.receiver.layers[layer]
        self._heads, self._dim = geometry.kv_heads, geometry.head_dim
        self._precision = precision
        self._outputs = self._heads * self._dim
        self._local_heads: Tensor | None = None
        if card.heads != "all":
            source = card.sender.layers[self.sources[0]]
            self._source_shape = (len(self.sources), source.kv_heads, source.head_dim)
            self._local_heads = torch.tensor(card.heads, device=device)
        residual = _residual_tensors(layer, tensors)
        self._wide = {
            kind: _wide(layer, kind, tensors, residual, precision, device) for kind in KINDS
        }
        self._fusion = _fusion(residual, precision, device) if residual else None
        self._position0 = {
            kind: tensors[position0_name(layer, kind)].to(device, precision.output)
            for kind in KINDS
            if position0_name(layer, kind) in tensors
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        held = [t for wide in self._wide.values() for t in _fields(wide)]
        held += _fields(self._fusion) if self._fusion is not None else []
        return sum(tensor.nbytes for tensor in held)

    def apply(self, block: SourceBlock, *, native_first: bool) -> tuple[Tensor, Tensor]:
        """Content of this layer for a block.

        Args:
            block: of the sender.
            native_first: whether its first token is the card's BOS at position 0, whose own keys
                and values are known.

        Returns:
            K and V, ``[H_t, T, D_t]`` each, float32 (float64 for float64 weights).
        """
        ridge, stems = {}, {}
        for kind in KINDS:
            ridge[kind], stems[kind] = self._project(block, kind)
        if self._fusion is not None:
            self._correct(self._fusion, ridge, stems)
        keys, values = (self._as_heads(ridge[kind], block) for kind in KINDS)
        if native_first and self._position0:
            keys[:, 0] = self._position0["K"]
            values[:, 0] = self._position0["V"]
        return keys, values

    def _project(self, block: SourceBlock, kind: TensorKind) -> tuple[Tensor, Tensor]:
        """Ridge ``[R, O]`` and the stem before its activation ``[R, stem]`` (no columns if none)."""
        wide = self._wide[kind]
        rows = block.gather(kind, self.sources)
        columns = self._outputs if wide.local is None else 0
        if wide.weight is None:
            both = rows.new_empty(rows.shape[0], 0, dtype=self._precision.output)
        else:
            both = self._precision.product(rows, wide.weight).add_(wide.bias)
        if wide.local is None:
            return both[:, :columns], both[:, columns:]
        return self._local_ridge(rows, wide), both

    def _local_ridge(self, rows: Tensor, wide: _Wide) -> Tensor:
        assert wide.local is not None
        assert wide.local_bias is not None
        # [R, k, H_s, D_s] → [R, k, H_t, group, D_s] → [H_t, R, k·group·D_s]
        picked = rows.view(-1, *self._source_shape)[:, :, self._local_heads]
        per_head = picked.permute(2, 0, 1, 3, 4).flatten(2)
        result = self._precision.product(per_head, wide.local)
        return result.transpose(0, 1).flatten(1).add_(wide.local_bias)

    def _correct(
        self, fusion: _Fusion, ridge: dict[TensorKind, Tensor], stems: dict[TensorKind, Tensor]
    ) -> None:
        """Adds ΔK and ΔV to Ridge in place."""
        product, grid = self._precision.product, self._precision
        units = torch.cat([functional.gelu(stems[kind]) for kind in KINDS], dim=1)
        fused = product(_rounded(units, grid), fusion.fuse).add_(fusion.fuse_bias)
        deltas = product(_rounded(functional.gelu(fused), grid), fusion.heads)
        deltas.add_(fusion.heads_bias)
        ridge["K"] += deltas[:, : self._outputs]
        ridge["V"] += deltas[:, self._outputs :]

    def _as_heads(self, rows: Tensor, block: SourceBlock) -> Tensor:
        low, high = block.row_range
        return rows[low:high].view(-1, self._heads, self._dim).transpose(0, 1)


def _rounded(tensor: Tensor, precision: Precision) -> Tensor:
    return tensor.to(precision.grid).to(precision.storage)


def _fields(part: _Wide | _Fusion) -> list[Tensor]:
    values = [getattr(part, name) for name in part.__slots__]
    return [value for value in values if value is not None]


def _residual_tensors(layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer's residual by its own names; empty if there is none or if it adds nothing."""
    prefix = residual_prefix(layer)
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    heads = [tensor for name, tensor in found.items() if name.startswith("head_")]
    return {} if adds_nothing(heads) else found


def _wide(
    layer: int,
    kind: TensorKind,
    tensors: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
    precision: Precision,
    device: torch.device,
) -> _Wide:
    ridge = tensors[ridge_name(layer, kind, "weight")]
    bias = tensors[ridge_name(layer, kind, "bias")].to(precision.output)
    weights, biases = [], []
    if ridge.dim() == 2:
        weights.append(ridge.to(precision.output))
        biases.append(bias)
    if residual:
        stem, stem_bias = _folded_stem(kind, residual, precision.output)
        weights.append(stem.t())
        biases.append(stem_bias)
    wide = _Wide(
        precision.operand(torch.cat(weights, dim=1), device).contiguous() if weights else None,
        torch.cat(biases).to(device) if biases else bias.new_empty(0).to(device),
    )
    if ridge.dim() == 3:
        wide.local = precision.operand(ridge, device).contiguous()
        wide.local_bias = bias.to(device)
    return wide


def _folded_stem(
    kind: TensorKind, residual: Mapping[str, Tensor], output: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A stem that reads X as it is: its input standardisation moved into weight and bias."""
    name = kind.lower()
    weight = residual[f"stem_{name}.weight"].to(output)
    bias = residual[f"stem_{name}.bias"].to(output)
    if f"mean_{name}" in residual:
        weight = weight * residual[f"inverse_scale_{name}"].to(output)
        bias = bias - weight @ residual[f"mean_{name}"].to(output)
    return weight, bias


def _fusion(residual: Mapping[str, Tensor], precision: Precision, device: torch.device) -> _Fusion:
    heads = torch.cat([residual["head_k.weight"], residual["head_v.weight"]]).t()
    heads_bias = torch.cat([residual["head_k.bias"], residual["head_v.bias"]])
    return _Fusion(
        precision.operand(residual["fuse.weight"].t(), device).contiguous(),
        residual["fuse.bias"].to(device, precision.output),
        precision.operand(heads, device).contiguous(),
        heads_bias.to(device, precision.output),
    )
