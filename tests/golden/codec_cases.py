"""The golden cases of codecs and packings, and how their files are made.

Inputs come from integer arithmetic, so that they are the same on every machine. ``regenerate_codecs``
writes the files; nothing else does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from cachelink_core.codec_spec import CODECS, ZSTD, CodecSpec, DType, TensorKind
from cachelink_core.codecs.native import TORCH_DTYPES
from cachelink_core.codecs.registry import packing, tensor_codec

FOLDER = Path(__file__).parent / "codecs"


@dataclass(frozen=True)
class CodecCase:
    """One encoded slice: files ``NAME.json``, ``NAME.payload.bin``, ``NAME.decoded.bin``."""

    name: str
    spec: CodecSpec
    dtype: DType
    kind: TensorKind
    shape: tuple[int, int, int]
    start: int

    def tensor(self) -> Tensor:
        """``[H, T, D]``: multiples of 1/64 around a mean of each channel."""
        heads, tokens, dim = self.shape
        index = torch.arange(heads * tokens * dim, dtype=torch.int64).view(self.shape)
        noise = (index * 1_103_515_245 + 12_345) // 65_536 % 511 - 255
        mean = torch.arange(dim) * 96 - 200
        wide = ((noise + mean) / 64).float()
        keeps_float = self.spec.quantized and self.kind == "K"
        return wide if keeps_float else wide.to(TORCH_DTYPES[self.dtype])

    def encode(self) -> bytes:
        codec = tensor_codec(self.spec, self.dtype)
        return b"".join(codec.encode(self.tensor(), self.kind, self.start))

    def decode(self, payload: bytes, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        tensor_codec(self.spec, self.dtype).decode(memoryview(payload), self.kind, self.start, out)
        return out

    def describe(self, payload: bytes) -> dict[str, Any]:
        return {
            "codec": msgspec.to_builtins(self.spec),
            "dtype": self.dtype,
            "kind": self.kind,
            "shape": list(self.shape),
            "start": self.start,
            "payload_bytes": len(payload),
            "payload_blake3": blake3(payload).hexdigest(),
            "decoded_float32_blake3": digest(self.decode(payload)),
            "decoded_bfloat16_blake3": digest(self.decode(payload, torch.bfloat16)),
        }


@dataclass(frozen=True)
class PackingCase:
    """One packed payload: files ``NAME.json``, ``NAME.wire.bin``, ``NAME.raw.bin``."""

    name: str
    form: int
    item_bytes: int

    def raw(self) -> bytes:
        index = torch.arange(3000, dtype=torch.int64)
        noise = (index * 1_103_515_245 + 12_345) // 65_536 % 511 - 255
        if self.form == 2:
            return tensor_bytes(
                (noise / 64).to(torch.bfloat16 if self.item_bytes == 2 else torch.float32)
            )
        if self.form == 1:
            return tensor_bytes((noise.abs() // 32).to(torch.uint8))
        return tensor_bytes(noise[:40].to(torch.uint8))

    def pack(self) -> bytes:
        return b"".join(packing(ZSTD).pack([memoryview(self.raw())], self.item_bytes))

    def describe(self, wire: bytes) -> dict[str, Any]:
        return {
            "packing": "zstd",
            "item_bytes": self.item_bytes,
            "raw_bytes": len(self.raw()),
            "raw_blake3": blake3(self.raw()).hexdigest(),
            "wire_bytes": len(wire),
            "wire_blake3": blake3(wire).hexdigest(),
        }


def _codec_cases() -> tuple[CodecCase, ...]:
    """Sinks, a full and a short key group, two value groups and odd D; and the defaults at 128."""
    cases = []
    kinds: tuple[TensorKind, ...] = ("K", "V")
    for spec in CODECS.values():
        for kind in kinds:
            grouped = msgspec.structs.replace(spec, value_group_channels=4 if spec.quantized else 0)
            parts = (2, 150, 5)
            name = f"{spec.id}_{kind}_parts"
            cases.append(CodecCase(name, grouped, "bfloat16", kind, parts, 0))
            name = f"{spec.id}_{kind}_float32"
            cases.append(CodecCase(name, spec, "float32", kind, (1, 33, 66), 128))
    return tuple(cases)


CODEC_CASES = _codec_cases()
PACKING_CASES = (
    PackingCase("zstd_stored", 0, 1),
    PackingCase("zstd_whole", 1, 1),
    PackingCase("zstd_planes_bfloat16", 2, 2),
    PackingCase("zstd_planes_float32", 2, 4),
)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, little-endian, C order."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def digest(tensor: Tensor) -> str:
    """BLAKE3 of a tensor's bytes."""
    return blake3(tensor_bytes(tensor)).hexdigest()


def files() -> dict[str, bytes]:
    """Every golden file of this folder as today's code would write it."""
    found: dict[str, bytes] = {}
    for case in CODEC_CASES:
        payload = case.encode()
        found[f"{case.name}.payload.bin"] = payload
        found[f"{case.name}.decoded.bin"] = tensor_bytes(case.decode(payload))
        found[f"{case.name}.json"] = to_json(case.describe(payload))
    for packed in PACKING_CASES:
        wire = packed.pack()
        found[f"{packed.name}.wire.bin"] = wire
        found[f"{packed.name}.raw.bin"] = packed.raw()
        found[f"{packed.name}.json"] = to_json(packed.describe(wire))
    return found


def to_json(card: dict[str, Any]) -> bytes:
    """Indented JSON with a newline at its end."""
    return (json.dumps(card, indent=2) + "\n").encode()
