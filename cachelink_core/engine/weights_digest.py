"""Digests of weights: of loaded tensors, never of files, and kept on disk between starts.

Two checkpoints of the same tensors (a GGUF and the safetensors written from it, one file or ten
shards) have one digest. Hashing takes a second for each gigabyte or two, so a digest is remembered
under the paths, sizes and modification times of the files it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from torch import Tensor, nn

from cachelink_core.atomic_write import new_file
from cachelink_core.identity import canonical_bytes


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; tied ones once, under their first sorted name."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        found[name] = tensor
    return found


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE3-256 over the sorted (name, dtype, shape, digest of the little-endian bytes)."""
    rows = [
        [name, str(tensor.dtype), list(tensor.shape), _bytes_digest(tensor)]
        for name, tensor in sorted(tensors.items())
    ]
    return blake3(canonical_bytes(rows)).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Digest of the base model's weights: an adapter's tensors and wrappers left out."""
    return tensors_digest(
        {base_name(n): t for n, t in named_tensors(model).items() if not is_adapter_tensor(n)}
    )


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor belongs to a PEFT adapter, by PEFT's naming."""
    return any(part.startswith(("lora_", "ia3_", "vera_", "oft_")) for part in name.split("."))


def base_name(name: str) -> str:
    """A tensor's name before PEFT wrapped its module."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _bytes_digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return blake3(flat.numpy().data, max_threads=blake3.AUTO).digest()


class _Remembered(msgspec.Struct):
    source: list[list[str | int]]
    digest: str


class DigestCache:
    """Digests on disk, each under the state of the files it was computed from."""

    def __init__(self, folder: Path) -> None:
        """Keeps its files in ``folder``, which is made when the first digest is written."""
        self._folder = folder

    def get(self, kind: str, files: Iterable[Path]) -> str | None:
        """The digest of ``kind`` for these files as they are now, if it was put before."""
        source = _source(kind, files)
        try:
            known = msgspec.json.decode(self._path(source).read_bytes(), type=_Remembered)
        except (OSError, msgspec.DecodeError):
            return None
        return known.digest if known.source == source else None

    def put(self, kind: str, files: Iterable[Path], digest: str) -> None:
        """Remembers a digest.

        Args:
            kind: what was digested and how: another dtype of the same files is another kind.
            files: that the digest follows from.
            digest: in hexadecimal.
        """
        source = _source(kind, files)
        with new_file(self._path(source)) as path:
            path.write_bytes(msgspec.json.encode(_Remembered(source, digest)))

    def _path(self, source: Sequence[object]) -> Path:
        return self._folder / f"{blake3(canonical_bytes(source)).hexdigest()[:32]}.json"


def file_digest(path: Path, cache: DigestCache) -> str:
    """BLAKE3-256 of a file's bytes, in hexadecimal."""
    known = cache.get("file", [path])
    if known is not None:
        return known
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    cache.put("file", [path], digest)
    return digest


def _source(kind: str, files: Iterable[Path]) -> list[list[str | int]]:
    rows: list[list[str | int]] = [[kind]]
    for path in sorted(files):
        state = path.stat()
        rows.append([str(path.resolve()), state.st_size, state.st_mtime_ns])
    return rows
