"""From a model's name to an engine: hub name, local folder, GGUF file, or ``demo``.

Weights are read from safetensors only, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import platformdirs
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from cachelink_core.engine import bytes_only
from cachelink_core.engine.gguf_model import converted_folder, demo_gguf
from cachelink_core.engine.identify import identify
from cachelink_core.engine.tokens import HFTokens
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.engine.weights_digest import DigestCache, weights_digest
from cachelink_core.errors import ConfigError, ModelUnavailable
from cachelink_core.kv.prefix_cache import TORCH_DTYPES
from cachelink_core.kv.rope import KeyRope

DEMO: Final = "demo"
ATTENTION: Final = ("auto", "sdpa", "eager", "flash_attention_2")
"""Implementations that are tested here. The choice is no part of the identity: it changes bits of a
later forward, never what a cache means."""

_GENERIC_TOKENIZERS: Final = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})


def load_engine(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    max_positions: int | None = None,
    cache_dir: Path | None = None,
) -> TransformersEngine:
    """Loads a model with its tokenizer and identity.

    Args:
        name: ``demo``, a folder, a ``.gguf`` file, or a name on the hub.
        dtype: ``auto`` for the checkpoint's own (a GGUF is kept in bfloat16), or its name.
        device: ``auto`` for CUDA if there is any, else the CPU; or torch's name of one.
        attention: one of ``ATTENTION``; ``auto`` is flash attention on CUDA where it is installed
            and the dtype allows it, else torch's own, on a CPU without copies of shared heads.
        max_positions: a shorter window than the model's. It is part of the identity: two nodes that
            hand over caches to each other need the same.
        cache_dir: for converted GGUF files and digests; the user's cache folder by default.

    Raises:
        ConfigError: a wrong dtype, device, attention or window.
        ModelUnavailable: the model's files are not here and cannot be had.
        UnsupportedModel: its cache cannot be moved.
    """
    _check_choice("dtype", dtype, ("auto", *TORCH_DTYPES))
    _check_choice("attention", attention, ATTENTION)
    place = _device(device)
    folder = cache_dir or Path(platformdirs.user_cache_dir("cachelink"))
    with quiet_progress():
        source = _local_source(name, folder)
        model, tokenizer = _load_parts(name, source, dtype)
    model = model.to(place).eval().requires_grad_(False)
    used = _attention(attention, place, model)
    model.set_attn_implementation(used)
    rope = KeyRope.probe(model)
    # With an adapter the folder's files are not all that the weights came from.
    files = () if hasattr(model, "peft_config") else checkpoint_files(source)
    digest = _weights_digest(model, files, folder)
    identity = identify(model, tokenizer, rope, weights=digest)
    if max_positions is not None:
        if not 1 <= max_positions <= identity.max_positions:
            raise ConfigError(
                f"max_positions is {max_positions}; the model has {identity.max_positions}"
            )
        identity = msgspec.structs.replace(identity, max_positions=max_positions)
    eos = tokenizer.eos_token_id
    return TransformersEngine(
        model,
        HFTokens(tokenizer),
        identity,
        rope,
        attention="auto" if attention == "auto" else used,
        eos_ids=() if eos is None else (eos,),
    )


def checkpoint_files(source: str) -> tuple[Path, ...]:
    """The weight files behind a folder or a hub name; empty if they cannot be told."""
    folder = Path(source)
    if not folder.is_dir():
        config = transformers.utils.cached_file(source, "config.json", local_files_only=True)
        folder = Path(config).parent
    return tuple(sorted(folder.glob("*.safetensors")))


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a folder or a hub name, exactly as its files say.

    Where they name no class of its own but the generic one, ``tokenizer.json`` is the whole truth;
    transformers would rebuild it by the model's type, with other rules for splitting text.
    """
    generic = get_tokenizer_config(source).get("tokenizer_class") in _GENERIC_TOKENIZERS
    chosen: Any = PreTrainedTokenizerFast if generic else AutoTokenizer
    return chosen.from_pretrained(source, trust_remote_code=False)


def _check_choice(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{field} is {value!r}; known: {', '.join(known)}")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}: no such kind of device") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {name!r}; this machine has {count} CUDA devices")
    return device


def _attention(wanted: str, device: torch.device, model: PreTrainedModel) -> str:
    dtype = model.dtype
    if bytes_only.is_bytes_only(model.config):
        return bytes_only.ATTENTION  # part of what such a model is, not a choice of kernel
    flash = (
        device.type == "cuda"
        and dtype != torch.float32
        and transformers.utils.is_flash_attn_2_available()
    )
    if wanted == "auto":
        return "flash_attention_2" if flash else "sdpa"
    if wanted == "flash_attention_2" and not flash:
        raise ConfigError(
            f"attention is {wanted!r}, which needs CUDA, the package flash-attn and a 16-bit dtype; "
            f"here: device {device}, dtype {dtype}"
        )
    return wanted


def _local_source(name: str, cache_dir: Path) -> str:
    """What transformers loads: a folder, converted first if need be, or the hub name itself."""
    if name == DEMO:
        return str(converted_folder(demo_gguf(), cache_dir))
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelUnavailable(f"model {name!r}: no such file")
        return str(converted_folder(path, cache_dir))
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        raise ModelUnavailable(f"model {name!r}: no such folder")
    return name


def _load_parts(name: str, source: str, dtype: str) -> tuple[PreTrainedModel, Any]:
    chosen: Any = "auto" if dtype == "auto" else TORCH_DTYPES[dtype]  # type: ignore[index]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=chosen, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = load_tokenizer(source)
    except (OSError, ValueError, ImportError) as error:
        where = "" if Path(source).exists() else "; it is not a local folder either"
        first = str(error).strip().partition("\n")[0]
        raise ModelUnavailable(f"model {name!r} cannot be loaded: {first}{where}") from error
    return model, tokenizer


def _weights_digest(model: PreTrainedModel, files: tuple[Path, ...], cache_dir: Path) -> str:
    """The digest, from disk if the files are unchanged.

    The names of tensors after loading are up to transformers, so its version is part of the key.
    """
    cache = DigestCache(cache_dir / "digests")
    kind = f"weights {model.dtype} transformers {transformers.__version__}"
    digest = cache.get(kind, files) if files else None
    if digest is None:
        digest = weights_digest(model)
        if files:
            cache.put(kind, files, digest)
    return digest


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Turns off the progress bars of transformers: a daemon's error output is its log."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def set_threads(count: int) -> None:
    """Sets how many CPU threads one operation uses. Bit equality is claimed for equal counts only."""
    torch.set_num_threads(count)
