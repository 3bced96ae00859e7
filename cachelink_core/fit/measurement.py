"""Moments with everything that a solve needs to make a mapper of them; saved as one file.

``moments.safetensors`` holds the sums, shifts and the receiver's position 0; its metadata says of
which pair, of which text, and how far a run had come. A checkpoint is the same file, unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachelink_core.atomic_write import new_file
from cachelink_core.errors import CorruptChunk, ModelUnavailable
from cachelink_core.fit.moments import Moments, Shift, Split
from cachelink_core.fit.panels import Channels, Panel
from cachelink_core.identity import ModelIdentity
from cachelink_core.transport.card import KINDS, CalibrationRecord

FORMAT: Final = "cachelink-moments-1"


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's metadata."""

    sender: ModelIdentity
    receiver: ModelIdentity
    calibration: CalibrationRecord
    bos_id: int | None
    panels: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    counts: dict[Split, int]
    shard: tuple[int, int]
    chunks_done: int


@dataclass
class Measurement:
    """What a pass over both models leaves behind.

    Attributes:
        sender: identity.
        receiver: identity.
        calibration: the text.
        bos_id: first token of every sequence, None if there is none.
        moments: the sums.
        position0: the receiver's content at position 0 by the artifact's names, if ``bos_id``.
        shard: (index, count) of the processes that share the pass.
        chunks_done: of this shard.
    """

    sender: ModelIdentity
    receiver: ModelIdentity
    calibration: CalibrationRecord
    bos_id: int | None
    moments: Moments
    position0: dict[str, Tensor] = field(default_factory=dict)
    shard: tuple[int, int] = (0, 1)
    chunks_done: int = 0

    def save(self, path: Path) -> None:
        """Writes the file; an existing one is replaced only by a whole one."""
        about = _About(
            self.sender,
            self.receiver,
            self.calibration,
            self.bos_id,
            tuple((panel.sources, panel.targets) for panel in self.moments.panels),
            self.moments.counts,
            self.shard,
            self.chunks_done,
        )
        tensors = {name: tensor.cpu().contiguous() for name, tensor in _tensors(self)}
        metadata = {"format": FORMAT, "about": msgspec.json.encode(about).decode()}
        with new_file(path) as aside:
            save_file(tensors, aside, metadata)

    def same_run(self, other: Measurement) -> bool:
        """Whether two are states of one run: same pair, text, panels and shard."""
        return (
            self.sender == other.sender
            and self.receiver == other.receiver
            and self.calibration == other.calibration
            and self.moments.panels == other.moments.panels
            and self.shard == other.shard
        )


def load_measurement(path: Path, device: torch.device | str = "cpu") -> Measurement:
    """Reads a file.

    Raises:
        CorruptChunk: not such a file, or cut short.
        ModelUnavailable: no such file.
    """
    if not path.is_file():
        raise ModelUnavailable(f"moments {str(path)!r}: no such file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as reader:
            metadata = reader.metadata() or {}
            if metadata.get("format") != FORMAT:
                found = metadata.get("format")
                raise CorruptChunk(f"{path}: format is {found!r}; this version reads {FORMAT!r}")
            about = msgspec.json.decode(metadata["about"], type=_About)
            # Copies: a file's tensors lie at any address, and a GEMM's rounding depends on it.
            tensors = {n: reader.get_tensor(n).clone() for n in reader.keys()}  # noqa: SIM118
            return _assemble(about, tensors, torch.device(device))
    except (SafetensorError, msgspec.DecodeError, KeyError) as error:
        raise CorruptChunk(f"{path}: {error}") from error


def _assemble(about: _About, tensors: dict[str, Tensor], device: torch.device) -> Measurement:
    moments = Moments(
        Channels.of(about.sender.layers),
        Channels.of(about.receiver.layers),
        tuple(Panel(sources, targets) for sources, targets in about.panels),
        device,
    )
    moments.counts.update(about.counts)
    for (split, kind, index), sums in moments.sums.items():
        for name in sums.__slots__:
            setattr(sums, name, tensors[f"{split}.{kind}.{index}.{name}"])
    for kind in KINDS:
        if f"shift.{kind}.x" in tensors:
            moments.shifts[kind] = Shift(tensors[f"shift.{kind}.x"], tensors[f"shift.{kind}.y"])
    return Measurement(
        about.sender,
        about.receiver,
        about.calibration,
        about.bos_id,
        moments,
        {name: tensor for name, tensor in tensors.items() if name.startswith("position0.")},
        about.shard,
        about.chunks_done,
    )


def _tensors(measured: Measurement) -> Iterator[tuple[str, Tensor]]:
    moments = measured.moments
    for (split, kind, index), sums in moments.sums.items():
        yield from ((f"{split}.{kind}.{index}.{name}", tensor) for name, tensor in sums.named())
    for kind, shift in moments.shifts.items():
        yield f"shift.{kind}.x", shift.x
        yield f"shift.{kind}.y", shift.y
    yield from measured.position0.items()


__all__ = ["FORMAT", "Measurement", "load_measurement"]
