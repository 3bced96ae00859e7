"""Which bytes of a cache travel in which chunk: blocks, runs and chunks, as pure arithmetic.

A cache is a table of tensors: layer 0 keys, layer 0 values, layer 1 keys, … (tensor ``2 * layer``
holds keys, ``2 * layer + 1`` values). A *block* is ``block_tokens`` consecutive tokens of all of
them; a *run* is a contiguous range of the tensors; a *chunk* is one run of one block. Both sides
compute the same plan from the header, so that a chunk carries nothing but its two indices.

Axes: L layers, H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from cachelink_core import limits
from cachelink_core.codec_spec import CodecSpec, DType, TensorKind, encoded_bytes
from cachelink_core.errors import ManifestError
from cachelink_core.identity import LayerGeometry

ChunkIndex = tuple[int, int]
"""(block, run)."""


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tensors ``[first, first + count)`` and, within a block, tokens ``[token_lo, token_hi)``."""

    first: int
    count: int
    token_lo: int
    token_hi: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A piece of one tensor inside a chunk.

    Attributes:
        layer: which layer.
        kind: keys or values.
        start: first absolute position.
        stop: one beyond the last.
        offset: where its encoded bytes begin in the unpacked chunk.
        length: how many there are.
    """

    layer: int
    kind: TensorKind
    start: int
    stop: int
    offset: int
    length: int


def tensor_of(index: int) -> tuple[int, TensorKind]:
    """(layer, kind) of tensor ``index``."""
    return index // 2, "V" if index % 2 else "K"


def plan_runs(layers: Sequence[LayerGeometry], dtype: DType, block_tokens: int) -> tuple[Run, ...]:
    """Packs tensors greedily into runs of at most ``limits.RUN_RAW_BYTES`` raw bytes a full block.

    A tensor that is larger than that alone is cut by tokens at multiples of ``limits.TOKEN_CUT``.
    """
    runs: list[Run] = []
    first, size = 0, 0
    for index in range(2 * len(layers)):
        layer = layers[index // 2]
        row = layer.token_bytes(dtype) // 2
        whole = row * block_tokens
        if size and size + whole > limits.RUN_RAW_BYTES:
            runs.append(Run(first, index - first, 0, block_tokens))
            first, size = index, 0
        if whole > limits.RUN_RAW_BYTES and block_tokens > limits.TOKEN_CUT:
            step = max(1, limits.RUN_RAW_BYTES // (row * limits.TOKEN_CUT)) * limits.TOKEN_CUT
            runs += [
                Run(index, 1, lo, min(block_tokens, lo + step))
                for lo in range(0, block_tokens, step)
            ]
            first, size = index + 1, 0
        else:
            size += whole
    if size:
        runs.append(Run(first, 2 * len(layers) - first, 0, block_tokens))
    return tuple(runs)


@dataclass(frozen=True)
class CacheLayout:
    """The chunk plan of one handoff.

    Attributes:
        layers: geometry per layer, as in the sender's identity.
        dtype: of the sender's cache.
        tokens: n, the prefix's length.
        block_tokens: tokens of a full block.
        runs: as listed in the header.
        codec: decides the encoded sizes.
    """

    layers: tuple[LayerGeometry, ...]
    dtype: DType
    tokens: int
    block_tokens: int
    runs: tuple[Run, ...]
    codec: CodecSpec

    @property
    def block_count(self) -> int:
        """Blocks, the short last one included."""
        return -(-self.tokens // self.block_tokens)

    def block_range(self, block: int) -> tuple[int, int]:
        """Absolute positions ``[start, stop)`` of a block; the last one may be short."""
        start = block * self.block_tokens
        return start, min(self.tokens, start + self.block_tokens)

    def slices(self, block: int, run: int) -> tuple[TensorSlice, ...]:
        """The tensor slices of one chunk, in the order of their bytes; empty if it has no chunk."""
        found = self._planned.get((block, run))
        if found is None:
            found = self._planned[block, run] = _slices(self, block, run)
        return found

    @cached_property
    def _planned(self) -> dict[ChunkIndex, tuple[TensorSlice, ...]]:
        # Kept here and not in a cache keyed by the layout: hashing the runs of a hostile header for
        # each of its chunks would take a minute.
        return {}

    def raw_bytes(self, block: int, run: int) -> int:
        """Bytes of the chunk after the codec and before the packing."""
        parts = self.slices(block, run)
        return parts[-1].offset + parts[-1].length if parts else 0

    def block_chunks(self, block: int) -> tuple[ChunkIndex, ...]:
        """The chunks of one block, in the order in which they are sent."""
        return tuple((block, run) for run in range(len(self.runs)) if self.slices(block, run))

    def chunks(self) -> Iterator[ChunkIndex]:
        """Every chunk of the handoff, in the order in which they are sent."""
        for block in range(self.block_count):
            yield from self.block_chunks(block)

    @cached_property
    def chunk_count(self) -> int:
        """Chunks of the whole handoff."""
        return sum(1 for _ in self.chunks())

    @cached_property
    def encoded_bytes(self) -> int:
        """All raw bytes of the handoff: what is sent when nothing is packed."""
        return sum(self.raw_bytes(block, run) for block, run in self.chunks())

    @cached_property
    def native_bytes(self) -> int:
        """Bytes of the same tokens in the model's own dtype."""
        return sum(
            layer.token_bytes(self.dtype) * (self.tokens - layer.first_token(self.tokens))
            for layer in self.layers
        )

    def check_tiling(self) -> None:
        """Checks that the runs hold every token of every tensor exactly once.

        Raises:
            ManifestError: a hole, an overlap, a run outside the tensors, or a chunk above the limit.
        """
        seen: dict[int, int] = {}
        for number, run in enumerate(self.runs):
            if run.first < 0 or run.count < 1 or run.first + run.count > 2 * len(self.layers):
                raise ManifestError(
                    f"runs[{number}] holds tensors {run.first}..{run.first + run.count - 1} "
                    f"of a cache that has {2 * len(self.layers)}"
                )
            if run.token_hi <= run.token_lo or run.token_hi > self.block_tokens:
                raise ManifestError(
                    f"runs[{number}] holds tokens [{run.token_lo}, {run.token_hi}) "
                    f"of a block of {self.block_tokens}"
                )
            for index in range(run.first, run.first + run.count):
                at = seen.get(index, 0)
                if run.token_lo != at:
                    word = "overlaps" if run.token_lo < at else "leaves a hole before"
                    raise ManifestError(
                        f"runs[{number}] {word} token {at} of tensor {index}: "
                        f"it begins at {run.token_lo}"
                    )
                seen[index] = run.token_hi
        for index in range(2 * len(self.layers)):
            if seen.get(index, 0) != self.block_tokens:
                raise ManifestError(
                    f"runs end tensor {index} at token {seen.get(index, 0)} of {self.block_tokens}"
                )
        self._check_sizes()

    def _check_sizes(self) -> None:
        if len(self.runs) * self.block_count > limits.MAX_CHUNKS:
            raise ManifestError(
                f"{len(self.runs)} runs of {self.block_count} blocks are more chunks "
                f"than {limits.MAX_CHUNKS}"
            )
        for number, run in enumerate(self.runs):
            tokens = run.token_hi - run.token_lo
            raw = sum(
                self.layers[index // 2].token_bytes(self.dtype) // 2 * tokens
                for index in range(run.first, run.first + run.count)
            )
            if raw > limits.MAX_CHUNK_WIRE_BYTES:
                raise ManifestError(
                    f"runs[{number}] makes chunks of {raw} bytes; the limit is "
                    f"{limits.MAX_CHUNK_WIRE_BYTES}"
                )


def _slices(layout: CacheLayout, block: int, run: int) -> tuple[TensorSlice, ...]:
    spec = layout.runs[run]
    block_start, block_stop = layout.block_range(block)
    found: list[TensorSlice] = []
    offset = 0
    for index in range(spec.first, spec.first + spec.count):
        layer, kind = tensor_of(index)
        geometry = layout.layers[layer]
        start = max(block_start + spec.token_lo, geometry.first_token(layout.tokens))
        stop = min(block_start + spec.token_hi, block_stop)
        if start >= stop:
            continue
        length = encoded_bytes(
            layout.codec, kind, layout.dtype, geometry.kv_heads, geometry.head_dim, start, stop
        )
        found.append(TensorSlice(layer, kind, start, stop, offset, length))
        offset += length
    return tuple(found)
