"""The ways to get from a prefix to the first token of an answer, timed phase by phase.

All of them end with the same query through the same model over the same preallocated cache.

Axes: H KV heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cachelink_bench.latency_models import SourceCache
from cachelink_bench.stopwatch import Stopwatch, Timing
from cachelink_core.engine.base import Sampling
from cachelink_core.engine.transformers_engine import TransformersEngine
from cachelink_core.kv.prefix_cache import PrefixCache
from cachelink_core.kv.rotation import unrotate
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.source_block import SourceBlock

FIRST_TOKEN = Sampling(max_new_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the arms share.

    Attributes:
        engine: the receiver's.
        cache: whole, with room for the longest prefix and the query.
        ids: of the longest prefix.
        query: ids of the question.
    """

    engine: TransformersEngine
    cache: PrefixCache
    ids: Sequence[int]
    query: Sequence[int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one arm.

    Attributes:
        timing: of it.
        model_tokens: that the receiver's model read, counted in the model.
    """

    timing: Timing
    model_tokens: int


Arm = Callable[[int], Run]
"""Takes the number of prefix tokens."""


def native_arm(bench: Bench, block_tokens: int | None) -> Arm:
    """The receiver reads the prefix itself: ``prefill``, ``query``.

    Args:
        bench: shared parts.
        block_tokens: of the project's prefill schedule; None for one forward over everything.
    """

    def build(tokens: int, watch: Stopwatch) -> None:
        bench.engine.prefill(bench.cache, bench.ids[:tokens], block_tokens or tokens)
        watch.lap("prefill")

    return _arm(bench, build)


def transport_arm(bench: Bench, source: SourceCache, mapper: Mapper, map_tokens: int) -> Arm:
    """The sender's cache is translated, in blocks of ``map_tokens``.

    Phases: ``strip`` (RoPE of the sender's keys), ``move`` (layout of a block for the mapper),
    ``check`` (nothing is NaN, before and after), ``map``, ``rotate`` (RoPE of the receiver, cast and
    write of keys), ``install`` (cast and write of values), ``query``.
    """
    read = sorted({layer for fit in mapper.card.layers for layer in fit.sources})

    def build(tokens: int, watch: Stopwatch) -> None:
        finite = torch.ones((), dtype=torch.bool, device=mapper.device)
        for start in range(0, tokens, map_tokens):
            stop = min(tokens, start + map_tokens)
            block = _laid_out(mapper, source, read, start, stop, watch)
            block.check_finite()
            watch.lap("check")
            for layer in range(len(bench.cache.layers)):
                finite &= _translate(bench, mapper, layer, block, watch)
        assert bool(finite), "random weights gave NaN or infinity"
        watch.lap("check")
        bench.cache.set_length(tokens)
        watch.lap("install")

    return _arm(bench, build)


def _arm(bench: Bench, build: Callable[[int, Stopwatch], None]) -> Arm:
    watch = Stopwatch(bench.engine.device)

    @torch.inference_mode()
    def run(tokens: int) -> Run:
        bench.cache.truncate(0)
        counted = bench.engine.model_tokens
        watch.start()
        build(tokens, watch)
        assert bench.cache.length == tokens
        for _ in bench.engine.generate_steps(bench.cache, (), bench.query, FIRST_TOKEN):
            pass
        watch.lap("query")
        return Run(watch.stop(), bench.engine.model_tokens - counted)

    return run


def _laid_out(
    mapper: Mapper,
    source: SourceCache,
    layers: Sequence[int],
    start: int,
    stop: int,
    watch: Stopwatch,
) -> SourceBlock:
    """A block of the sender's content, token-major."""
    block = mapper.open_block(start, stop - start)
    cos, sin = source.angles(start, stop)
    watch.lap("move")
    for layer in layers:
        keys = source.keys[layer][:, start:stop]
        content = unrotate(keys, cos, sin, "half", keys.shape[2])
        watch.lap("strip")
        block.write(layer, "K", start, content)
        block.write(layer, "V", start, source.values[layer][:, start:stop])
        watch.lap("move")
    return block


def _translate(
    bench: Bench, mapper: Mapper, layer: int, block: SourceBlock, watch: Stopwatch
) -> torch.Tensor:
    """One receiver layer of a block, written to the cache; whether all of it is finite."""
    keys, values = mapper.map_layer(layer, block)
    watch.lap("map")
    finite = torch.isfinite(keys).all() & torch.isfinite(values).all()
    watch.lap("check")
    stop = block.start + block.tokens
    bench.engine.rotate_into(
        layer, keys, block.start, bench.cache.tensor(layer, "K", block.start, stop)
    )
    watch.lap("rotate")
    bench.cache.tensor(layer, "V", block.start, stop).copy_(values)
    watch.lap("install")
    return finite
