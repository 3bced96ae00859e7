"""Which token comes next: greedy, or through transformers' own logits processors.

Axes: V vocabulary, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cachelink_core import limits
from cachelink_core.engine.base import Sampling, TokenLogprobs
from cachelink_core.errors import InvalidRequest


def check_sampling(sampling: Sampling) -> None:
    """Refuses parameters that have no meaning.

    Raises:
        InvalidRequest: names the parameter and its value.
    """
    checks = {
        "max_new_tokens": 1 <= sampling.max_new_tokens <= limits.MAX_NEW_TOKENS,
        "temperature": 0.0 <= sampling.temperature < math.inf,
        "top_k": sampling.top_k >= 0,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "repetition_penalty": 0.0 < sampling.repetition_penalty < math.inf,
        "seed": 0 <= sampling.seed < 2**64,
        "stop": len(sampling.stop) <= limits.MAX_STOP_STRINGS and all(sampling.stop),
        "logprobs": sampling.logprobs is None or sampling.logprobs >= 0,
    }
    for name, good in checks.items():
        if not good:
            raise InvalidRequest(f"{name} {getattr(sampling, name)!r} is out of range")


def _processors(sampling: Sampling) -> LogitsProcessorList:
    """The processors in the order of transformers' ``generate``; empty for plain greedy."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=sampling.repetition_penalty))
    if sampling.temperature > 0.0:
        if sampling.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(top_k=sampling.top_k))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p=sampling.top_p))
    return processors


class TokenChooser:
    """Chooses the tokens of one answer."""

    def __init__(
        self, sampling: Sampling, seen_ids: Sequence[int], device: torch.device | str
    ) -> None:
        """Seeds the answer's own random generator.

        Args:
            sampling: checked.
            seen_ids: prefix and query, for the repetition penalty.
            device: of the logits.
        """
        self._sampling = sampling
        self._processors = _processors(sampling)
        self._generator = torch.Generator(device=device).manual_seed(sampling.seed)
        penalized = sampling.repetition_penalty != 1.0
        room = len(seen_ids) + sampling.max_new_tokens if penalized else 0
        # Only the penalty looks at earlier ids; grown in place, not concatenated for each token.
        self._seen = torch.zeros((1, room), dtype=torch.long, device=device)
        self._count = len(seen_ids) if penalized else 0
        self._seen[0, : self._count] = torch.tensor(seen_ids[: self._count], dtype=torch.long)

    def choose(self, logits: Tensor) -> int:
        """Chooses a token.

        Args:
            logits: float32 ``[V]``; not changed.
        """
        scores = logits.unsqueeze(0)
        if self._processors:
            scores = self._processors(self._seen[:, : self._count], scores.clone())
        if self._sampling.temperature == 0.0:
            token_id = int(scores.argmax(dim=-1))
        else:
            probabilities = torch.softmax(scores, dim=-1)
            token_id = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if self._count < self._seen.shape[1]:
            self._seen[0, self._count] = token_id
            self._count += 1
        return token_id


def token_logprobs(logits: Tensor, token_id: int, alternatives: int) -> TokenLogprobs:
    """Log-probabilities of the model itself, before penalty, temperature and cuts.

    Args:
        logits: float32 ``[V]``.
        token_id: the chosen token.
        alternatives: how many of the likeliest tokens to report.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    best = torch.topk(logprobs, min(alternatives, logprobs.shape[0]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token_id]), tuple(pairs))
