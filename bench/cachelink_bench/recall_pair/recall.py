"""How often a model answers right from a document that it never saw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from cachelink_bench.recall_pair.task import Document, held_out_documents
from cachelink_bench.recall_pair.words import EOS_ID, PAD_ID

FACT_COUNTS: Final = (8, 16, 32)
"""Facts per document at which recall is reported."""

ROWS_PER_FORWARD: Final = 64


def recall_by_facts(
    model: PreTrainedModel,
    *,
    documents: int,
    queries: int,
    seed: int,
    fact_counts: Iterable[int] = FACT_COUNTS,
) -> dict[int, float]:
    """Share of right answers on held-out documents, by the number of facts in a document.

    Args:
        model: read only; its mode is restored.
        documents: held-out documents for every number of facts.
        queries: asked of each document, at most one for each fact.
        seed: of the documents.
        fact_counts: numbers of facts.
    """
    return {
        facts: recall(model, held_out_documents(documents, facts, seed), queries)
        for facts in fact_counts
    }


def recall(model: PreTrainedModel, documents: Iterable[Document], queries: int) -> float:
    """Share of queries whose most likely next token is the answer, each asked on its own."""
    return _share_right(
        model,
        [
            ((*drawn.prefix_ids, *query_ids), answer_id)
            for drawn in documents
            for query_ids, answer_id in drawn.queries[:queries]
        ],
    )


def stop_rate(model: PreTrainedModel, documents: Iterable[Document], queries: int) -> float:
    """Share of right answers, each given to the model, after which it would end with ``<eos>``."""
    return _share_right(
        model,
        [
            ((*drawn.prefix_ids, *query_ids, answer_id), EOS_ID)
            for drawn in documents
            for query_ids, answer_id in drawn.queries[:queries]
        ],
    )


@torch.inference_mode()
def _share_right(model: PreTrainedModel, rows: Sequence[tuple[tuple[int, ...], int]]) -> float:
    """Share of texts whose most likely next token is the wanted one."""
    was_training = model.training
    model.eval()
    right = 0
    for start in range(0, len(rows), ROWS_PER_FORWARD):
        texts, wanted = zip(*rows[start : start + ROWS_PER_FORWARD], strict=True)
        right += int((_next_tokens(model, texts) == torch.tensor(wanted)).sum())
    model.train(was_training)
    return right / len(rows)


def _next_tokens(model: PreTrainedModel, texts: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """The most likely next token of each text, int64 `[B]`.

    Padding stands on the right, where a causal model does not look: no attention mask is needed.
    """
    width = max(map(len, texts))
    tokens = torch.tensor([[*text, *[PAD_ID] * (width - len(text))] for text in texts])
    last = torch.tensor([len(text) - 1 for text in texts])
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[torch.arange(len(texts)), last])
    return torch.as_tensor(logits.argmax(-1))
