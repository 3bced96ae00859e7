"""A trained base model as a folder: weights, configuration, tokenizer, and how it was trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
import transformers
from transformers import PreTrainedModel

from cachelink_bench.recall_pair.curves import CurvePoint
from cachelink_bench.recall_pair.plan import BaseTraining
from cachelink_bench.recall_pair.tokenizer import recall_tokenizer

RECORD_FILE: Final = "training.json"


def save_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Saves weights in bf16 with configuration and tokenizer, as a local model folder.

    Args:
        model: float32; stays as it is.
        folder: exists; ``AutoModelForCausalLM`` and ``AutoTokenizer`` load from it.
    """
    rounded = type(model)(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(dtype=torch.bfloat16).eval().save_pretrained(folder)
    recall_tokenizer().save_pretrained(folder)


def write_record(folder: Path, plan: BaseTraining, last: CurvePoint) -> None:
    """Writes what was trained, how far, and with which versions; nothing about the machine.

    Args:
        folder: of the checkpoint.
        plan: the training.
        last: point of the curve, measured on the float32 weights.
    """
    record = {
        "plan": asdict(plan),
        "last_point": asdict(last),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    text = json.dumps(record, indent=2) + "\n"
    (folder / RECORD_FILE).write_text(text, encoding="utf-8")
