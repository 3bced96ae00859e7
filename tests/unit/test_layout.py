"""The chunk plan: every token of every tensor exactly once, whatever the geometry."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachelink_core import limits
from cachelink_core.codec_spec import BF16, INT4, INT8, NATIVE
from cachelink_core.errors import ManifestError
from cachelink_core.identity import LayerGeometry
from cachelink_core.layout import CacheLayout, Run, plan_runs, tensor_of
from cachelink_core.testing import handoffs

FULL = st.builds(
    LayerGeometry,
    kv_heads=st.integers(1, 12),
    head_dim=st.integers(1, 300),
)
SLIDING = st.builds(
    LayerGeometry,
    kv_heads=st.integers(1, 12),
    head_dim=st.integers(1, 300),
    attention=st.just("sliding"),
    window=st.integers(1, 700),
)
LAYOUTS = st.fixed_dictionaries(
    {
        "layers": st.lists(FULL | SLIDING, min_size=1, max_size=8).map(tuple),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "tokens": st.integers(0, 1500),
        "block_tokens": st.sampled_from([16, 17, 128, 256, 1000]),
        "codec": st.sampled_from([NATIVE, BF16, INT8, INT4]),
    }
)


def layout_of(layers, dtype, tokens, block_tokens, codec=NATIVE) -> CacheLayout:
    runs = plan_runs(layers, dtype, block_tokens)
    return CacheLayout(tuple(layers), dtype, tokens, block_tokens, runs, codec)


@settings(deadline=None)
@given(LAYOUTS)
def test_every_token_of_every_tensor_travels_exactly_once(given_layout):
    layout = layout_of(**given_layout)
    layout.check_tiling()
    held: dict[tuple[int, str], list[int]] = {}
    for block, run in layout.chunks():
        for part in layout.slices(block, run):
            held.setdefault((part.layer, part.kind), []).extend(range(part.start, part.stop))
    for number, layer in enumerate(layout.layers):
        expected = list(range(layer.first_token(layout.tokens), layout.tokens))
        for kind in ("K", "V"):
            assert sorted(held.get((number, kind), [])) == expected


@settings(deadline=None)
@given(LAYOUTS)
def test_a_chunk_is_its_slices_without_gaps(given_layout):
    layout = layout_of(**given_layout)
    total = 0
    for block, run in layout.chunks():
        at = 0
        for part in layout.slices(block, run):
            assert part.offset == at
            assert part.length > 0
            at += part.length
        assert at == layout.raw_bytes(block, run) <= limits.MAX_CHUNK_WIRE_BYTES
        total += at
    assert total == layout.encoded_bytes
    if layout.codec is NATIVE:
        assert total == layout.native_bytes


@settings(deadline=None)
@given(LAYOUTS)
def test_runs_of_a_full_block_stay_within_their_size(given_layout):
    layout = layout_of(**given_layout)
    for run in layout.runs:
        raw = sum(
            layout.layers[tensor_of(index)[0]].token_bytes(layout.dtype) // 2
            for index in range(run.first, run.first + run.count)
        ) * (run.token_hi - run.token_lo)
        assert raw <= limits.RUN_RAW_BYTES or run.token_hi - run.token_lo <= limits.TOKEN_CUT
        assert run.token_lo % limits.TOKEN_CUT == 0


def test_sinks_groups_and_cuts_are_counted_as_written_down():
    # One layer, H = 2, D = 8, bfloat16, int4, block 256: positions 0..3 are not quantized (keys
    # float32, values bfloat16), keys have groups [4, 128) and [128, 256), values one pair of scale
    # and zero a token and head.
    layout = layout_of([LayerGeometry(kv_heads=2, head_dim=8)], "bfloat16", 256, 256, INT4)
    keys, values = layout.slices(0, 0)
    sinks = 2 * 4 * 8
    assert keys.length == 4 * sinks + 2 * (2 * 8 * 6) + 2 * 252 * 4
    assert values.length == 2 * sinks + 2 * 252 * 4 + 2 * 252 * 4


def test_a_short_last_block_and_an_empty_prefix():
    layer = [LayerGeometry(kv_heads=1, head_dim=4)]
    assert [layout_of(layer, "float32", n, 16).block_count for n in (0, 1, 15, 16, 17)] == [
        0,
        1,
        1,
        1,
        2,
    ]
    assert layout_of(layer, "float32", 17, 16).block_range(1) == (16, 17)
    assert list(layout_of(layer, "float32", 0, 16).chunks()) == []


@pytest.mark.parametrize(
    ("runs", "word"),
    [
        ([Run(0, 1, 0, 16)], "runs end tensor 1 at token 0"),
        ([Run(0, 2, 0, 8)], "runs end tensor 0 at token 8"),
        ([Run(0, 2, 0, 16), Run(1, 1, 0, 16)], "overlaps"),
        ([Run(0, 2, 0, 16), Run(0, 1, 15, 16)], "overlaps"),
        ([Run(0, 2, 1, 16)], "leaves a hole before token 0"),
        ([Run(0, 2, 0, 7), Run(0, 2, 8, 16)], "leaves a hole before token 7"),
        ([Run(0, 3, 0, 16)], "holds tensors 0..2 of a cache that has 2"),
        ([Run(-1, 3, 0, 16)], "holds tensors -1..1"),
        ([Run(0, 0, 0, 16)], "holds tensors 0..-1"),
        ([Run(0, 2**63 - 1, 0, 16)], "holds tensors"),
        ([Run(0, 2, 0, 17)], "of a block of 16"),
        ([Run(0, 2, 0, 2**63 - 1)], "of a block of 16"),
        ([Run(0, 2, 16, 0)], "of a block of 16"),
        ([Run(0, 2, -16, 16)], "overlaps"),
    ],
)
def test_runs_that_do_not_tile_are_refused(runs, word):
    layers = (LayerGeometry(kv_heads=1, head_dim=4),)
    layout = CacheLayout(layers, "bfloat16", 20, 16, tuple(runs), NATIVE)
    with pytest.raises(ManifestError, match=word):
        layout.check_tiling()


def test_chunks_above_the_limit_are_refused():
    layers = (LayerGeometry(kv_heads=1024, head_dim=256),)
    layout = CacheLayout(layers, "float32", 16, 16, (Run(0, 2, 0, 16),), NATIVE)
    with pytest.raises(ManifestError, match=f"limit is {limits.MAX_CHUNK_WIRE_BYTES}"):
        layout.check_tiling()


def test_more_chunks_than_a_seal_holds_are_refused():
    layers = (LayerGeometry(kv_heads=1, head_dim=1),)
    runs = tuple(Run(0, 2, at, at + 1) for at in range(16))
    layout = CacheLayout(layers, "float32", 16 * 3_751, 16, runs, NATIVE)
    with pytest.raises(ManifestError, match="more chunks than 60000"):
        layout.check_tiling()


def test_the_largest_hostile_plan_costs_seconds_at_most():
    layers = [LayerGeometry(kv_heads=1, head_dim=1)] * limits.MAX_LAYERS
    runs = [Run(tensor, 1, at, at + 1) for tensor in range(2 * len(layers)) for at in range(29)]
    header = handoffs.header(29, layers=layers, block_tokens=29, runs=runs)
    began_s = time.perf_counter()
    header.check()
    assert header.layout.chunk_count == len(runs)
    assert header.layout.encoded_bytes == header.layout.native_bytes
    assert time.perf_counter() - began_s < 10
