"""Fitted pairs that several tests share: a tiny model and its twin, on text made of bytes."""

from __future__ import annotations

import random

import torch

from cachelink_core.engine.identify import identify
from cachelink_core.engine.tokens import HFTokens
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.fit.calibration import calibrate
from cachelink_core.kv.rope import KeyRope
from cachelink_core.testing.planted_pair import plant
from cachelink_core.testing.tiny_models import tiny_model
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer


def engine(model):
    tokenizer = tiny_tokenizer()
    rope = KeyRope.probe(model)
    identity = identify(model, tokenizer, rope)
    return TransformersEngine(model, HFTokens(tokenizer), identity, rope)


def planted_engines(family, dtype=torch.float32, **overrides):
    original = tiny_model(family, dtype=dtype, **overrides)
    twin = plant(original, seed=1)
    return engine(original), engine(twin.model), twin


def documents(count=24, words=160, seed=0):
    chosen = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        " ".join("".join(chosen.choices(letters, k=chosen.randint(1, 8))) for _ in range(words))
        for _ in range(count)
    ]


def calibration(tokens, *, sequences=12, length=96, stride=1, **kwargs):
    return calibrate(
        documents(),
        tokens.plain,
        bos_id=0,
        source="made of bytes",
        sequences=sequences,
        length=length,
        stride=stride,
        **kwargs,
    )
