"""A mapper on disk: a folder with ``mapper.safetensors`` and ``card.json``. Nothing in it can run.

The card has a digest of each tensor and of itself, so a changed byte is found and named. Both files
are written aside and renamed, the tensors first: a card never describes tensors that are not there
yet, and a mix of an old and a new file does not load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachelink_core.atomic_write import new_file
from cachelink_core.codecs.native import TORCH_DTYPES
from cachelink_core.errors import ChecksumMismatch, CorruptChunk, ManifestError, ModelUnavailable
from cachelink_core.transport.card import Card, decode_card, encode_card
from cachelink_core.transport.layer_map import LayerMap
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.precision import precision_for
from cachelink_core.transport.state import MapperState, check_shapes, stored_dtype

TENSORS_FILE: Final = "mapper.safetensors"
CARD_FILE: Final = "card.json"


def save_mapper(folder: Path, state: MapperState) -> Card:
    """Writes an artifact; other files of the folder stay.

    Args:
        folder: made if it is not there.
        state: what was learned; its weights are rounded to the card's ``weights_dtype``.

    Returns:
        The card as written, with all digests.

    Raises:
        ManifestError: the tensors are not those of the card.
    """
    state.check()
    weights = TORCH_DTYPES[state.card.weights_dtype]
    tensors = {
        name: tensor.detach().to("cpu", stored_dtype(name, weights)).contiguous()
        for name, tensor in state.tensors.items()
    }
    card = msgspec.structs.replace(
        state.card, tensors={name: _digest(t) for name, t in sorted(tensors.items())}
    )
    card = msgspec.structs.replace(card, digest=card.compute_digest())
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(folder / CARD_FILE) as card_aside, new_file(folder / TENSORS_FILE) as aside:
        save_file(tensors, aside)
        card_aside.write_bytes(encode_card(card))
    return card


def read_card(folder: Path) -> Card:
    """The card alone, its own digest checked.

    Raises:
        ModelUnavailable: no such folder, or no card in it.
        ManifestError: the card is malformed or was changed.
    """
    try:
        data = (folder / CARD_FILE).read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"mapper {str(folder)!r} has no {CARD_FILE}") from error
    card = decode_card(data)
    if not card.digest:
        raise ManifestError(f"{folder / CARD_FILE}: digest is empty")
    return card


def verify_mapper(folder: Path) -> Card:
    """Checks every byte of an artifact.

    Raises:
        ChecksumMismatch: a tensor's bytes are not those that were written; it is named.
        CorruptChunk: the tensor file is cut short.
        ManifestError: the card is malformed or changed, or tensors are not those it lists.
        ModelUnavailable: no such artifact.
    """
    card = read_card(folder)
    with _opened(folder, card) as reader:
        for name in sorted(card.tensors):
            _read(reader, card, name)
    return card


def load_state(folder: Path) -> MapperState:
    """Reads what was learned, every byte checked; raises as ``verify_mapper``."""
    card = read_card(folder)
    with _opened(folder, card) as reader:
        return MapperState(card, {name: _read(reader, card, name) for name in card.tensors})


def load_mapper(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype) -> Mapper:
    """Reads and places a mapper layer by layer, every byte checked; raises as ``verify_mapper``.

    Args:
        folder: of the artifact.
        device: of the receiver.
        dtype: of the receiver's cache.
    """
    card = read_card(folder)
    where = torch.device(device)
    precision = precision_for(dtype, where)
    layers = []
    with _opened(folder, card) as reader:
        for index in range(len(card.layers)):
            names = [name for name in card.tensors if name.split(".")[1] == str(index)]
            tensors = {name: _read(reader, card, name) for name in names}
            layers.append(LayerMap(card, index, tensors, precision, where))
    return Mapper(card, layers, precision, where)


@contextmanager
def _opened(folder: Path, card: Card) -> Iterator[Any]:
    path = folder / TENSORS_FILE
    if not path.is_file():
        raise ModelUnavailable(f"mapper {str(folder)!r} has no {TENSORS_FILE}")
    try:
        with safe_open(path, framework="pt") as reader:
            names = list(reader.keys())
            odd = sorted(set(names) ^ card.tensors.keys())
            if odd:
                raise ManifestError(f"tensor {odd[0]!r} is in one of {TENSORS_FILE} and card only")
            check_shapes(card, {n: tuple(reader.get_slice(n).get_shape()) for n in names})
            yield reader
    except SafetensorError as error:
        raise CorruptChunk(f"{path}: {error}") from error


def _read(reader: Any, card: Card, name: str) -> Tensor:
    tensor: Tensor = reader.get_tensor(name)
    found = _digest(tensor)
    if found != card.tensors[name]:
        raise ChecksumMismatch(
            f"tensor {name!r}: digest is {found}, the card says {card.tensors[name]}"
        )
    return tensor


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    head = f"{tensor.dtype} {list(tensor.shape)}\0".encode()
    return blake3(head).update(flat.numpy().data).hexdigest()
