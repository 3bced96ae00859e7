"""The arms of the codec benchmark, run over one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cachelink_bench.codec_quality import Quality, Subject, judge, one_shot
from cachelink_bench.codec_treatments import Handover, PerToken
from cachelink_core.codec_spec import INT4, INT8, NATIVE, ZSTD, CodecSpec
from cachelink_core.engine.transformers_engine import TransformersEngine

BIASES = (50.0, 300.0)
"""Constants on key channels, of the size that Qwen2.5's key biases have."""


def _changed(spec: CodecSpec, **parameters: int) -> CodecSpec:
    return msgspec.structs.replace(spec, **parameters)


ARMS: dict[str, Handover | PerToken] = {
    "native": Handover(NATIVE),
    "native+zstd": Handover(NATIVE, ZSTD),
    "int8": Handover(INT8),
    "int8+zstd": Handover(INT8, ZSTD),
    "int4": Handover(INT4),
    "int4+zstd": Handover(INT4, ZSTD),
    "int4, no sinks": Handover(_changed(INT4, sink_tokens=0)),
    "int4, K over 256 tokens": Handover(_changed(INT4, key_group_tokens=256)),
    "int4, V over 32 channels": Handover(_changed(INT4, value_group_channels=32)),
    "int8 per token": PerToken(8),
    "int4 per token": PerToken(4),
}
for _bias in BIASES:
    ARMS[f"int4, bias {_bias:g}"] = Handover(INT4, key_bias=_bias)
    ARMS[f"int4 per token, bias {_bias:g}"] = PerToken(4, key_bias=_bias)

TIMED = ("native", "native+zstd", "int8", "int8+zstd", "int4", "int4+zstd")
"""Arms whose speed is measured; the per-token ones are written to be read, not to be fast."""


@dataclass(frozen=True)
class TextResult:
    """One text's results.

    Attributes:
        text: its name.
        native_bytes: of the prefix's cache.
        noise_floor: one-shot prefill against prefill in blocks.
        arms: by name.
    """

    text: str
    native_bytes: int
    noise_floor: Quality
    arms: dict[str, Quality]


def run_text(engine: TransformersEngine, subject: Subject) -> TextResult:
    """Runs every arm."""
    floor = judge(engine, subject, one_shot)
    arms = dict(_run_arms(engine, subject))
    return TextResult(subject.name, subject.native_bytes, floor, arms)


def _run_arms(engine: TransformersEngine, subject: Subject) -> Iterator[tuple[str, Quality]]:
    for name, treatment in ARMS.items():
        yield name, judge(engine, subject, treatment)
