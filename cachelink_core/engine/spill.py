"""A cache on disk: one safetensors file that says what it holds and proves it.

Tensors ``layer.0.K``, ``layer.0.V``, … are ``[H, T, D]`` as the model caches them, each from the
first position that its layer holds. ``manifest.header`` and ``manifest.seal`` hold the bytes of the
handoff's manifest. The file's metadata has a BLAKE3 digest for each tensor. Nothing in it can run.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachelink_core.atomic_write import new_file
from cachelink_core.codec_spec import DType, TensorKind
from cachelink_core.errors import ChecksumMismatch, CorruptChunk, ManifestError
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.manifest import Header, decode_header

FORMAT: Final = "cachelink-cache-1"
"""Raised when the file's layout changes."""

_HEADER: Final = "manifest.header"
_SEAL: Final = "manifest.seal"
_STORED_DTYPES: Final[dict[DType, str]] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""By the names of safetensors."""

_KINDS: Final[tuple[TensorKind, TensorKind]] = ("K", "V")


@dataclass(frozen=True, slots=True)
class SpilledTensor:
    """One tensor of a file.

    Attributes:
        name: in the file.
        dtype: by torch's name.
        shape: ``[H, T, D]``, or ``[bytes]`` of the manifest's parts.
        nbytes: of its data.
        digest: BLAKE3-256, as the file states it and as it was found.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Spilled:
    """A cache read from disk.

    Attributes:
        header: of its manifest.
        seal: bytes of its seal, empty if it never had one.
        cache: the tensors, with room behind them.
    """

    header: Header
    seal: bytes
    cache: PrefixCache


def save_cache(path: Path, header: bytes, cache: PrefixCache, seal: bytes = b"") -> None:
    """Writes a cache; an existing file is replaced only by a whole one.

    Args:
        path: of the file.
        header: bytes of the manifest's header; its tokens are those of the cache.
        cache: its first ``header.tokens`` tokens are written.
        seal: bytes of the seal, if there is one.

    Raises:
        ManifestError: the header does not describe this cache.
    """
    described = decode_header(header)
    _check_describes(described, cache)
    tensors = {_HEADER: _as_tensor(header)}
    if seal:
        tensors[_SEAL] = _as_tensor(seal)
    for layer in range(len(cache.layers)):
        first = cache.first_token(layer)
        for kind in _KINDS:
            held = cache.tensor(layer, kind, first, described.tokens)
            tensors[_name(layer, kind)] = held.contiguous().cpu()
    metadata = {"format": FORMAT} | {name: _digest(tensor) for name, tensor in tensors.items()}
    with new_file(path) as aside:
        save_file(tensors, aside, metadata)


def load_cache(path: Path, *, headroom: int, device: torch.device | str = "cpu") -> Spilled:
    """Reads a cache and checks every byte of it.

    Args:
        path: of the file.
        headroom: tokens of room behind the prefix.
        device: where the cache shall lie.

    Raises:
        CorruptChunk: the file is cut short, or does not hold what its header says.
        ChecksumMismatch: a tensor's bytes are not those that were written; it is named.
        ManifestError: the header is malformed.
        OSError: the file cannot be read.
    """
    with _opened(path) as reader:
        header = decode_header(_manifest_bytes(reader, _HEADER))
        seal = _manifest_bytes(reader, _SEAL) if _SEAL in reader.keys() else b""  # noqa: SIM118
        whole = _check_shapes(reader, header)
        identity = header.identity
        cache = PrefixCache.allocate(
            identity.layers, identity.dtype, header.tokens, headroom, device, whole=whole
        )
        for layer in range(len(identity.layers)):
            for kind in _KINDS:
                out = cache.tensor(layer, kind, cache.first_token(layer), header.tokens)
                out.copy_(_read(reader, _name(layer, kind)))
    cache.set_length(header.tokens)
    return Spilled(header, seal, cache)


def verify_cache(path: Path) -> tuple[Header, tuple[SpilledTensor, ...]]:
    """Checks a file as ``load_cache`` does, without keeping the cache.

    Raises:
        CorruptChunk: the file is cut short, or does not hold what its header says.
        ChecksumMismatch: a tensor's bytes are not those that were written; it is named.
        ManifestError: the header is malformed.
        OSError: the file cannot be read.
    """
    with _opened(path) as reader:
        header = decode_header(_manifest_bytes(reader, _HEADER))
        _check_shapes(reader, header)
        found = [_listed(name, _read(reader, name)) for name in sorted(reader.keys())]
    return header, tuple(found)


