"""Training batches of the recall task: facts with queries, and repeated random sequences.

Axes: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from cachelink_bench.recall_pair.task import Stream, document, generator
from cachelink_bench.recall_pair.words import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, VOCABULARY

MAX_QUERIES: Final = 16
"""Queries after one training document: most of the signal of all of them at half the tokens."""

REPEAT_LENGTHS: Final = (12, 40)
"""Shortest and longest repeated random sequence."""


@dataclass(frozen=True)
class Batch:
    """Tokens, and which of them the loss asks for.

    Attributes:
        tokens: int64 `[B, T]`, padded on the right with ``<pad>``.
        answers: bool `[B, T]`, the tokens that follow from the context alone.
        text: bool `[B, T]`, the tokens of the plain language-model loss.
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    text: torch.Tensor


def training_batch(seed: int, step: int, facts: int, rows: int) -> Batch:
    """The batch of one step: repeated sequences at even steps, facts at odd ones.

    A function of its arguments only, so that a resumed training sees what an uninterrupted one
    sees.
    """
    rng = generator(Stream.TRAINING, seed, step)
    return repeated_batch(rng, rows) if step % 2 == 0 else fact_batch(rng, rows, facts)


def repeated_batch(rng: np.random.Generator, rows: int) -> Batch:
    """``<bos> a a`` with a random sequence a of distinct tokens.

    The second copy can only be predicted by looking back to what followed the same token: without
    these batches the heads that do so do not form, and facts are never looked up.
    """
    length = int(rng.integers(REPEAT_LENGTHS[0], REPEAT_LENGTHS[1] + 1))
    words = np.arange(len(SPECIAL_TOKENS), len(VOCABULARY))
    copies = [np.tile(rng.permutation(words)[:length], 2) for _ in range(rows)]
    tokens = torch.tensor([[BOS_ID, *row.tolist()] for row in copies])
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, length + 2 :] = True  # the second copy, from its second token on
    return Batch(tokens, answers, torch.zeros_like(answers))


def fact_batch(rng: np.random.Generator, rows: int, facts: int) -> Batch:
    """Documents followed by queries with their answers: ``… ? Ada sings <eos> ? Leo cooks <eos>``.

    No subject is asked for twice: a model could copy its own earlier answer.
    """
    token_rows, answer_rows = zip(*(_fact_row(rng, facts) for _ in range(rows)), strict=True)
    width = max(map(len, token_rows))
    tokens = torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in token_rows])
    answers = torch.tensor([[*row, *[False] * (width - len(row))] for row in answer_rows])
    return Batch(tokens, answers, tokens != PAD_ID)


def _fact_row(rng: np.random.Generator, facts: int) -> tuple[list[int], list[bool]]:
    drawn = document(rng, facts)
    tokens = list(drawn.prefix_ids)
    answers = [False] * len(tokens)
    for query_ids, answer_id in drawn.queries[:MAX_QUERIES]:
        tokens += [*query_ids, answer_id, EOS_ID]
        answers += [*[False] * len(query_ids), True, False]
    return tokens, answers
