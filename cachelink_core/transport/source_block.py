"""One block of the sender's cache, laid out for the mapper: token-major, all layers side by side.

Axes: L sender layers, H KV heads, T tokens, D head dim, C channels of all layers (sum of H·D),
R rows (tokens, padded to whole tiles).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.errors import CorruptChunk
from cachelink_core.identity import LayerGeometry
from cachelink_core.transport.precision import Precision


class SourceBlock:
    """Content-space keys, and values, of tokens ``[start, start + tokens)``.

    Row r of the buffers is position ``origin + r``; rows before the first token and behind the last
    only fill tiles, and are zero.

    Attributes:
        start: absolute position of the first token.
        tokens: T.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        start: int,
        tokens: int,
        precision: Precision,
        device: torch.device,
    ) -> None:
        """Allocates an empty block.

        Args:
            layers: of the sender.
            start: absolute position of the first token.
            tokens: of the block.
            precision: of the mapper that will read it.
            device: of that mapper.
        """
        self.start = start
        self.tokens = tokens
        self._layers = tuple(layers)
        self._precision = precision
        widths = [layer.kv_heads * layer.head_dim for layer in layers]
        self._offsets = [sum(widths[:index]) for index in range(len(widths) + 1)]
        tile = precision.tile or 1
        self._first_row = start % tile
        rows = -(-(self._first_row + tokens) // tile) * tile
        self._rows: dict[TensorKind, Tensor] = {
            # In the grid's dtype: widened layer by layer, a 16-bit block takes half the memory.
            kind: torch.zeros(rows, sum(widths), dtype=precision.grid, device=device)
            for kind in ("K", "V")
        }

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return sum(rows.nbytes for rows in self._rows.values())

    @property
    def row_range(self) -> tuple[int, int]:
        """Rows ``[lo, hi)`` that are tokens."""
        return self._first_row, self._first_row + self.tokens

    def write(self, layer: int, kind: TensorKind, start: int, tensor: Tensor) -> None:
        """Puts a piece of one tensor in its place.

        Args:
            layer: of the sender.
            kind: keys (content space) or values.
            start: absolute position of the piece's first token.
            tensor: ``[H, T', D]``, any float dtype.
        """
        heads, tokens, dim = tensor.shape
        low = self._first_row + start - self.start
        target = self._rows[kind][
            low : low + tokens, self._offsets[layer] : self._offsets[layer + 1]
        ]
        target.view(tokens, heads, dim).copy_(tensor.transpose(0, 1))

    def gather(self, kind: TensorKind, sources: Sequence[int]) -> Tensor:
        """X: channels of the source layers, in their order.

        Args:
            kind: keys or values.
            sources: sender layers, ascending.

        Returns:
            ``[R, sum of H·D]`` in the mapper's storage dtype: a view if the layers are neighbours and
            need no widening, else a copy of their share of the block.
        """
        pieces: list[Tensor] = []
        for first, last in neighbours(sources):
            pieces.append(self._rows[kind][:, self._offsets[first] : self._offsets[last + 1]])
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return rows.to(self._precision.storage)

    def finite(self) -> Tensor:
        """Whether the whole block is finite: a bool on the device, which nobody waits for."""
        # One reduction a kind without a copy; NaN and infinity survive it.
        ends = [end for rows in self._rows.values() for end in torch.aminmax(rows)]
        return torch.isfinite(torch.stack(ends)).all()

    def check_finite(self) -> None:
        """Refuses a block that would poison the receiver's cache.

        Raises:
            CorruptChunk: NaN or infinity, with the first layer and kind that holds one.
        """
        for kind, rows in self._rows.items():
            # One reduction without a copy; NaN and infinity survive it.
            low, high = torch.aminmax(rows)
            if bool(torch.isfinite(low) & torch.isfinite(high)):
                continue
            for layer in range(len(self._layers)):
                part = rows[:, self._offsets[layer] : self._offsets[layer + 1]]
                if not bool(torch.isfinite(part).all()):
                    raise CorruptChunk(
                        f"positions [{self.start}, {self.start + self.tokens}): "
                        f"layer {layer} {kind} holds NaN or infinity"
                    )


def neighbours(sources: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive layers, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for layer in sources:
        if runs and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs
