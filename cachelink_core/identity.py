"""Who a model is: everything that must agree before its KV cache may be used by another node.

Pure data. ``engine/identify.py`` builds identities from real models and tokenizers.
Tokens are identity; text never is: the same words may become other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3

from cachelink_core import limits
from cachelink_core.codec_spec import ITEM_BYTES, DType

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$(?!\\n)")]
"""BLAKE3-256 in hexadecimal. In Python ``$`` alone would also match before a last newline."""

AttentionKind = Literal["full", "sliding"]
KeyLayout = Literal["identity", "half", "half_narrow_tables", "interleaved"]


class LayerGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's cache.

    Attributes:
        kv_heads: H.
        head_dim: D.
        attention: ``full``, or ``sliding`` over the last ``window`` tokens.
        window: W for a sliding layer, 0 for a full one.
        key_layout: how keys are rotated, as verified by a probe (``kv/rope.py``).
        rotary_dim: how many of the D key channels are rotated.
    """

    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_KV_HEADS)]
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_HEAD_DIM)]
    attention: AttentionKind = "full"
    window: Annotated[int, msgspec.Meta(ge=0)] = 0
    key_layout: KeyLayout = "half"
    rotary_dim: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_HEAD_DIM)] = 0

    def first_token(self, tokens: int) -> int:
        """First position that a cache of ``tokens`` tokens still holds in this layer."""
        if self.attention == "full":
            return 0
        return max(0, tokens - self.window + 1)

    def token_bytes(self, dtype: DType) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * ITEM_BYTES[dtype]


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two nodes compare before a byte of cache moves.

    Attributes:
        architecture: the model class, for instance ``LlamaForCausalLM``.
        config_digest: over the config fields that shape the computation.
        weights_digest: over the loaded tensors, not the files: a GGUF and the safetensors written
            from it are one identity.
        dtype: of the cache.
        vocabulary_digest: vocabulary, merges and special tokens.
        template_digest: the chat template, or the digest of nothing.
        rope: every RoPE parameter, by layer type where the model has several.
        layers: one geometry per layer.
        max_positions: the model's window in tokens.
        adapter_digest: a LoRA or other adapter, empty for none.
    """

    architecture: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    config_digest: Digest
    weights_digest: Digest
    dtype: DType
    vocabulary_digest: Digest
    template_digest: Digest
    rope: dict[str, Any]
    layers: Annotated[
        tuple[LayerGeometry, ...], msgspec.Meta(min_length=1, max_length=limits.MAX_LAYERS)
    ]
    max_positions: Annotated[int, msgspec.Meta(ge=1)]
    adapter_digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$(?!\\n)")] = ""

    def token_bytes(self) -> int:
        """Bytes that one token takes in a cache in which no layer slides."""
        return sum(layer.token_bytes(self.dtype) for layer in self.layers)

    def digest(self) -> str:
        """BLAKE3-256 of the canonical bytes, in hexadecimal."""
        return blake3(canonical_bytes(self)).hexdigest()


class FieldDiff(msgspec.Struct, frozen=True):
    """One differing field with both values, as text."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs}"


def canonical_bytes(value: object) -> bytes:
    """Encodes as msgpack, with struct fields in declaration order and mapping keys sorted."""
    return msgspec.msgpack.encode(value, order="deterministic")


def diff(ours: ModelIdentity, theirs: ModelIdentity) -> tuple[FieldDiff, ...]:
    """Every field in which two identities differ; empty if they are the same model."""
    return tuple(_diff("", msgspec.to_builtins(ours), msgspec.to_builtins(theirs)))


def _diff(path: str, ours: Any, theirs: Any) -> Iterator[FieldDiff]:
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            name = f"{path}.{key}" if path else key
            yield from _diff(name, ours.get(key, "absent"), theirs.get(key, "absent"))
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield FieldDiff(f"{path}.count", str(len(ours)), str(len(theirs)))
            return
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            yield from _diff(f"{path}[{index}]", left, right)
    else:
        yield FieldDiff(path, str(ours), str(theirs))
