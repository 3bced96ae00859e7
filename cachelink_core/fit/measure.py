"""One pass over both models: sequences in, moments out; resumable and shared among processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from cachelink_core.engine.base import Engine
from cachelink_core.errors import ConfigError
from cachelink_core.fit.calibration import Calibration
from cachelink_core.fit.measurement import Measurement, load_measurement
from cachelink_core.fit.moments import Moments, Split
from cachelink_core.fit.observe import Observer
from cachelink_core.fit.panels import Channels, Panel
from cachelink_core.fit.selection import Progress
from cachelink_core.fit.shards import Shards

SEQUENCES_A_CHUNK: Final = 4
"""Sequences whose observations are multiplied together. Fixed, because the rounding of a chunk's
products depends on what is in it, and must not depend on the number of processes."""

CHECKPOINT_S: Final = 300.0
"""Seconds between checkpoints: at full size one weighs as much as the moments."""

Work = tuple[Split, tuple[tuple[int, ...], ...]]


def measure(
    sender: Engine,
    receiver: Engine,
    calibration: Calibration,
    panels: tuple[Panel, ...],
    *,
    checkpoint: Path,
    shards: Shards,
    resume: bool = False,
    device: torch.device | str = "cpu",
    products: torch.dtype = torch.float64,
    progress: Progress | None = None,
    checkpoint_s: float = CHECKPOINT_S,
    stop: Callable[[], bool] | None = None,
) -> Measurement | None:
    """Accumulates the moments of a pair.

    Args:
        sender: engine of the model whose cache is read.
        receiver: engine of the model whose cache is predicted.
        calibration: the sequences.
        panels: which moments.
        checkpoint: file that an interrupted run goes on from; this process's own.
        shards: the processes that share the pass.
        resume: go on from ``checkpoint`` if it is there.
        device: where moments are kept and multiplied.
        products: dtype in which a chunk is multiplied.
        progress: told after each chunk of this process.
        checkpoint_s: seconds between checkpoints.
        stop: asked before each chunk; true leaves a checkpoint and ends.

    Returns:
        The moments, complete in process 0; None if ``stop`` said so.

    Raises:
        ConfigError: the checkpoint is of another run.
    """
    work = chunks(calibration)
    mine = work[shards.rank :: shards.count]
    measured = _begin(sender, receiver, calibration, panels, shards, torch.device(device))
    if resume and checkpoint.is_file():
        measured = _resumed(measured, checkpoint)
    measured.moments.products = products
    observer = Observer(sender, receiver, calibration.record.length, calibration.record.stride)
    if shards.rank == 0 and not measured.moments.shifts:
        first = observer.observe(work[0][1])
        measured.moments.set_shifts(
            {k: (x.to(device), y.to(device)) for k, (x, y) in first.items()}
        )
        if calibration.bos_id is not None:
            measured.position0 = observer.position0()
    shards.share_shifts(measured)
    saved = time.monotonic()
    for index in range(measured.chunks_done, len(mine)):
        if stop is not None and stop():
            measured.save(checkpoint)
            return None
        split, sequences = mine[index]
        measured.moments.add(split, observer.observe(sequences))
        measured.chunks_done = index + 1
        if progress is not None:
            progress("reading", index + 1, len(mine))
        if time.monotonic() - saved > checkpoint_s:
            measured.save(checkpoint)
            saved = time.monotonic()
    shards.merge(measured)
    shards.barrier()
    return measured


def chunks(calibration: Calibration) -> list[Work]:
    """The work of a pass in its order: groups of sequences of one side, those to fit on first."""
    sides: tuple[tuple[Split, tuple[tuple[int, ...], ...]], ...] = (
        ("train", calibration.train),
        ("held_out", calibration.held_out),
    )
    return [(split, tuple(group)) for split, side in sides for group in _groups(side)]


def _groups(side: Sequence[tuple[int, ...]]) -> list[Sequence[tuple[int, ...]]]:
    size = SEQUENCES_A_CHUNK
    return [side[start : start + size] for start in range(0, len(side), size)]


def _begin(
    sender: Engine,
    receiver: Engine,
    calibration: Calibration,
    panels: tuple[Panel, ...],
    shards: Shards,
    device: torch.device,
) -> Measurement:
    moments = Moments(
        Channels.of(sender.identity.layers), Channels.of(receiver.identity.layers), panels, device
    )
    return Measurement(
        sender.identity,
        receiver.identity,
        calibration.record,
        calibration.bos_id,
        moments,
        shard=(shards.rank, shards.count),
    )


def _resumed(fresh: Measurement, checkpoint: Path) -> Measurement:
    held = load_measurement(checkpoint, fresh.moments.device)
    if not held.same_run(fresh):
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} is of another run: models, text, layer sets or number "
            f"of processes differ (it is shard {held.shard}, this is {fresh.shard})"
        )
    return held
