"""A cache on disk: one safetensors file that says what it holds and proves it.

Tensors ``layer.0.K``, ``layer.0.V``, … are ``[H, T, D]`` as the model caches them, each from the
first position that its layer holds. ``manifest.header`` and ``manifest.seal`` hold the bytes of the
handoff's manifest. The file's metadata has a BLAKE3 digest for each tensor. Nothing in it can run.
Both ways take memory for one tensor beside the cache, never for a second cache.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cachelink_core.atomic_write import new_file
from cachelink_core.codec_spec import DType, TensorKind
from cachelink_core.errors import ChecksumMismatch, CorruptChunk, ManifestError
from cachelink_core.identity import ModelIdentity
from cachelink_core.kv.prefix_cache import TORCH_DTYPES, PrefixCache
from cachelink_core.manifest import Header, decode_header

FORMAT: Final = "cachelink-cache-1"
"""Raised when the file's layout changes."""

_HEADER: Final = "manifest.header"
_SEAL: Final = "manifest.seal"
_STORED_DTYPES: Final[dict[DType, str]] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""By the names of safetensors."""

_KINDS: Final[tuple[TensorKind, TensorKind]] = ("K", "V")

_ALIGNMENT: Final = 8
"""Safetensors pads its table to this many bytes."""


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
    parts: dict[str, Callable[[], Tensor]] = {}
    for layer in range(len(cache.layers)):
        first = cache.first_token(layer)
        for kind in _KINDS:
            parts[_name(layer, kind)] = partial(cache.tensor, layer, kind, first, described.tokens)
    # Last, because odd lengths would move the tensors behind them off their alignment.
    parts[_HEADER] = partial(_as_tensor, header)
    if seal:
        parts[_SEAL] = partial(_as_tensor, seal)
    _write(path, parts)


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
        _fill(reader, header, cache, whole=whole)
    return Spilled(header, seal, cache)


def _shown(value: object) -> str:
    """A value in a message; what is long by its digest."""
    if isinstance(value, ModelIdentity):
        return value.digest()[:16]
    if isinstance(value, bytes):
        return f"{len(value) // 4} ids of digest {blake3(value).hexdigest()[:16]}"
    return str(value)


def restore_cache(path: Path, expected: Header, cache: PrefixCache) -> None:
    """Reads a file into a cache that is there, and checks every byte of it.

    Whatever goes wrong, the cache's length stays as it was: it may be filled in another way.

    Args:
        path: of the file.
        expected: a header with the identity, prefix and blocks that the file must have.
        cache: empty, with room for the prefix.

    Raises:
        CorruptChunk: the file is cut short, or holds something else than expected.
        ChecksumMismatch: a tensor's bytes are not those that were written; it is named.
        ManifestError: the header is malformed.
        OSError: the file cannot be read.
    """
    with _opened(path) as reader:
        header = decode_header(_manifest_bytes(reader, _HEADER))
        for field in ("identity", "token_ids", "block_tokens", "codec"):
            found, wanted = getattr(header, field), getattr(expected, field)
            if found != wanted:
                raise CorruptChunk(
                    f"{path}: its {field} is {_shown(found)}; wanted is {_shown(wanted)}"
                )
        whole = _check_shapes(reader, header)
        _fill(reader, header, cache, whole=whole)


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


def _write(path: Path, parts: dict[str, Callable[[], Tensor]]) -> None:
    """Writes a safetensors file tensor by tensor; the library would need all of them at once."""
    table: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
    offset = 0
    for name, part in parts.items():
        tensor = part()
        table["__metadata__"][name] = _digest(tensor)
        dtype = "U8" if tensor.dtype == torch.uint8 else _stored_dtype(tensor.dtype)
        stop = offset + tensor.nbytes
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    head = msgspec.json.encode(table)
    head += b" " * (-len(head) % _ALIGNMENT)
    with new_file(path) as aside, aside.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for part in parts.values():
            file.write(_raw(part()))


def _fill(reader: Any, header: Header, cache: PrefixCache, *, whole: bool) -> None:
    for layer, geometry in enumerate(header.identity.layers):
        first = 0 if whole else geometry.first_token(header.tokens)
        for kind in _KINDS:
            out = cache.tensor(layer, kind, first, header.tokens)
            out.copy_(_read(reader, _name(layer, kind)))
    cache.set_length(header.tokens)


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


def _stored_dtype(dtype: torch.dtype) -> str:
    names = {TORCH_DTYPES[name]: stored for name, stored in _STORED_DTYPES.items()}
    return names[dtype]


def _digest(tensor: Tensor) -> str:
    return blake3(_raw(tensor), max_threads=blake3.AUTO).hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes in order; a copy of it alone where it is not contiguous, or on a GPU."""
    flat = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


__all__ = [
    "FORMAT",
    "Spilled",
    "SpilledTensor",
    "load_cache",
    "read_header",
    "restore_cache",
    "save_cache",
    "verify_cache",
]
