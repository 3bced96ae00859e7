"""A short forward that watches a model rotate its keys.

Hooks record, for each layer, what goes into the rotation (the output of the key norm, of the key
projection or of a fused projection), what comes out of it (the cached key), and which tables the
attention layer was handed. ``rope_rules.py`` then finds the rule that leads from one to the other.

Axes: H KV heads, T tokens, D head dim, W table width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from cachelink_core.errors import UnsupportedModel
from cachelink_core.kv.rope_config import text_config
from cachelink_core.kv.rope_tables import POSITIONS, RotaryCall

PROBE_TOKENS: Final = 16
"""Enough positions that no wrong rule fits by chance, few enough to cost nothing at load."""

MODEL_FAILURES: Final = (
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""What a model raises that does not understand a plain cache of keys and values. Not RuntimeError:
that is how a device reports that its memory is used up."""

KEY_NORMS: Final = frozenset({"k_norm", "key_norm", "k_layernorm", "key_layernorm"})
KEY_PROJECTIONS: Final = frozenset({"k_proj", "key_proj", "wk"})
FUSED_PROJECTIONS: Final = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"})
KEY_MODULES: Final = KEY_NORMS | KEY_PROJECTIONS | FUSED_PROJECTIONS


@dataclass(slots=True)
class ProbedCall:
    """One call of a rotary module during the probe: how, and the tables that came back."""

    call: RotaryCall
    cos: Tensor
    sin: Tensor


@dataclass(slots=True)
class LayerEvidence:
    """What one layer did during the probe.

    Attributes:
        keys: ``[H, T, D]`` as cached.
        projections: outputs of the key or fused projections, in any shape.
        norms: inputs and outputs of the key norms, in any shape.
        calls: the rotary calls whose tables the layer may have used.
    """

    keys: Tensor
    projections: list[Tensor]
    norms: list[tuple[Tensor, Tensor]]
    calls: list[ProbedCall]


@dataclass(slots=True)
class _Recorder:
    """Filled by the hooks."""

    projections: dict[int, list[Tensor]] = field(default_factory=dict)
    norms: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    handed: dict[int, list[Tensor]] = field(default_factory=dict)
    calls: list[ProbedCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@torch.no_grad()
def probe(model: PreTrainedModel, positions: Tensor | None = None) -> list[LayerEvidence]:
    """Runs the probe.

    The positions are spread over the model's whole window, not 0 to 15: near position 0 the slow
    pairs hardly turn, and a rule that is wrong for them only would pass.

    Args:
        model: loaded, in any dtype.
        positions: ``[T]`` to run at instead, strictly increasing.

    Raises:
        UnsupportedModel: the model has no layers with a key projection, its rotary tables are not
            plain cos and sin, its cache is not keys and values per head, or it does not run with
            a plain cache.
    """
    decoder = model.get_decoder()
    config = text_config(model)
    device = next(decoder.parameters()).device
    if positions is None:
        # Only models without rotary tables have no such field; any positions do for them.
        positions = probe_positions(getattr(config, "max_position_embeddings", PROBE_TOKENS))
    positions = positions.to(device)
    ids = (7 + 13 * torch.arange(positions.shape[0], device=device)) % config.vocab_size
    cache = DynamicCache()
    recorder = _Recorder()
    try:
        with _hooks(decoder, recorder, positions):
            _forward(decoder, ids.unsqueeze(0), positions.unsqueeze(0), cache)
    except MODEL_FAILURES as error:
        raise UnsupportedModel(
            f"{config.model_type}: the probe forward failed: {type(error).__name__}: {error}"
        ) from error
    if recorder.problems:
        raise UnsupportedModel(f"{config.model_type}: {recorder.problems[0]}")
    return _evidence(config, recorder, cache)


def probe_positions(window: int) -> Tensor:
    """``[T]`` strictly increasing positions from 0, evenly spaced in the logarithm up to the end."""
    last = max(window, PROBE_TOKENS) - 1
    spread = [round((last + 1) ** (i / (PROBE_TOKENS - 1))) - 1 for i in range(PROBE_TOKENS)]
    positions: list[int] = []
    for value in spread:
        positions.append(max(value, positions[-1] + 1 if positions else 0))
    return torch.tensor(positions)


def _forward(decoder: nn.Module, ids: Tensor, positions: Tensor, cache: DynamicCache) -> None:
    accepted = inspect.signature(decoder.forward).parameters
    wanted: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
        "use_cache": True,
        # Renamed in transformers 5.2x; the old name warns in the new version.
        "cache" if "cache" in accepted else "past_key_values": cache,
    }
    decoder(**{name: value for name, value in wanted.items() if name in accepted})


