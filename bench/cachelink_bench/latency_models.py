"""What ``cachelink-bench latency`` times: a pair's receiver, random maps, a sender's random cache.

Everything is made on the device itself, layer by layer: a 32B model never exists on the host. Times
do not depend on the numbers, only on shapes, dtypes and where things lie.

Axes: L layers, H KV heads, n prefix tokens, T tokens, D head dim, P rotary pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cachelink_bench.transport_shapes import DIGEST
from cachelink_core.codec_spec import DType
from cachelink_core.engine.identify import config_digest
from cachelink_core.engine.tokens import HFTokens
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.fit.panels import depth_panels
from cachelink_core.fit.shapes import ModelShape, PairCard, model_shape
from cachelink_core.identity import LayerGeometry, ModelIdentity
from cachelink_core.kv.geometry import layer_geometry
from cachelink_core.kv.prefix_cache import TORCH_DTYPES
from cachelink_core.kv.rope import KeyRope
from cachelink_core.kv.rotation import rotate
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer
from cachelink_core.transport.card import Card, LayerFit, ResidualShape
from cachelink_core.transport.layer_map import LayerMap
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.precision import precision_for
from cachelink_core.transport.state import expected_shapes

LayerSets = Literal["scattered", "nearest"]

SCALED_VOCABULARY: Final = 4_096
"""Rows of the embedding of a model that is scaled down: 151,936 would be most of a shallow one."""

SMOKE_PAIR: Final = PairCard(
    pair="tiny shapes",
    sender=ModelShape(
        name="tiny-sender", layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2,
        head_dim=32, vocabulary=512, key_norm=True, max_positions=4_096,
    ),
    receiver=ModelShape(
        name="tiny-receiver", layers=6, hidden=256, intermediate=768, heads=8, kv_heads=2,
        head_dim=32, vocabulary=512, key_norm=True, max_positions=4_096,
    ),
    k=2,
    source="none: for smoke runs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Built:
    """A model that can be built without weights.

    Attributes:
        shape: what its floating-point operations follow from.
        config: of transformers.
    """

    shape: ModelShape
    config: Any


def from_shape(shape: ModelShape) -> Built:
    """A model of a pair card."""
    if shape.key_norm:
        kind = transformers.Qwen3Config
    elif shape.rope.get("rope_type") == "yarn" and "mistral" in shape.name.lower():
        kind = transformers.Ministral3Config
    else:
        kind = transformers.LlamaConfig
    fields: dict[str, Any] = {}
    if shape.rope:
        scaling = {"llama_4_scaling_beta": 0.1} if "mistral" in shape.name.lower() else {}
        fields["rope_parameters"] = scaling | shape.rope
    config = kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        **fields,
    )
    return Built(shape, config)


def from_config(name: str) -> Built:
    """A model by its configuration alone: a folder, or a name on the hub.

    Raises:
        ConfigError: there is no such configuration.
    """
    shape = model_shape(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return Built(shape, config.get_text_config(decoder=True))


def scaled(built: Built, layers: int) -> Built:
    """The same width with fewer layers and a small vocabulary, for machines without the memory."""
    shape, config = built.shape, built.config
    layers = min(layers, shape.layers)
    rows = min(SCALED_VOCABULARY, shape.vocabulary)
    config.num_hidden_layers, config.vocab_size = layers, rows
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return Built(msgspec.structs.replace(shape, layers=layers, vocabulary=rows), config)


def random_engine(
    built: Built, dtype: DType, device: torch.device, attention: str
) -> TransformersEngine:
    """An engine around a model whose weights are drawn on the device, in its dtype."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            built.config, dtype=TORCH_DTYPES[dtype], attn_implementation=attention
        )
    model = model.eval().requires_grad_(False)
    assert {p.device.type for p in model.parameters()} == {device.type}
    rope = KeyRope.probe(model)
    identity = _identity(
        layer_geometry(model, rope),
        dtype,
        architecture=type(model).__name__,
        config_digest=config_digest(model.config.to_dict()),
        rope=rope.parameters,
        max_positions=built.shape.max_positions,
    )
    # The ids are random and no text is read, so any tokenizer does.
    return TransformersEngine(model, HFTokens(tiny_tokenizer()), identity, rope)


