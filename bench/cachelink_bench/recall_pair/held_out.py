"""Writes the held-out documents that ``cachelink demo --pair`` asks about.

python -m cachelink_bench.recall_pair.held_out bench/models/recall/held_out.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from cachelink_bench.recall_pair.task import Document, held_out_documents
from cachelink_bench.recall_pair.tokenizer import recall_tokenizer

SEED = 20_261_130
COUNTS = {8: 6, 16: 6, 32: 4}
"""Documents by number of facts."""


def write_held_out(path: Path) -> None:
    """Writes documents with token ids, their text, and every question with its answer."""
    tokenizer = recall_tokenizer()
    documents = [
        _plain(document, tokenizer)
        for facts, count in COUNTS.items()
        for document in held_out_documents(count, facts, SEED)
    ]
    path.write_text(json.dumps({"seed": SEED, "documents": documents}, indent=None) + "\n")


def _plain(document: Document, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "facts": len(document.facts),
        "text": document.text,
        "prefix_ids": list(document.prefix_ids),
        "queries": [
            {
                "query_ids": list(query.query_ids),
                "answer_id": query.answer_id,
                "question": str(tokenizer.decode(list(query.query_ids))),
                "answer": str(tokenizer.decode([query.answer_id])),
            }
            for query in document.queries
        ],
    }


if __name__ == "__main__":
    write_held_out(Path(sys.argv[1]))
