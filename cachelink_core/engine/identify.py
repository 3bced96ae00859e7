"""Builds a model's identity from the loaded model and tokenizer.

What has a field of its own in ``ModelIdentity`` is left out of the digests, so that a refusal names
that field and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from blake3 import blake3
from transformers import PreTrainedModel

from cachelink_core.codec_spec import DType
from cachelink_core.engine.weights_digest import (
    is_adapter_tensor,
    named_tensors,
    tensors_digest,
    weights_digest,
)
from cachelink_core.errors import UnsupportedModel
from cachelink_core.identity import ModelIdentity, canonical_bytes
from cachelink_core.kv.geometry import layer_geometry
from cachelink_core.kv.prefix_cache import TORCH_DTYPES
from cachelink_core.kv.rope import KeyRope

CONFIG_LEFT_OUT: Final[Mapping[str, str]] = {
    "_name_or_path": "where the files were",
    "_model_name_or_path": "where the files were",
    "_commit_hash": "hub revision: informational",
    "gguf_file": "where the files were",
    "transformers_version": "who wrote the file",
    "architectures": "identity.architecture is the class that was loaded",
    "dtype": "identity.dtype",
    "torch_dtype": "identity.dtype, by its old name",
    "attn_implementation": "a choice of kernel",
    "_attn_implementation": "a choice of kernel",
    "_attn_implementation_internal": "a choice of kernel",
    "experts_implementation": "a choice of kernel",
    "_experts_implementation": "a choice of kernel",
    "use_cache": "what a forward returns",
    "return_dict": "what a forward returns",
    "output_attentions": "what a forward returns",
    "output_hidden_states": "what a forward returns",
    "output_router_logits": "what a forward returns",
    "rope_parameters": "identity.rope",
    "rope_theta": "identity.rope, by its old name",
    "rope_scaling": "identity.rope, by its old name",
    "partial_rotary_factor": "identity.rope",
    "max_position_embeddings": "identity.max_positions",
    "bos_token_id": "how text is generated, not what a token means",
    "eos_token_id": "how text is generated",
    "pad_token_id": "how text is generated",
    "unk_token_id": "how text is generated",
    "sep_token_id": "how text is generated",
    "decoder_start_token_id": "how text is generated",
    "initializer_range": "training",
    "initializer_factor": "training",
    "attention_dropout": "training",
    "hidden_dropout": "training",
    "embd_pdrop": "training",
    "resid_pdrop": "training",
    "router_aux_loss_coef": "training",
    "gradient_checkpointing": "training",
    "pretraining_tp": "training",
    "chunk_size_feed_forward": "memory, not values",
    "id2label": "classification heads",
    "label2id": "classification heads",
    "problem_type": "classification heads",
    "finetuning_task": "classification heads",
    "task_specific_params": "classification heads",
}
"""Config fields that do not shape the computation, each with the reason why not."""

ADAPTER_LEFT_OUT: Final = frozenset({"base_model_name_or_path", "revision", "inference_mode"})
"""Of an adapter's configuration: where the base came from, and whether it was being trained."""


