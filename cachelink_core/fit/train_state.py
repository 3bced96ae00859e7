"""A training in the middle: residual and optimiser as safetensors, everything else as JSON.

Both are one file, the JSON in its header, so that they are always of the same step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachelink_core.atomic_write import new_file
from cachelink_core.errors import ConfigError, CorruptChunk
from cachelink_core.transport.card import Plain
from cachelink_core.transport.residual import Residual

FORMAT: Final = "cachelink-training-1"
CHECKPOINT_FILE: Final = "training.safetensors"


class TrainingRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must be the same for a training to go on.

    Attributes:
        ridge: digest of the card without what is learned here.
        data: digest of the examples.
        settings: all of them.
    """

    ridge: str
    data: str
    settings: Plain


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    run: TrainingRun
    step: int
    sums: dict[str, float]


def save_checkpoint(
    path: Path,
    run: TrainingRun,
    step: int,
    residual: Residual,
    optimizer: torch.optim.AdamW,
    sums: dict[str, float],
) -> None:
    """Writes the state after ``step`` steps; an existing file is replaced only by a whole one.

    Args:
        path: of the file.
        run: what is being trained.
        step: steps done.
        residual: as it is now.
        optimizer: over the residual's parameters in their order.
        sums: of the figures since the curve's last point.
    """
    tensors = {f"residual.{name}": t for name, t in residual.state_dict().items()}
    for index, parameter in enumerate(residual.parameters()):
        for name, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{index}.{name}"] = value
    header = msgspec.json.encode(_Header(run=run, step=step, sums=sums)).decode()
    with new_file(path) as aside:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            aside,
            {"format": FORMAT, "header": header},
        )


def load_checkpoint(
    path: Path, run: TrainingRun, residual: Residual, optimizer: torch.optim.AdamW
) -> tuple[int, dict[str, float]]:
    """Puts a saved state in place.

    Returns:
        Steps done, and the sums.

    Raises:
        ConfigError: the file is of another training; names what differs.
        CorruptChunk: not such a file, or cut short.
    """
    try:
        with safe_open(path, framework="pt") as reader:
            metadata = reader.metadata() or {}
            if metadata.get("format") != FORMAT:
                found = metadata.get("format")
                raise CorruptChunk(f"{path}: format is {found!r}; this version reads {FORMAT!r}")
            header = msgspec.json.decode(metadata["header"], type=_Header)
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, msgspec.DecodeError, KeyError) as error:
        raise CorruptChunk(f"{path}: {error}") from error
    _check_same(path, header.run, run)
    residual.load_state_dict(
        {n.removeprefix("residual."): t for n, t in tensors.items() if n.startswith("residual.")}
    )
    _load_optimizer(tensors, residual, optimizer)
    return header.step, dict(header.sums)


def _load_optimizer(
    tensors: dict[str, Tensor], residual: Residual, optimizer: torch.optim.AdamW
) -> None:
    for index, parameter in enumerate(residual.parameters()):
        prefix = f"optimizer.{index}."
        # The step counter stays on the CPU, where AdamW keeps it.
        optimizer.state[parameter] = {
            name.removeprefix(prefix): t if t.dim() == 0 else t.to(parameter.device)
            for name, t in tensors.items()
            if name.startswith(prefix)
        }


def _check_same(path: Path, found: TrainingRun, wanted: TrainingRun) -> None:
    differing = [
        f"{name} is {found.settings.get(name)!r} there and {value!r} here"
        for name, value in wanted.settings.items()
        if found.settings.get(name) != value
    ]
    if found.ridge != wanted.ridge:
        differing.append("the mapper differs")
    if found.data != wanted.data:
        differing.append("the examples differ")
    if differing:
        raise ConfigError(
            f"checkpoint {str(path)!r} is of another training: {'; '.join(differing)}"
        )
