"""A training in the middle as one safetensors file: tensors by path, the rest as JSON in its header.

Nothing in the file can run, unlike what ``torch.save`` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cachelink_core.atomic_write import new_file

_TENSOR = "tensor"
_MAP = "map"
_LIST = "list"


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes nested dicts and lists of tensors and plain values; replaces the file at once.

    Args:
        path: of the file.
        state: keys are strings or integers.
    """
    tensors: dict[str, torch.Tensor] = {}
    skeleton = json.dumps(_take_apart(state, "state", tensors))
    with new_file(path) as aside:
        save_file(tensors, aside, {"skeleton": skeleton})


def load_state(path: Path) -> dict[str, Any]:
    """The inverse of ``save_state``."""
    with safe_open(path, framework="pt") as reader:
        skeleton = json.loads(reader.metadata()["skeleton"])
        state: dict[str, Any] = _put_together(skeleton, reader)
    return state


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The same tree in which a tensor is its name, and a dict a list: JSON has no integer keys."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().clone().contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        pairs = [[key, _take_apart(v, f"{path}.{key}", tensors)] for key, v in value.items()]
        return {_MAP: pairs}
    if isinstance(value, list | tuple):
        return {_LIST: [_take_apart(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]}
    return value


def _put_together(value: Any, reader: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return reader.get_tensor(value[_TENSOR])
    if _MAP in value:
        return {key: _put_together(v, reader) for key, v in value[_MAP]}
    return [_put_together(v, reader) for v in value[_LIST]]
