"""Streaming second moments: all that a linear fit needs to know of the data.

Channels are shifted by a constant near their mean before they are multiplied: key channels have
means many times their spread (a key bias), and raw products lose the spread to rounding. With one
fixed shift, moments of any parts add up to those of the whole, so order, resumption and the number
of processes do not matter.

Everything is added up in float64, and by default multiplied in float64 too: on planted pairs whose
map is exactly linear, float32 products of chunks leave logits off by 8e-4 to 2e-3, float64 ones by
1e-5 to 2e-5. Float32 halves the time where that does not matter.

Axes: N observations, X source channels, Y target channels of a panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from cachelink_core.codec_spec import TensorKind
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.panels import Channels, Panel
from cachelink_core.transport.card import KINDS

Split = Literal["train", "held_out"]
SPLITS: Final[tuple[Split, Split]] = ("train", "held_out")

ROWS_AT_ONCE: Final = 4_096
"""Rows of the Gram that are multiplied at once: bounds the float32 product beside the master."""


@dataclass(slots=True)
class Sums:
    """Shifted sums of one panel, kind and split; all float64.

    Attributes:
        x: ``[X]``.
        y: ``[Y]``.
        xx: ``[X, X]``.
        xy: ``[X, Y]``.
        yy: ``[Y]``, squares only.
    """

    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @classmethod
    def zeros(cls, sources: int, targets: int, device: torch.device) -> Sums:
        """Empty sums."""

        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            zero(sources),
            zero(targets),
            zero(sources, sources),
            zero(sources, targets),
            zero(targets),
        )

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every sum with its name."""
        return ((name, getattr(self, name)) for name in self.__slots__)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds a chunk of shifted observations.

        Args:
            x: ``[N, X]``, in the dtype in which they are multiplied.
            y: ``[N, Y]``, likewise.
        """
        self.x += x.sum(0, dtype=torch.float64)
        self.y += y.sum(0, dtype=torch.float64)
        self.yy += y.double().square().sum(0)
        for low in range(0, x.shape[1], ROWS_AT_ONCE):
            rows = slice(low, low + ROWS_AT_ONCE)
            self.xx[rows] += x[:, rows].t() @ x
            self.xy[rows] += x[:, rows].t() @ y


@dataclass(slots=True)
class Shift:
    """Constants near the means of all channels of one kind, ``[X]`` and ``[Y]`` float32."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, slots=True)
class System:
    """What one solve needs: shifted sums of one layer set and some target columns, float64.

    Attributes:
        count: N.
        x: ``[X]``.
        y: ``[Y]``.
        xx: ``[X, X]``.
        xy: ``[X, Y]``.
        yy: ``[Y]``.
        shift_x: ``[X]``.
        shift_y: ``[Y]``.
    """

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    shift_x: Tensor
    shift_y: Tensor

    def part(self, rows: Tensor | slice, columns: slice) -> System:
        """The system of some source channels and some target columns."""
        return System(
            count=self.count,
            x=self.x[rows],
            y=self.y[columns],
            xx=self.xx[rows][:, rows],
            xy=self.xy[rows, columns],
            yy=self.yy[columns],
            shift_x=self.shift_x[rows],
            shift_y=self.shift_y[columns],
        )


