"""Trains the residual of a mapper through the frozen receiver (CacheLink, section 5).

Gradients run from the receiver's predictions over the continuation back into the translated keys
and values, and there into the residual alone. Ridge, sender and receiver never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cachelink_core import limits
from cachelink_core.engine.base import Engine
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.aligned import Aligned, align
from cachelink_core.fit.curves import CurvePoint, draw_curve, read_curve, write_curve
from cachelink_core.fit.evaluate import Predictions
from cachelink_core.fit.losses import Loss, functional_loss
from cachelink_core.fit.mapped_rows import MappedRows, Source, TrainableMapper
from cachelink_core.fit.receiver_forward import ReceiverForward, RowCache
from cachelink_core.fit.train_data import Example, TrainingData, batch_order
from cachelink_core.fit.train_settings import TrainSettings
from cachelink_core.fit.train_state import (
    CHECKPOINT_FILE,
    TrainingRun,
    load_checkpoint,
    save_checkpoint,
)
from cachelink_core.transport.artifact import save_mapper
from cachelink_core.transport.card import Card, ResidualShape, TrainingRecord
from cachelink_core.transport.pairing import check_pair
from cachelink_core.transport.state import MapperState

CURVE_FILE: Final = "training.csv"
PICTURE_FILE: Final = "training.png"

Report = Callable[[CurvePoint], None]
Memory = dict[Example, "Read"]
_SUMS: Final = ("loss", "ce", "kl", "penalty", "gradient", "steps")


@dataclass(frozen=True, slots=True)
class Read:
    """What both models make of an example; nothing of it is learned.

    Attributes:
        source: the prefix as the mapper reads it.
        native: logits with the receiver's own cache ``[Q, V]``.
    """

    source: Source
    native: Tensor


@dataclass(frozen=True, slots=True)
class Micro:
    """Some examples of a batch that go through the receiver together.

    Attributes:
        aligned: their predictions.
        native: logits with the receiver's own cache, without gradient.
        mapped: their translated prefixes.
    """

    aligned: Aligned
    native: Tensor
    mapped: MappedRows


class Trainer:
    """One training, from step 0 or from where its folder's checkpoint is.

    Attributes:
        mapper: what is trained.
        step: steps done.
        points: the curve so far.
    """

    def __init__(
        self,
        sender: Engine,
        receiver: TransformersEngine,
        state: MapperState,
        data: TrainingData,
        settings: TrainSettings,
        out: Path,
        *,
        resume: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """Prepares a training.

        Args:
            sender: whose cache is read.
            receiver: whose cache is written; frozen here.
            state: Ridge; a residual in it is replaced.
            data: examples.
            settings: all choices.
            out: folder of mapper, checkpoint and curve.
            resume: go on from the folder's checkpoint, if there is one.
            memory: keeps what both models make of each example, where that fits in memory: for
                examples that are seen again, and for further trainings of the same pair and Ridge.
                In 16 bit a remembered row may be rounded as in another batch.

        Raises:
            ConfigError: the checkpoint is of another training.
            IdentityMismatch: the mapper is of other models.
            InvalidRequest: no examples on one side.
        """
        check_pair(state.card, sender.identity, receiver.identity)
        for side in ("train", "held_out"):
            if not getattr(data, side):
                raise InvalidRequest(f"{data.name}: no examples in {side}")
        self.settings = settings
        self.step = 0
        self.points: list[CurvePoint] = []
        self._sender, self._data, self._out = sender, data, out
        self._receiver = ReceiverForward(receiver)
        shape = ResidualShape(
            stem=settings.stem, fused=settings.fused, standardised=settings.standardised
        )
        self.mapper = TrainableMapper(state, shape, self._receiver, settings.seed)
        self._optimizer = _optimizer(self.mapper, settings)
        self._sums = dict.fromkeys(_SUMS, 0.0)
        ridge = msgspec.structs.replace(self.mapper.state.card, digest="").compute_digest()
        self._memory = memory
        self._run = TrainingRun(ridge=ridge, data=data.digest, settings=settings.plain())
        if resume and (out / CHECKPOINT_FILE).is_file():
            self._resume()
        elif settings.standardised:
            first = [
                data.train[i] for i in range(min(settings.standardise_examples, len(data.train)))
            ]
            self.mapper.standardise([self.mapper.read(sender, e.prefix_ids) for e in first])

    def run(self, report: Report | None = None, stop_at: int | None = None) -> Card | None:
        """Trains to the last step and writes the mapper.

        Args:
            report: gets each point of the curve.
            stop_at: leave off after this step instead, with a checkpoint.

        Returns:
            The card as written; None if it left off before.
        """
        settings = self.settings
        last = settings.steps if stop_at is None else min(stop_at, settings.steps)
        if not self.points:
            self._evaluate(report)
        while self.step < last:
            self.train_step()
            done = self.step == settings.steps
            if self.step % settings.evaluate_every == 0 or done:
                self._evaluate(report)
            if self.step % settings.save_every == 0 or self.step == last:
                self._save()
        if self.step < settings.steps:
            return None
        card = save_mapper(self._out, self.learned())
        (self._out / CHECKPOINT_FILE).unlink(missing_ok=True)
        return card

    def train_step(self) -> float:
        """One step of the optimiser.

        Returns:
            The batch's loss before it.
        """
        settings = self.settings
        chosen = batch_order(len(self._data.train), settings.batch, self.step, settings.seed)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate(self.step)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, len(chosen), settings.rows):
            part = chosen[start : start + settings.rows]
            total += self._backward([self._data.train[i] for i in part], len(part) / len(chosen))
        limit = settings.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.mapper.residual.parameters(), limit)
        self._optimizer.step()
        self._sums["gradient"] += float(norm)
        self._sums["steps"] += 1
        self.step += 1
        return total

    def prepare(self, examples: Sequence[Example]) -> Micro:
        """Both caches of some examples, and what the native receiver predicts with its own."""
        aligned = align(examples, self.settings.count, self._receiver.device)
        read = self._read(examples)
        native = pad_sequence([one.native for one in read], batch_first=True)
        return Micro(aligned, native, self.mapper.rows([one.source for one in read]))

    def loss(self, micro: Micro) -> Loss:
        """The loss of some examples, without the penalty; differentiable in the residual."""
        settings = self.settings
        return functional_loss(
            self._receiver.logits(micro.mapped.caches, micro.aligned.ids),
            micro.native,
            micro.aligned.targets,
            micro.aligned.counted,
            name=settings.loss,
            kl_weight=settings.kl_weight,
            temperature=settings.temperature,
            average=settings.average,
        )

    def learned(self) -> MapperState:
        """The mapper as it is now, with the record of its training."""
        state = self.mapper.learned()
        results = {}
        for name, point in (("ridge", self.points[0]), ("last", self.points[-1])):
            for figure in ("held_out_ce", "held_out_kl", "held_out_agreement"):
                results[f"{name}_{figure}"] = getattr(point, figure)
        record = TrainingRecord(
            steps=self.step,
            loss=self.settings.loss,
            seed=self.settings.seed,
            data=self._data.name,
            data_digest=self._data.digest,
            settings=self.settings.plain(),
            results=results,
        )
        return MapperState(
            msgspec.structs.replace(state.card, training=record, gate=None), state.tensors
        )

    def _read(self, examples: Sequence[Example]) -> list[Read]:
        memory = {} if self._memory is None else self._memory
        new = [e for e in dict.fromkeys(examples) if e not in memory]
        if new:
            own = [native_cache(self._receiver.engine, e.prefix_ids) for e in new]
            with torch.no_grad():
                native = self._receiver.logits(own, [e.read_ids for e in new])
            for row, one in enumerate(new):
                source = self.mapper.read(self._sender, one.prefix_ids)
                memory[one] = Read(source, native[row, : len(one.read_ids)].clone())
        return [memory[e] for e in examples]

    def _backward(self, examples: Sequence[Example], share: float) -> float:
        micro = self.prepare(examples)
        loss = self.loss(micro)
        total = loss.total + self.settings.penalty * micro.mapped.penalty
        (total * share).backward()  # type: ignore[no-untyped-call]
        figures = (total, loss.cross_entropy, loss.divergence, micro.mapped.penalty)
        for name, value in zip(_SUMS, figures, strict=False):
            self._sums[name] += float(value.detach()) * share
        return float(total.detach()) * share

    @torch.no_grad()
    def _evaluate(self, report: Report | None) -> None:
        """Adds a point to the curve."""
        found = Predictions()
        held_out, rows = self._data.held_out, self.settings.rows
        for start in range(0, len(held_out), rows):
            part = [held_out[i] for i in range(start, min(start + rows, len(held_out)))]
            micro = self.prepare(part)
            mapped = self._receiver.logits(micro.mapped.caches, micro.aligned.ids)
            found.add(micro.native, mapped, micro.aligned)
        ce, kl, agreement = found.means()
        sums = self._sums
        means = {n: sums[n] / sums["steps"] if sums["steps"] else None for n in _SUMS}
        point = CurvePoint(
            step=self.step,
            train_loss=means["loss"],
            train_ce=means["ce"],
            train_kl=means["kl"],
            penalty=means["penalty"],
            gradient=means["gradient"],
            held_out_ce=ce,
            held_out_kl=kl,
            held_out_agreement=agreement,
            learning_rate=self.settings.rate(max(0, self.step - 1)),
        )
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self.points.append(point)
        write_curve(self._out / CURVE_FILE, self.points)
        draw_curve(
            self._out / PICTURE_FILE, self.points, f"{self._data.name}: {self.settings.loss}"
        )
        if report is not None:
            report(point)

    def _save(self) -> None:
        save_checkpoint(
            self._out / CHECKPOINT_FILE,
            self._run,
            self.step,
            self.mapper.residual,
            self._optimizer,
            self._sums,
        )

    def _resume(self) -> None:
        self.step, self._sums = load_checkpoint(
            self._out / CHECKPOINT_FILE, self._run, self.mapper.residual, self._optimizer
        )
        curve = self._out / CURVE_FILE
        points = read_curve(curve) if curve.is_file() else []
        self.points = [point for point in points if point.step <= self.step]


def native_cache(engine: Engine, ids: Sequence[int]) -> RowCache:
    """The receiver's own cache of a prefix, by the project's one prefill schedule."""
    cache = engine.open_cache(len(ids), 0, whole=True)
    engine.prefill(cache, ids, limits.DEFAULT_BLOCK_TOKENS)
    return RowCache.of(cache)


def _optimizer(mapper: TrainableMapper, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW in float32; decay on weights alone. The groups keep the residual's order of each kind."""
    parameters = list(mapper.residual.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2)
    )
