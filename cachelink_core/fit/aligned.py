"""Rows of examples as one batch of predictions: what is read, what should follow, what counts.

Axes: B rows, Q tokens read behind the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachelink_core.fit.receiver_forward import PAD_ID
from cachelink_core.fit.train_data import Example
from cachelink_core.fit.train_settings import Counted


@dataclass(frozen=True, slots=True)
class Aligned:
    """Predictions of some examples; place t is what the token read at t predicts.

    Attributes:
        ids: read behind each prefix, one sequence a row.
        targets: token after each, ``[B, Q]``.
        counted: bool ``[B, Q]``.
    """

    ids: tuple[tuple[int, ...], ...]
    targets: Tensor
    counted: Tensor


def align(examples: Sequence[Example], count: Counted, device: torch.device) -> Aligned:
    """Lines examples up.

    The last query token predicts the first token of the continuation, so of ``len(query) - 1``
    first predictions none counts, unless the query's own tokens are asked for.
    """
    width = max(len(example.read_ids) for example in examples)
    targets = torch.full((len(examples), width), PAD_ID)
    counted = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.read_ids)
        targets[row, :length] = torch.tensor(example.target_ids)
        first = len(example.query_ids) - 1 if count == "continuation" else 0
        counted[row, first:length] = True
    ids = tuple(example.read_ids for example in examples)
    return Aligned(ids, targets.to(device), counted.to(device))
