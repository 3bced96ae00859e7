"""What a model's configuration says about its size: enough to predict a fit, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from cachelink_core.errors import ConfigError
from cachelink_core.identity import LayerGeometry

Positive = Annotated[int, msgspec.Meta(ge=1)]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder with gated feed-forward layers, as all models of the pair cards are.

    Attributes:
        name: on the hub, or as the caller calls it.
        layers: L.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward layers.
        heads: query heads.
        kv_heads: H.
        head_dim: D.
        vocabulary: rows of the embedding.
        tied: whether the embedding is the output projection too.
        key_norm: whether keys are normalised per head before RoPE.
        rope: parameters of the rotation.
        max_positions: the window.
    """

    name: str
    layers: Positive
    hidden: Positive
    intermediate: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    vocabulary: Positive
    tied: bool = False
    key_norm: bool = False
    rope: dict[str, Any] = {}
    max_positions: int = 0

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """One geometry a layer, all of full attention."""
        return (LayerGeometry(self.kv_heads, self.head_dim),) * self.layers

    @property
    def channels(self) -> int:
        """H·D."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights, norms left out."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings

    def prefill_flops(self, length: int) -> float:
        """Of one sequence of ``length`` tokens without logits; two for each multiply-add."""
        dense = 2.0 * self.layers * self.layer_parameters * length
        attention = 4.0 * self.layers * self.heads * self.head_dim * length * length / 2
        return dense + attention


class PairCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pair that is known by its configurations: a file in ``manifests/pairs``.

    Attributes:
        pair: its name.
        sender: shape of the model whose cache is read.
        receiver: shape of the model whose cache is written.
        k: source layers of each target layer.
        source: where k comes from.
        notes: what a reader must know, such as which part of a multimodal checkpoint is meant.
    """

    pair: str
    sender: ModelShape
    receiver: ModelShape
    k: Positive
    source: str
    notes: tuple[str, ...] = ()


def read_pair_card(path: Path) -> PairCard:
    """Reads a pair card.

    Raises:
        ConfigError: no such file, or not a pair card.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PairCard)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"pair card {str(path)!r}: {error}") from error


def model_shape(name: str) -> ModelShape:
    """The shape of a model by its configuration alone: a folder, or a name on the hub.

    Raises:
        ConfigError: there is no configuration, or it says no such thing.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        return ModelShape(
            name=name,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            max_positions=config.max_position_embeddings,
        )
    except (OSError, ValueError, AttributeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model {name!r} has no configuration to plan with: {first}") from error
