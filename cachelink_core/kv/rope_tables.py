"""cos and sin tables, always computed by the model's own rotary module.

Never from ``rope_theta``: float32 angles differ from float64 ones by 9e-4 at position 32,768 and by
6e-2 at a million, so only the model's own path inverts its own rotation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from cachelink_core.kv.rotation import Columns, inverse_angles, pair_columns

GROWTH_TOKENS: Final = 4_096
"""Tables start at this many positions and double, so that a long prefix recomputes them rarely."""

KEPT_TOKENS: Final = 1_024
"""On a CPU, angles of at most so many positions are kept until others are asked for: all layers of a
block ask for the same. On a device another stream might read them before they are written."""

POSITIONS: Final = object()
"""Stands for the position ids in a recorded call."""


Angles = tuple[Tensor, Tensor]
"""cos and sin, each ``[T, P]``."""


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """How the model calls a rotary module, with the position ids left open.

    Attributes:
        name: the module's attribute name, with further plain arguments such as a layer type.
        module: the model's own.
        args: positional arguments; ``POSITIONS`` where the position ids were.
        kwargs: keyword arguments, likewise.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @torch.no_grad()
    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables at ``positions`` ``[T]``: cos and sin ``[T, W]`` in the model's dtype."""
        ids = positions.unsqueeze(0)
        args = [ids if value is POSITIONS else value for value in self.args]
        kwargs = {name: ids if value is POSITIONS else value for name, value in self.kwargs.items()}
        cos, sin = self.module(*args, **kwargs)
        return cos[0], sin[0]


class RotaryTable:
    """The tables of one rotary call from position 0 on, grown as they are needed; thread-safe.

    Attributes:
        name: of the call.
    """

    def __init__(self, call: RotaryCall, columns: Columns) -> None:
        self.name = call.name
        self._call = call
        self._columns = columns
        self._lock = threading.Lock()
        self._tables: dict[torch.device, Angles] = {}
        self._kept: dict[tuple[torch.device, bool], tuple[tuple[int, int], Angles]] = {}

    def at(self, start: int, stop: int, device: torch.device) -> Angles:
        """Pair angles of positions ``[start, stop)``, not to be changed.

        Returns:
            cos and sin, each ``[T, P]``, in the model's dtype upcast to float32.
        """
        return self._held(start, stop, device, inverse=False)

    def inverse_at(self, start: int, stop: int, device: torch.device) -> Angles:
        """What turns the same positions back (``rotation.inverse_angles``), not to be changed."""
        return self._held(start, stop, device, inverse=True)

    def _held(self, start: int, stop: int, device: torch.device, *, inverse: bool) -> Angles:
        kept = self._kept.get((device, inverse))
        if kept is not None and kept[0] == (start, stop):
            return kept[1]
        return self._cut(start, stop, device, inverse=inverse)

    # Not inference tensors, even when an engine asks first: a fit differentiates through them.
    @torch.inference_mode(mode=False)
    def _cut(self, start: int, stop: int, device: torch.device, *, inverse: bool) -> Angles:
        cos, sin = self._grown_to(stop, device)
        if device.type == "cuda":
            # Made on another thread's stream perhaps, and dropped when they grow.
            for table in (cos, sin):
                table.record_stream(torch.cuda.current_stream(device))
        angles = cos[start:stop].float(), sin[start:stop].float()
        if inverse:
            angles = inverse_angles(*angles)
        if device.type == "cpu" and stop - start <= KEPT_TOKENS:
            self._kept[device, inverse] = (start, stop), angles
        return angles

    def _grown_to(self, stop: int, device: torch.device) -> Angles:
        with self._lock:
            held = self._tables.get(device)
            if held is None or held[0].shape[0] < stop:
                held = self._compute(max(GROWTH_TOKENS, 1 << (stop - 1).bit_length()), device)
                self._tables[device] = held
            return held

    @torch.inference_mode(mode=False)
    def _compute(self, stop: int, device: torch.device) -> Angles:
        module_device = next((b.device for b in self._call.module.buffers()), device)
        cos, sin = self._call.tables(torch.arange(stop, device=module_device))
        # Contiguous copies: a view would keep the unused columns alive.
        tables = (
            pair_columns(cos, self._columns).to(device).contiguous().clone(),
            pair_columns(sin, self._columns).to(device).contiguous().clone(),
        )
        if device.type == "cuda":
            # Every stream may read them from now on. Rare: tables double when they grow.
            torch.cuda.current_stream(device).synchronize()
        return tables