def _evidence(config: Any, recorder: _Recorder, cache: DynamicCache) -> list[LayerEvidence]:
    kind, count = config.model_type, config.num_hidden_layers
    cached = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if len(recorder.projections) != count or len(cached) != count:
        raise UnsupportedModel(
            f"{kind}: num_hidden_layers={count}, but {len(recorder.projections)} layers have a key "
            f"projection and {len(cached)} layers cached keys"
        )
    found = []
    for index, layer in enumerate(cached):
        if layer.keys.shape != layer.values.shape or layer.keys.dim() != 4:
            raise UnsupportedModel(
                f"{kind}: layer {index} caches keys {tuple(layer.keys.shape)} and values "
                f"{tuple(layer.values.shape)}; both must be [batch, heads, tokens, head dim]"
            )
        handed = recorder.handed.get(index, [])
        own = [call for call in recorder.calls if any(call.cos is tensor for tensor in handed)]
        # Tables that were moved or sliced on the way are not recognized: then all are tried.
        found.append(
            LayerEvidence(
                layer.keys[0],
                recorder.projections[index],
                recorder.norms.get(index, []),
                own or recorder.calls,
            )
        )
    return found


@contextmanager
def _hooks(decoder: nn.Module, recorder: _Recorder, positions: Tensor) -> Iterator[None]:
    """Registers every hook, and removes all of them at the end."""
    with ExitStack() as stack:
        for path, module in decoder.named_modules():
            if "rotary" in type(module).__name__.lower():
                hook = _rotary_hook(recorder, path, positions)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            index = getattr(module, "layer_idx", None)
            if index is None:
                continue
            sources = [(name, child) for name, child in module.named_modules() if _is_key(name)]
            if sources and not any(_is_attention(child) for child in module.children()):
                before = _attention_hook(recorder, index)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                for name, child in sources:
                    after = _source_hook(recorder, index, name)
                    stack.callback(child.register_forward_hook(after).remove)
        yield


def _is_key(path: str) -> bool:
    return path.rpartition(".")[2] in KEY_MODULES


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and any(_is_key(name) for name, _ in module.named_modules())


def _source_hook(recorder: _Recorder, index: int, name: str) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if name.rpartition(".")[2] in KEY_NORMS:
            recorder.norms.setdefault(index, []).append((args[0], output))
        else:
            recorder.projections.setdefault(index, []).append(output)

    return hook


def _attention_hook(recorder: _Recorder, index: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.handed[index] = list(_tensors([*args, *kwargs.values()]))

    return hook


def _rotary_hook(recorder: _Recorder, path: str, positions: Tensor) -> Any:
    attribute = path.rpartition(".")[2]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        problem = _unusable(output, positions.shape[0])
        open_args = tuple(_opened(value, positions) for value in args)
        open_kwargs = {name: _opened(value, positions) for name, value in kwargs.items()}
        opened = [*open_args, *open_kwargs.values()]
        if not problem and not any(value is POSITIONS for value in opened):
            problem = "is not called with the position ids of the forward"
        if problem:
            recorder.problems.append(f"rotary module {path} {problem}")
            return
        plain = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        name = attribute + (f"[{','.join(plain)}]" if plain else "")
        call = RotaryCall(name, module, open_args, open_kwargs)
        recorder.calls.append(ProbedCall(call, *output))

    return hook


def _unusable(output: Any, tokens: int) -> str:
    """Why a rotary module's output is not a pair of plain tables; empty if it is."""
    if isinstance(output, Tensor) and output.is_complex():
        return "returns a complex-valued table, which is not supported"
    if not isinstance(output, tuple) or len(output) != 2:
        return f"returns {type(output).__name__}, not a pair of cos and sin tables"
    shapes = [tuple(table.shape) for table in output]
    if any(len(shape) != 3 or shape[:2] != (1, tokens) for shape in shapes):
        return f"returns tables of shape {shapes[0]}, not [1, {tokens}, width]"
    return ""


def _opened(value: Any, positions: Tensor) -> Any:
    """Position ids become ``POSITIONS``, hidden states an empty tensor of their dtype."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point() and torch.equal(value.reshape(-1), positions):
        return POSITIONS
    # Rotary modules read dtype and device of the hidden states only; keeping them would hold
    # memory for as long as the model lives.
    return value.new_empty((1, 1, value.shape[-1])) if value.is_floating_point() else value


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
