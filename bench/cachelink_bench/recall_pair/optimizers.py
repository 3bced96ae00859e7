"""Optimizers and learning-rate schedule of the base training."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

MUON_LR: Final = 0.02
MUON_MOMENTUM: Final = 0.95
ADAMW_LR: Final = 3e-3
WARM_UP_STEPS: Final = 50
DECAY_SHARE: Final = 0.4
"""The last part of training over which the rate falls linearly to zero."""


class OptimizerPair:
    """Muon for the matrices of the decoder layers, AdamW for embedding, head and norms.

    With AdamW alone these models still guess after 2,000 steps; Muon's orthogonal updates let the
    attention heads form that look a fact up.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_hidden = parameter.dim() == 2 and ".layers." in name
            (hidden if is_hidden else rest).append(parameter)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(hidden, lr=MUON_LR, momentum=MUON_MOMENTUM),
            torch.optim.AdamW(rest, lr=ADAMW_LR),
        )
        self._schedules = [
            LambdaLR(optimizer, lambda step: rate_factor(step, steps))
            for optimizer in self._optimizers
        ]

    def step(self) -> None:
        """Updates the weights, clears the gradients, and moves the schedule on."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for schedule in self._schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything that ``load_state_dict`` needs, on tensors and plain values."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "schedules": [schedule.state_dict() for schedule in self._schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict()`` of a pair over the same model."""
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


def rate_factor(step: int, steps: int) -> float:
    """Learning rate at ``step`` of ``steps``, as a share of the full one."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    decay = min(1.0, (steps - step) / max(1.0, DECAY_SHARE * steps))
    return warm_up * max(0.0, decay)
