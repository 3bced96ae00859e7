"""Compiles the codec kernels that one side of a handoff needs, before the node is ready.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, Literal

import torch

from cachelink_core import limits
from cachelink_core.codec_spec import CODECS, CodecSpec
from cachelink_core.codecs.compiled import CompiledKernels, missing_compiler
from cachelink_core.codecs.int4 import Int4Codec
from cachelink_core.codecs.int8 import Int8Codec
from cachelink_core.engine.base import Engine
from cachelink_core.layout import plan_runs
from cachelink_core.logs import logger

Backend = Literal["auto", "eager", "compiled"]
Side = Literal["sender", "receiver"]

_log = logger(__name__)

TOPS: Final = {"int4": Int4Codec.top, "int8": Int8Codec.top}
_Shape = tuple[int, int, int, int]
"""First layer of that shape, H, T, D."""


def compile_codecs(
    engine: Engine,
    backend: Backend,
    sides: Sequence[Side],
    *,
    codecs: tuple[str, ...] = ("int4", "int8"),
    block_tokens: int = limits.DEFAULT_BLOCK_TOKENS,
) -> float:
    """Gives the engine compiled kernels, if it is to have some; it works without them as well.

    Args:
        engine: with its model loaded; no handoff may be under way.
        backend: ``eager`` compiles nothing. ``auto`` compiles for a CUDA device: on a CPU the
            prefill is slower than the codecs by far, and the start would take seconds longer.
        sides: which this node is on: a sender encodes, a receiver decodes.
        codecs: ids of quantizing codecs.
        block_tokens: of the blocks to expect; others run plain.

    Returns:
        Seconds that it took; 0 if nothing was compiled.
    """
    device = engine.device
    if backend == "eager" or (backend == "auto" and device.type != "cuda"):
        return 0.0
    if missing := missing_compiler(device):
        _log.warning("codecs_stay_eager", reason=missing)
        return 0.0
    kernels = CompiledKernels()
    try:
        for name, side in product(codecs, sides):
            for shape in _shapes(engine, CODECS[name], block_tokens):
                _compile(engine, kernels, CODECS[name], shape, encode=side == "sender")
    except Exception as error:  # noqa: BLE001 - a compiler fails in its own ways; the plain path works
        _log.warning("codecs_stay_eager", reason=f"{type(error).__name__}: {error}"[:500])
        return kernels.compile_s
    engine.kernels = kernels
    _log.info("codecs_compiled", kernels=len(kernels), seconds=round(kernels.compile_s, 3))
    return kernels.compile_s


def _shapes(engine: Engine, spec: CodecSpec, block_tokens: int) -> Iterator[_Shape]:
    """Every slice of a full block that has full groups only, once each."""
    identity = engine.identity
    seen: set[tuple[int, ...]] = set()
    for run in plan_runs(identity.layers, identity.dtype, block_tokens):
        for tensor in range(run.first, run.first + run.count):
            layer = tensor // 2
            geometry = identity.layers[layer]
            tokens = run.token_hi - run.token_lo
            angles = engine.half_angles(layer, 0, 1, inverse=False)
            pairs = 0 if angles is None else angles[0].shape[1]
            shape = geometry.kv_heads, tokens, geometry.head_dim
            if tokens % spec.key_group_tokens == 0 and (*shape, pairs) not in seen:
                seen.add((*shape, pairs))
                yield layer, *shape


def _compile(
    engine: Engine, kernels: CompiledKernels, spec: CodecSpec, shape: _Shape, *, encode: bool
) -> None:
    layer, *dims = shape
    rows = torch.randn(dims, generator=torch.Generator().manual_seed(0))
    values = rows.to(engine.device, engine.torch_dtype)
    top, group = TOPS[spec.id], spec.key_group_tokens
    kernels.compile_values(values, top, spec.value_group_channels, encode=encode)
    # A device turns keys in steps of its own, since what arrives is decoded from there.
    on_cpu = engine.device.type == "cpu"
    angles = engine.half_angles(layer, 0, dims[1], inverse=encode) if on_cpu else None
    keys = rows.to(engine.device) if angles is None else values
    kernels.compile_keys(keys, angles, top, group, encode=encode)
