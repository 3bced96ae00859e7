"""Trains one base model of the recall pair on one CPU thread.

Batches of facts alternate with batches of repeated random sequences (``batches.py``), documents
grow as the model learns (``curriculum.py``), Muon trains the hidden matrices (``optimizers.py``).
Axes: B rows, T tokens, N vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from cachelink_bench.recall_pair.batches import Batch, training_batch
from cachelink_bench.recall_pair.checkpoint import save_checkpoint, write_record
from cachelink_bench.recall_pair.curriculum import Curriculum
from cachelink_bench.recall_pair.curves import CurvePoint, read_curves, write_curves
from cachelink_bench.recall_pair.models import untrained_model
from cachelink_bench.recall_pair.optimizers import OptimizerPair
from cachelink_bench.recall_pair.plan import BaseTraining
from cachelink_bench.recall_pair.recall import recall_by_facts
from cachelink_bench.recall_pair.training_state import load_state, save_state

TEXT_WEIGHT: Final = 0.05
"""Weight of the plain language-model loss beside the loss on answers."""

STATE_FILE: Final = "training_state.safetensors"
CURVES_FILE: Final = "curves.csv"
EVALUATION_SEED: Final = 0
EVALUATION_DOCUMENTS: Final = 16
EVALUATION_QUERIES: Final = 4


class BaseTrainer:
    """A base model with its optimizers, in the middle of a training.

    A folder holds the state and the curve, and at the end the model instead of the state. A trainer
    over a folder with a state continues from there, and ends at the same weights as an
    uninterrupted one.

    Args:
        plan: of the training.
        folder: made if it is not there.

    Raises:
        ValueError: the folder holds the state of another training.
    """

    def __init__(self, plan: BaseTraining, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.model = untrained_model(plan.shape, plan.seed)
        self.step = 0
        self._optimizers = OptimizerPair(self.model, plan.steps)
        self._curriculum = Curriculum()
        self._points: list[CurvePoint] = []
        self._losses: list[float] = []
        self._copy_recalls: list[float] = []
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / STATE_FILE).exists():
            self._resume()

    def run(self, report: Callable[[str], None], stop_at: int | None = None) -> None:
        """Trains to the last step and saves the model.

        Args:
            report: gets one line of progress at every evaluation.
            stop_at: leave off at this step instead, with the state saved.
        """
        last = self.plan.steps if stop_at is None else min(stop_at, self.plan.steps)
        started_s, first = time.monotonic(), self.step
        while self.step < last:
            self._train_step()
            if self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps:
                self._evaluate()
                elapsed_s = time.monotonic() - started_s
                report(self._progress(elapsed_s / (self.step - first)))
            if self.step % self.plan.save_every == 0 or self.step == last:
                self._save_state()
        if self.step == self.plan.steps:
            save_checkpoint(self.model, self.folder)
            write_record(self.folder, self.plan, self._points[-1])
            (self.folder / STATE_FILE).unlink(missing_ok=True)

    def _train_step(self) -> None:
        batch = training_batch(self.plan.seed, self.step, self._curriculum.facts, self.plan.rows)
        loss, recall = batch_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizers.step()
        if batch.text.any():
            self._curriculum.observe(recall)
            self._losses.append(float(loss.detach()))
        else:
            self._copy_recalls.append(recall)
        self.step += 1

    def _evaluate(self) -> None:
        recalls = recall_by_facts(
            self.model,
            documents=EVALUATION_DOCUMENTS,
            queries=EVALUATION_QUERIES,
            seed=EVALUATION_SEED,
        )
        self._points.append(
            CurvePoint(
                step=self.step,
                facts=self._curriculum.facts,
                loss=_mean(self._losses),
                copy_recall=_mean(self._copy_recalls),
                recalls=recalls,
            )
        )
        self._losses.clear()
        self._copy_recalls.clear()
        write_curves(self.folder / CURVES_FILE, self._points)

    def _progress(self, step_s: float) -> str:
        point = self._points[-1]
        recalls = ", ".join(f"{recall:.2f} of {facts}" for facts, recall in point.recalls.items())
        left_min = (self.plan.steps - self.step) * step_s / 60
        return (
            f"step {self.step} of {self.plan.steps}: loss {point.loss:.3f}, copies "
            f"{point.copy_recall:.2f}, training on {point.facts} facts, "
            f"held-out recall {recalls}; "
            f"{step_s:.2f} s a step, {left_min:.0f} min left"
        )

    def _save_state(self) -> None:
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "curriculum": asdict(self._curriculum),
            "losses": self._losses,
            "copy_recalls": self._copy_recalls,
        }
        save_state(self.folder / STATE_FILE, state)

    def _resume(self) -> None:
        state = load_state(self.folder / STATE_FILE)
        if state["plan"] != asdict(self.plan):
            raise ValueError(
                f"{self.folder} holds a training of {state['plan']}, not of {asdict(self.plan)}"
            )
        self.model.load_state_dict(state["model"])
        self._optimizers.load_state_dict(state["optimizers"])
        self._curriculum = Curriculum(**state["curriculum"])
        self._losses = list(state["losses"])
        self._copy_recalls = list(state["copy_recalls"])
        self.step = state["step"]
        curves = self.folder / CURVES_FILE
        points = read_curves(curves) if curves.exists() else []
        self._points = [point for point in points if point.step <= self.step]


def batch_loss(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, float]:
    """Loss of one batch, and the share of its answers that are predicted.

    Args:
        model: in training mode.
        batch: `[B, T]`; nothing looks at padding, which stands on the right.

    Returns:
        The scalar loss (mean over answers, plus ``TEXT_WEIGHT`` times the mean over text) with its
        graph, and the recall on the batch's answers.
    """
    logits = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1]
    targets, answers, text = batch.tokens[:, 1:], batch.answers[:, 1:], batch.text[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [B, T-1]
    loss = losses[answers].mean()
    if text.any():
        loss = loss + TEXT_WEIGHT * losses[text].mean()
    with torch.no_grad():
        right = logits[answers].argmax(-1) == targets[answers]
    return loss, float(right.float().mean())


def _mean(values: list[float]) -> float:
    """NaN for no values: an interval of one step has no batch of one of the two kinds."""
    return sum(values) / len(values) if values else math.nan
