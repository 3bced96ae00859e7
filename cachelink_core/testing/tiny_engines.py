"""Real engines over tiny seeded models: what a daemon gets from ``engine/loading.py``, in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cachelink_core.engine.executor import DeviceExecutor
from cachelink_core.engine.identify import identify
from cachelink_core.engine.staging import Staging, staging_for
from cachelink_core.engine.tokens import HFTokens
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.tiny_models import tiny_model
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer


def tiny_engine(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str = "auto",
    executor: DeviceExecutor | None = None,
    staging: Callable[[torch.device], Staging | None] = staging_for,
    **overrides: Any,
) -> TransformersEngine:
    """Builds an engine with a tiny model and the tiny tokenizer.

    Args:
        family: a key of ``FAMILIES``.
        dtype: of the weights and the cache.
        seed: of the weights.
        attention: implementation by transformers' name, ``auto`` to leave the model's own.
        executor: to share a device, or to observe its turns.
        staging: to have a handoff's bytes copied as to a device.
        **overrides: further arguments of ``tiny_model``.
    """
    model = tiny_model(family, dtype=dtype, seed=seed, **overrides)
    tokenizer = tiny_tokenizer()
    rope = KeyRope.probe(model)
    identity = identify(model, tokenizer, rope)
    return TransformersEngine(
        model,
        HFTokens(tokenizer),
        identity,
        rope,
        attention=attention,
        executor=executor,
        staging=staging,
    )