def identify(
    model: PreTrainedModel, tokenizer: Any, rope: KeyRope, *, weights: str | None = None
) -> ModelIdentity:
    """Who a loaded model is.

    Args:
        model: with its weights.
        tokenizer: a fast tokenizer of transformers.
        rope: the model's, verified.
        weights: the weights digest, if it is known already.

    Raises:
        UnsupportedModel: a dtype that no cache can have, a slow tokenizer, or no window length.
    """
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None)
    if not isinstance(window, int):
        raise UnsupportedModel(f"max_position_embeddings is {window!r}; the window must be known")
    return ModelIdentity(
        architecture=_architecture(model),
        config_digest=config_digest(model.config.to_dict()),
        weights_digest=weights or weights_digest(model),
        dtype=_dtype(model),
        vocabulary_digest=vocabulary_digest(tokenizer),
        template_digest=template_digest(tokenizer),
        rope=rope.parameters,
        layers=layer_geometry(model, rope),
        max_positions=window,
        adapter_digest=adapter_digest(model),
    )


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of the fields that shape the computation, by ``CONFIG_LEFT_OUT`` in nested ones too.

    Floats are rounded to float32 first: a GGUF states 1e-5 as 9.999999747378752e-06.
    """
    return blake3(canonical_bytes(_shaping(config))).hexdigest()


def vocabulary_digest(tokenizer: Any) -> str:
    """Digest of everything that decides which ids a text becomes.

    Model (vocabulary, merges, options), added tokens, normalizer and pre-tokenizer. Left out are
    truncation, padding and post-processor, which are never applied here, and the decoder, which
    turns ids back into text.

    Raises:
        UnsupportedModel: the tokenizer has no pipeline to read.
    """
    pipeline = msgspec.json.decode(fast_backend(tokenizer).to_str())
    parts = {
        name: pipeline.get(name)
        for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")
    }
    merges = parts["model"].get("merges")
    if merges and isinstance(merges[0], str):
        parts["model"]["merges"] = [merge.split(" ", 1) for merge in merges]
    return blake3(canonical_bytes(parts)).hexdigest()


def fast_backend(tokenizer: Any) -> Any:
    """The ``tokenizers.Tokenizer`` inside a tokenizer of transformers.

    Raises:
        UnsupportedModel: there is none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(
            f"tokenizer {type(tokenizer).__name__} is not a fast one: its rules cannot be compared"
        )
    return backend


def template_digest(tokenizer: Any) -> str:
    """Digest of the chat template, or of nothing if there is none."""
    template = tokenizer.chat_template
    if not template:
        return blake3(b"").hexdigest()
    return blake3(canonical_bytes(template)).hexdigest()


def adapter_digest(model: PreTrainedModel) -> str:
    """Digest of a PEFT adapter's configuration and tensors; empty without one.

    Raises:
        UnsupportedModel: an adapter of a kind whose tensors cannot be told from the model's.
    """
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return ""
    tensors = {n: t for n, t in named_tensors(model).items() if is_adapter_tensor(n)}
    if not tensors:
        raise UnsupportedModel(f"adapters {sorted(adapters)} have no tensors that are known here")
    parts = {
        "adapters": {name: _adapter_config(config) for name, config in adapters.items()},
        "active": _active_adapters(model),
        "tensors": tensors_digest(tensors),
    }
    return blake3(canonical_bytes(parts)).hexdigest()


def _adapter_config(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = _plain(vars(config))
    return {name: fields[name] for name in fields if name not in ADAPTER_LEFT_OUT}


def _active_adapters(model: PreTrainedModel) -> list[str]:
    """Names of the adapters that take part in a forward, read from the wrapped layers."""
    found: set[str] = set()
    for module in model.modules():
        if hasattr(module, "base_layer") and not getattr(module, "disable_adapters", False):
            active = getattr(module, "active_adapter", ())
            found |= {active} if isinstance(active, str) else set(active)
    return sorted(found)


def _architecture(model: PreTrainedModel) -> str:
    """The model's class; PEFT's wrapper is no architecture."""
    get_base = getattr(model, "get_base_model", None)
    return type(get_base() if get_base else model).__name__


def _dtype(model: PreTrainedModel) -> DType:
    for name, dtype in TORCH_DTYPES.items():
        if model.dtype == dtype:
            return name
    raise UnsupportedModel(f"dtype is {model.dtype}; a cache can be {', '.join(TORCH_DTYPES)}")


def _shaping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _shaping(item)
            for key, item in value.items()
            if key not in CONFIG_LEFT_OUT and item is not None
        }
    if isinstance(value, list | tuple):
        return [_shaping(item) for item in value]
    if isinstance(value, float):
        return _as_float32(value)
    return _plain(value)


def _as_float32(value: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return value
    return rounded


def _plain(value: Any) -> Any:
    """Values that msgpack has; sets sorted, anything else by its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
