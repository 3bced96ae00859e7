"""``fit`` and ``solve`` as functions: from two models and a text to a mapper on disk.

The commands (``cli_commands.py``) only parse and print.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch

from cachelink_core.engine.base import Engine
from cachelink_core.fit.build import Solved, SolveOptions, assemble, build_mapper, solve_targets
from cachelink_core.fit.calibration import Calibration, calibrate, read_documents
from cachelink_core.fit.measure import measure
from cachelink_core.fit.measurement import Measurement, load_measurement
from cachelink_core.fit.panels import Panel, depth_panels, full_panel
from cachelink_core.fit.plan import moments_cost, usable_memory_bytes
from cachelink_core.fit.selection import Progress
from cachelink_core.fit.shards import Shards, joined
from cachelink_core.transport.artifact import save_mapper
from cachelink_core.transport.card import Card
from cachelink_core.transport.pairing import check_same_tokenizer
from cachelink_core.transport.state import MapperState

MOMENTS_FILE: Final = "moments.safetensors"

Products = Literal["float64", "float32"]
PanelsMode = Literal["auto", "full", "per-layer"]
Pass = tuple[Panel, ...]

PRODUCTS: Final[dict[Products, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What a fit is asked for.

    Attributes:
        calibration: a path, or a data set on the hub.
        sequences: to fit on.
        length: tokens of each.
        stride: every how manyth position is observed.
        held_out: held-out sequences as a share of ``sequences``.
        seed: of the order of documents.
        panels: ``full`` moments, from which any layer set can be solved; ``per-layer`` moments of
            the k layers nearest in depth, where those do not fit; ``auto`` looks.
        products: in which a chunk is multiplied.
        memory_bytes: what moments may take; None for what the host has left.
        device: where moments are kept and multiplied.
        solve: how the mapper is solved.
    """

    calibration: str
    sequences: int = 500
    length: int = 1_024
    stride: int = 4
    held_out: float = 0.1
    seed: int = 0
    panels: PanelsMode = "auto"
    products: Products = "float64"
    memory_bytes: int | None = None
    device: str = "cpu"
    solve: SolveOptions = field(default_factory=SolveOptions)


def fit(
    sender: Engine,
    receiver: Engine,
    options: FitOptions,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> Card | None:
    """Fits a mapper and writes it, with its moments, to a folder.

    Args:
        sender: engine of the model whose cache will be read.
        receiver: engine of the model whose cache will be written.
        options: what is wanted.
        out: the folder.
        resume: go on from a checkpoint of the same run in it.
        progress: told what is done.

    Returns:
        The card; None in those processes of ``torchrun`` that do not write.

    Raises:
        ConfigError: the text cannot be had, or the checkpoint is of another run.
        IdentityMismatch: the tokenizers differ.
        InvalidRequest: too little text, or options that do not fit the pair.
    """
    check_same_tokenizer(sender.identity, receiver.identity)
    passes = plan_passes(sender, receiver, options)
    calibration = _calibration(sender, options)
    with joined() as shards:
        run = _Run(sender, receiver, calibration, options, out, shards, progress)
        state = run.full(passes[0], resume=resume) if _is_full(passes) else run.layers(passes)
    return None if state is None else save_mapper(out, state)


def solve(
    moments: Path, options: SolveOptions, out: Path, *, progress: Progress | None = None
) -> Card:
    """Makes another mapper of saved moments, without models or data.

    Raises:
        CorruptChunk: the file is not one of moments.
        InvalidRequest: options that do not fit them.
        ModelUnavailable: no such file.
    """
    return save_mapper(out, build_mapper(load_measurement(moments), options, progress))


def plan_passes(sender: Engine, receiver: Engine, options: FitOptions) -> list[Pass]:
    """Which moments are taken in which pass over the text.

    Returns:
        One pass with one panel of everything; or one panel a target layer, in as many passes as
        the memory asks for.
    """
    layers = sender.identity.layers, receiver.identity.layers
    whole = (full_panel(*layers),)
    budget = options.memory_bytes or usable_memory_bytes()
    fits = moments_cost(*layers, whole, 0).nbytes <= budget
    if options.panels == "full" or (options.panels == "auto" and fits):
        return [whole]
    passes: list[Pass] = [()]
    for panel in depth_panels(*layers, options.solve.k):
        grown = (*passes[-1], panel)
        if passes[-1] and moments_cost(*layers, grown, 0).nbytes > budget:
            passes.append((panel,))
        else:
            passes[-1] = grown
    return passes


@dataclass
class _Run:
    """One fit in this process."""

    sender: Engine
    receiver: Engine
    calibration: Calibration
    options: FitOptions
    out: Path
    shards: Shards
    progress: Progress | None

    def full(self, panels: Pass, *, resume: bool) -> MapperState | None:
        """Moments of everything, kept; then the layers are chosen and solved."""
        measured = self._measure(panels, resume=resume)
        if measured is None:
            return None
        measured.save(self.out / MOMENTS_FILE)
        return build_mapper(measured, self.options.solve, self.progress)

    def layers(self, passes: list[Pass]) -> MapperState | None:
        """Pass by pass: moments of some target layers, solved and forgotten."""
        options = dataclasses.replace(self.options.solve, selection="given")
        solved, measured = Solved({}, {}, []), None
        for panels in passes:
            measured = self._measure(panels, resume=False)
            if measured is None:
                continue
            sets = {panel.targets[0]: panel.sources for panel in panels}
            part = solve_targets(measured, options, sets, self.progress)
            solved.layers |= part.layers
            solved.tensors |= part.tensors
            solved.warnings += part.warnings
        if measured is None:
            return None
        solved.warnings.append("layers were chosen by depth: the full moments did not fit")
        return assemble(measured, options, solved)

    def _measure(self, panels: Pass, *, resume: bool) -> Measurement | None:
        """One pass; its result is in process 0 alone."""
        checkpoint = self.out / f"checkpoint.{self.shards.rank}.safetensors"
        measured = measure(
            self.sender,
            self.receiver,
            self.calibration,
            panels,
            checkpoint=checkpoint,
            shards=self.shards,
            resume=resume,
            device=self.options.device,
            products=PRODUCTS[self.options.products],
            progress=self.progress,
        )
        checkpoint.unlink(missing_ok=True)
        return measured if self.shards.rank == 0 else None


def _is_full(passes: list[Pass]) -> bool:
    return len(passes) == 1 and len(passes[0]) == 1 and len(passes[0][0].targets) > 1


def _calibration(engine: Engine, options: FitOptions) -> Calibration:
    begin = engine.tokens.document("", chat=False).ids
    return calibrate(
        read_documents(options.calibration, seed=options.seed),
        engine.tokens.plain,
        bos_id=begin[0] if begin else None,
        source=options.calibration,
        sequences=options.sequences,
        length=options.length,
        stride=options.stride,
        held_out=options.held_out,
        seed=options.seed,
    )
