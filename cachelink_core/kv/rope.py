"""Content space: cached keys with their rotary position embedding removed, and put back.

Keys without positions quantize better, and are what a cross-model map is fitted on. Which rotation
a model applies is not taken from its name but verified on the loaded model: a short probe forward
finds the rule of each layer, or refuses the model with what was measured.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from blake3 import blake3
from torch import Tensor
from transformers import PreTrainedModel

from cachelink_core.kv.rope_config import refuse_by_config, rope_parameters, text_config
from cachelink_core.kv.rope_probe import probe
from cachelink_core.kv.rope_rules import LayerRule, choose_rule
from cachelink_core.kv.rope_tables import Angles, RotaryTable
from cachelink_core.kv.rotation import Columns, rotate

__all__ = ["KeyRope", "LayerRule"]

TableKey = tuple[str, Columns]
_CPU: Final = torch.device("cpu")


class KeyRope:
    """Removes and applies the rotation of one model's keys, with that model's own tables.

    The tables are taken in the model's dtype and upcast; the arithmetic is float32. Stripping and
    re-applying returns a float32 cache within 3e-7 of its largest key. A bf16 cache returns bit for
    bit except in about 2 of 10,000 channels, each a thousand times smaller than its partner, where
    float32 rounding shows. So an exact cache travels rotated.

    Attributes:
        layers: one rule a layer.
        parameters: every RoPE parameter of the configuration, plain and sorted, for the identity.
    """

    def __init__(
        self,
        layers: tuple[LayerRule, ...],
        tables: Mapping[TableKey, RotaryTable],
        parameters: dict[str, Any],
    ) -> None:
        self.layers = layers
        self.parameters = parameters
        self._tables = dict(tables)

    @classmethod
    def probe(cls, model: PreTrainedModel) -> KeyRope:
        """Verifies how ``model`` rotates its keys, layer by layer.

        Raises:
            UnsupportedModel: its cache is not rotated keys and values per token (latent or linear
                attention, shared layers), its rotation depends on the sequence length (dynamic
                NTK, longrope) or on several axes, or no rule explains the probe; with the measured
                residual of each rule.
        """
        config = text_config(model)
        refuse_by_config(config)
        layers: list[LayerRule] = []
        tables: dict[TableKey, RotaryTable] = {}
        for index, evidence in enumerate(probe(model)):
            rule, call = choose_rule(f"{config.model_type}: layer {index}", evidence)
            layers.append(rule)
            if call is not None:
                tables.setdefault((rule.table, rule.columns), RotaryTable(call, rule.columns))
        return cls(tuple(layers), tables, rope_parameters(config))

    def to_content(self, layer: int, keys: Tensor, start: int) -> Tensor:
        """Removes RoPE.

        Args:
            layer: index.
            keys: ``[H, T, D]`` as the model caches them.
            start: absolute position of the first token.

        Returns:
            ``[H, T, D]`` float32, never a view of ``keys``.
        """
        rule = self.layers[layer]
        if rule.layout == "identity":
            return keys.to(torch.float32, copy=True)
        table = self._tables[rule.table, rule.columns]
        angles = table.inverse_at(start, start + keys.shape[1], keys.device)
        return rotate(keys, *angles, rule.layout, rule.rotary_dim)

    def rotate_into(self, layer: int, content: Tensor, start: int, out: Tensor) -> None:
        """Applies RoPE and casts.

        Args:
            layer: index.
            content: ``[H, T, D]`` float32.
            start: absolute position of the first token.
            out: ``[H, T, D]`` of the cache's dtype; may be ``content`` itself.
        """
        rule = self.layers[layer]
        if rule.layout == "identity":
            out.copy_(content)
            return
        table = self._tables[rule.table, rule.columns]
        angles = table.at(start, start + content.shape[1], content.device)
        out.copy_(rotate(content, *angles, rule.layout, rule.rotary_dim))

    def angles(self, layer: int, start: int, stop: int, device: torch.device) -> Angles | None:
        """What a rotation of one layer is made of, for those that differentiate through it.

        Args:
            layer: index.
            start: first absolute position.
            stop: one beyond the last.
            device: of the keys.

        Returns:
            cos and sin, ``[T, P]`` float32 each; None for a layer without RoPE.
        """
        rule = self.layers[layer]
        if rule.layout == "identity":
            return None
        return self._tables[rule.table, rule.columns].at(start, stop, device)

    def half_angles(
        self, layer: int, start: int, stop: int, device: torch.device, *, inverse: bool
    ) -> Angles | None:
        """For those that turn keys themselves, channels i and P + i of every key.

        Args:
            layer: index.
            start: first absolute position.
            stop: one beyond the last.
            device: of the keys.
            inverse: to remove the rotation, not to apply it.

        Returns:
            cos and sin, ``[T, P]`` float32 each; None for a layer without RoPE or with other pairs.
        """
        rule = self.layers[layer]
        if rule.layout not in ("half", "half_narrow_tables"):
            return None
        table = self._tables[rule.table, rule.columns]
        return (table.inverse_at if inverse else table.at)(start, stop, device)

    def tables_digest(self, tokens: int) -> str:
        """BLAKE3 of every distinct table at positions 0, 1 and ``tokens - 1``, in hexadecimal.

        Two nodes of the same model compare it before keys travel in content space: different
        tables would rotate them back to something else. It is exact, so in float32 two math
        libraries that round a cosine differently have different digests.
        """
        hasher = blake3()
        for (name, columns), table in sorted(self._tables.items()):
            hasher.update(f"{name}\0{columns}\0".encode())
            for position in (0, 1, max(tokens - 1, 0)):
                for tensor in table.at(position, position + 1, _CPU):
                    hasher.update(tensor.numpy().tobytes())
        return hasher.hexdigest()