@dataclass
class Moments:
    """Moments of a pair of models.

    Attributes:
        sender: channels of its layers.
        receiver: channels of its layers.
        panels: which products are kept.
        device: where they are kept and computed.
        products: dtype in which a chunk is multiplied.
        counts: observations of each split.
        shifts: of each kind, once the first chunk is there.
        sums: by (split, kind, panel's index).
    """

    sender: Channels
    receiver: Channels
    panels: tuple[Panel, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    products: torch.dtype = torch.float64
    counts: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    shifts: dict[TensorKind, Shift] = field(default_factory=dict)
    sums: dict[tuple[Split, TensorKind, int], Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocates the sums."""
        for split in SPLITS:
            for kind in KINDS:
                for index, panel in enumerate(self.panels):
                    self.sums[split, kind, index] = Sums.zeros(
                        self.sender.width(panel.sources),
                        self.receiver.width(panel.targets),
                        self.device,
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(t.nbytes for sums in self.sums.values() for _, t in sums.named())

    def set_shifts(self, chunk: Mapping[TensorKind, tuple[Tensor, Tensor]]) -> None:
        """Takes the means of a chunk as the shift of everything."""
        for kind, (x, y) in chunk.items():
            self.shifts[kind] = Shift(x.mean(0), y.mean(0))

    def add(self, split: Split, chunk: Mapping[TensorKind, tuple[Tensor, Tensor]]) -> None:
        """Adds observations; the shift must be set.

        Args:
            split: which side.
            chunk: by kind, source ``[N, X]`` and target ``[N, Y]`` of all layers, float32.
        """
        for kind, (x, y) in chunk.items():
            shift = self.shifts[kind]
            x = x.to(self.device, self.products) - shift.x  # noqa: PLW2901
            y = y.to(self.device, self.products) - shift.y  # noqa: PLW2901
            for index, panel in enumerate(self.panels):
                self.sums[split, kind, index].add(
                    _pick(x, self.sender, panel.sources), _pick(y, self.receiver, panel.targets)
                )
        self.counts[split] += chunk["K"][0].shape[0]

    def system(
        self, split: Split, kind: TensorKind, sources: Sequence[int], targets: Sequence[int]
    ) -> System:
        """The sub-block of one layer set and some target layers.

        Raises:
            InvalidRequest: no panel holds it, or the split is empty.
        """
        if not self.counts[split]:
            raise InvalidRequest(f"the moments have no {split} observations")
        index = self._panel(sources, targets)
        panel, sums = self.panels[index], self.sums[split, kind, index]
        rows = _positions(self.sender, panel.sources, sources)
        columns = _positions(self.receiver, panel.targets, targets)
        shift = self.shifts[kind]
        return System(
            count=self.counts[split],
            x=_take(sums.x, rows),
            y=_take(sums.y, columns),
            xx=_take(_take(sums.xx, rows).t(), rows).t(),
            xy=_take(_take(sums.xy, rows).t(), columns).t(),
            yy=_take(sums.yy, columns),
            shift_x=_pick(shift.x, self.sender, sources).double(),
            shift_y=_pick(shift.y, self.receiver, targets).double(),
        )

    def candidates(self, target: int) -> tuple[int, ...]:
        """Source layers whose moments with ``target`` are kept together."""
        for panel in self.panels:
            if target in panel.targets:
                return panel.sources
        raise InvalidRequest(f"the moments do not hold target layer {target}")

    def _panel(self, sources: Sequence[int], targets: Sequence[int]) -> int:
        for index, panel in enumerate(self.panels):
            if set(targets) <= set(panel.targets) and set(sources) <= set(panel.sources):
                return index
        raise InvalidRequest(
            f"the moments do not hold source layers {list(sources)} "
            f"with target layers {list(targets)}"
        )


def _pick(tensor: Tensor, channels: Channels, layers: Sequence[int]) -> Tensor:
    """Channels (last axis) of some layers, side by side."""
    if len(layers) == len(channels.widths):
        return tensor
    return torch.cat([tensor[..., columns] for columns in channels.columns(layers)], dim=-1)


def _positions(channels: Channels, held: Sequence[int], wanted: Sequence[int]) -> list[slice]:
    """Where the wanted layers lie among the held ones."""
    packed = Channels(tuple(channels.widths[layer] for layer in held))
    return packed.columns([held.index(layer) for layer in wanted])


def _take(tensor: Tensor, rows: Sequence[slice]) -> Tensor:
    """Slices of the first axis, side by side."""
    parts = [tensor[part] for part in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