def read_header(path: Path) -> Header:
    """The manifest header of a file, without its tensors.

    Raises:
        CorruptChunk: not such a file.
        ChecksumMismatch: the header's bytes are not those that were written.
        ManifestError: the header is malformed.
        OSError: the file cannot be read.
    """
    with _opened(path) as reader:
        return decode_header(_manifest_bytes(reader, _HEADER))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    path.stat()  # a missing file is an OSError that names it
    try:
        with safe_open(path, framework="pt") as reader:
            _check_contents(path, reader)
            yield reader
    except SafetensorError as error:
        raise CorruptChunk(f"{path}: {error}") from error


def _check_contents(path: Path, reader: Any) -> None:
    stated = dict(reader.metadata() or {})
    found = stated.pop("format", None)
    if found != FORMAT:
        raise CorruptChunk(f"{path}: format is {found!r}; this version reads {FORMAT!r}")
    odd = sorted(stated.keys() ^ set(reader.keys()))
    if odd:
        raise CorruptChunk(f"{path}: tensor {odd[0]!r} is missing, or has no digest")


def _read(reader: Any, name: str) -> Tensor:
    """One tensor, its digest checked."""
    _check_there(reader, name)
    tensor: Tensor = reader.get_tensor(name)
    stated, found = reader.metadata().get(name), _digest(tensor)
    if stated != found:
        raise ChecksumMismatch(f"tensor {name!r}: digest is {found}, written was {stated}")
    return tensor


def _manifest_bytes(reader: Any, name: str) -> bytes:
    return bytes(_read(reader, name).numpy().data)


def _check_shapes(reader: Any, header: Header) -> bool:
    """Holds dtypes and shapes against the header, before anything of that size is allocated.

    Returns:
        Whether sliding layers were written whole.
    """
    identity, tokens = header.identity, header.tokens
    starts = [0] * len(identity.layers), [layer.first_token(tokens) for layer in identity.layers]
    found = [_dtype_and_shape(reader, _name(layer, "K"))[1] for layer in range(len(starts[0]))]
    whole = [shape[1:2] for shape in found] == [[tokens]] * len(found)
    for layer, geometry in enumerate(identity.layers):
        first = starts[0 if whole else 1][layer]
        expected = (
            _STORED_DTYPES[identity.dtype],
            [geometry.kv_heads, tokens - first, geometry.head_dim],
        )
        for kind in _KINDS:
            name = _name(layer, kind)
            stored = _dtype_and_shape(reader, name)
            if stored != expected:
                raise CorruptChunk(f"tensor {name!r} is {stored}; its header says {expected}")
    return whole


def _check_there(reader: Any, name: str) -> None:
    if name not in reader.keys():  # noqa: SIM118 - no mapping
        raise CorruptChunk(f"tensor {name!r} is missing")


def _dtype_and_shape(reader: Any, name: str) -> tuple[str, list[int]]:
    _check_there(reader, name)
    stored = reader.get_slice(name)
    return stored.get_dtype(), list(stored.get_shape())


def _check_describes(header: Header, cache: PrefixCache) -> None:
    if header.identity.layers != cache.layers or header.identity.dtype != cache.dtype:
        raise ManifestError("identity: layers or dtype are not those of the cache")
    if header.tokens > cache.length:
        raise ManifestError(f"token_ids has {header.tokens}; the cache holds {cache.length} tokens")
    firsts = [cache.first_token(layer) for layer in range(len(cache.layers))]
    windows = [layer.first_token(header.tokens) for layer in cache.layers]
    if any(firsts) and firsts != windows:
        raise ManifestError(
            f"the cache holds positions from {firsts}; "
            f"a prefix of {header.tokens} tokens is written from 0 or from {windows}"
        )


def _listed(name: str, tensor: Tensor) -> SpilledTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SpilledTensor(name, dtype, tuple(tensor.shape), tensor.nbytes, _digest(tensor))


def _name(layer: int, kind: TensorKind) -> str:
    return f"layer.{layer}.{kind}"


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return blake3(flat.numpy().data, max_threads=blake3.AUTO).hexdigest()


__all__ = [
    "FORMAT",
    "Spilled",
    "SpilledTensor",
    "load_cache",
    "read_header",
    "save_cache",
    "verify_cache",
]
