"""The two architectures of the recall pair: Qwen3 of different width and depth, untrained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from cachelink_bench.recall_pair.tokenizer import MAX_TOKENS
from cachelink_bench.recall_pair.words import BOS_ID, EOS_ID, PAD_ID, VOCABULARY


class Role(StrEnum):
    """Which model of the pair."""

    SENDER = "sender"
    RECEIVER = "receiver"


@dataclass(frozen=True)
class Shape:
    """Size of one model.

    Attributes:
        layers: decoder layers.
        width: of the residual stream.
        feed_forward: width of the gated feed-forward layer.
        heads: attention heads.
        kv_heads: key/value heads.
        head_dim: channels of one head.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


SHAPES: Final = {
    Role.SENDER: Shape(layers=4, width=96, feed_forward=256),
    Role.RECEIVER: Shape(layers=6, width=160, feed_forward=384),
}
BASE_SEEDS: Final = {Role.SENDER: 1, Role.RECEIVER: 2}
"""Seeds of the committed checkpoints."""


def untrained_model(shape: Shape, seed: int) -> PreTrainedModel:
    """A float32 model in training mode; the same arguments give the same weights."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen3ForCausalLM(config)
    return model.train()