def layer_sets(
    sender: Sequence[LayerGeometry], receiver: Sequence[LayerGeometry], k: int, kind: LayerSets
) -> tuple[tuple[int, ...], ...]:
    """S_l of every receiver layer.

    ``scattered`` sets have to be copied together for every layer, ``nearest`` ones are views: a
    fitted choice lies between the two.
    """
    k = min(k, len(sender))
    if kind == "nearest":
        return tuple(panel.sources for panel in depth_panels(sender, receiver, k))
    chosen = random.Random(0)
    return tuple(tuple(sorted(chosen.sample(range(len(sender)), k))) for _ in receiver)


def random_mapper(
    sender: ModelShape,
    receiver: ModelIdentity,
    sets: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    residual: bool,
) -> Mapper:
    """A mapper of the right shapes whose output is about as large as its input.

    Args:
        sender: whose cache it reads.
        receiver: whose cache it writes; its dtype decides the mapper's precision.
        sets: S_l of each receiver layer.
        device: of the receiver.
        residual: Ridge + residual instead of Ridge alone.
    """
    card = Card(
        sender=_identity(sender.geometry, receiver.dtype),
        receiver=receiver,
        layers=tuple(LayerFit(sources=sources) for sources in sets),
        residual=ResidualShape() if residual else None,
    )
    precision = precision_for(TORCH_DTYPES[receiver.dtype], device)
    generator = torch.Generator(device).manual_seed(0)
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in expected_shapes(card):
        shapes.setdefault(int(name.split(".")[1]), {})[name] = shape
    layers = []
    for index in range(len(sets)):
        tensors = {
            name: torch.randn(shape, generator=generator, device=device) * _spread(name, shape)
            for name, shape in shapes[index].items()
        }
        layers.append(LayerMap(card, index, tensors, precision, device))
    return Mapper(card, layers, precision, device)


def _spread(name: str, shape: tuple[int, ...]) -> float:
    is_ridge = name.startswith("ridge.") and name.endswith(".weight")
    return float(shape[0]) ** -0.5 if is_ridge else 0.02


class SourceCache:
    """A sender's cache of random numbers with the statistics of a real one: constant channels.

    Attributes:
        keys: one ``[H, n, D]`` a layer, rotated, in the sender's dtype.
        values: likewise.
    """

    def __init__(
        self, shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Draws ``tokens`` tokens of every layer."""
        generator = torch.Generator(device).manual_seed(1)
        self._dim = shape.head_dim
        exponents = torch.arange(0, self._dim, 2, device=device) / self._dim
        base = float(shape.rope.get("rope_theta", 10_000.0))
        turns = torch.arange(tokens, device=device)[:, None] * base**-exponents
        self._cos, self._sin = turns.cos(), turns.sin()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

        def drawn(offset: float) -> Tensor:
            size = shape.kv_heads, tokens, shape.head_dim
            draw = torch.randn(size, generator=generator, device=device)
            channels = torch.randn(2, size[0], 1, size[2], generator=generator, device=device)
            return draw.mul_((0.5 * channels[0]).exp()).add_(offset * channels[1])

        for _ in range(shape.layers):
            keys = rotate(drawn(2.0), self._cos, self._sin, "half", self._dim)
            self.keys.append(keys.to(dtype))
            self.values.append(drawn(0.1).to(dtype))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        held = [*self.keys, *self.values]
        return sum(tensor.nbytes // tensor.shape[1] for tensor in held)

    def angles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, P]`` of the rotation that its keys have."""
        return self._cos[start:stop], self._sin[start:stop]


def _identity(
    layers: tuple[LayerGeometry, ...],
    dtype: DType,
    *,
    architecture: str = "RandomWeights",
    config_digest: str = DIGEST,
    rope: dict[str, Any] | None = None,
    max_positions: int = 1 << 20,
) -> ModelIdentity:
    return ModelIdentity(
        architecture=architecture,
        config_digest=config_digest,
        weights_digest=DIGEST,
        dtype=dtype,
        vocabulary_digest=DIGEST,
        template_digest=DIGEST,
        rope=rope or {},
        layers=layers,
        max_positions=max_positions,
    )
