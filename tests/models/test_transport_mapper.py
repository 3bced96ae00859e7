"""Applying a mapper: right numbers, any geometry, and the same bits however a prefix is cut."""

import itertools

import pytest
import torch

from cachelink_core.errors import CorruptChunk, ManifestError
from cachelink_core.identity import LayerGeometry
from cachelink_core.transport.card import ResidualShape
from cachelink_core.transport.mapper import Mapper
from cachelink_core.transport.precision import ROW_TILE
from cachelink_core.transport.source_block import neighbours
from cachelink_core.transport.state import MapperState
from tests.models.mapper_states import (
    SETS,
    SHAPE,
    SOURCE,
    TARGET,
    mapped,
    random_source,
    random_state,
    reference,
    zero_residual,
)

TOKENS = 2 * ROW_TILE + 37
GEOMETRIES = [
    (SOURCE, TARGET),
    (LayerGeometry(kv_heads=4, head_dim=8), LayerGeometry(kv_heads=2, head_dim=16)),
    (LayerGeometry(kv_heads=1, head_dim=16), LayerGeometry(kv_heads=3, head_dim=4)),
]
FORMS = {
    "ridge": {},
    "residual": {"residual": SHAPE},
    "standardised": {"residual": ResidualShape(stem=6, fused=10, standardised=True)},
    "local": {"heads": "local"},
    "local-residual": {"heads": "local", "residual": SHAPE},
}


@pytest.mark.parametrize(("source", "target"), GEOMETRIES)
@pytest.mark.parametrize("form", ["ridge", "residual", "standardised"])
def test_the_folded_form_computes_what_the_paper_writes(source, target, form):
    state = random_state(source=source, target=target, **FORMS[form])
    block = random_source(50, geometry=source)
    keys, values = mapped(Mapper.place(state, dtype=torch.float32), block)
    residual = state.load_residual() if "residual" in FORMS[form] else None
    for layer in range(len(SETS)):
        for found, expected in zip(
            (keys[layer], values[layer]), reference(state, block, layer, residual), strict=True
        ):
            assert found.shape == (target.kv_heads, 50, target.head_dim)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_any_cut_of_a_prefix_gives_the_same_bits(form):
    mapper = Mapper.place(random_state(**FORMS[form]), dtype=torch.float32)
    block = random_source(TOKENS)
    whole = mapped(mapper, block)
    for cuts in ([1], [7, 8, 9], [ROW_TILE], [ROW_TILE - 1, ROW_TILE + 1], [100, 200, 280]):
        edges = [0, *cuts, TOKENS]
        parts = [
            mapped(mapper, block[:, :, :, low:high], low) for low, high in itertools.pairwise(edges)
        ]
        for kind in (0, 1):
            for layer in range(len(SETS)):
                joined = torch.cat([part[kind][layer] for part in parts], dim=1)
                assert torch.equal(joined, whole[kind][layer]), (form, cuts, layer)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_does_not_see_its_neighbours(form):
    mapper = Mapper.place(random_state(**FORMS[form]), dtype=torch.float32)
    block = random_source(60)
    before = mapped(mapper, block)
    block[:, :, :, 30] = 1e4
    after = mapped(mapper, block)
    for kind in (0, 1):
        for layer in range(len(SETS)):
            same = (before[kind][layer] == after[kind][layer]).all(dim=2).all(dim=0)
            assert same.sum() == 59
            assert not same[30]


def test_head_local_equals_all_heads_with_zeros_elsewhere():
    state = random_state(heads="local")
    dense = random_state()
    tensors = dict(state.tensors)
    for layer, sources in enumerate(SETS):
        for kind in ("K", "V"):
            local = state.tensors[f"ridge.{layer}.{kind}.weight"]
            weight = torch.zeros(
                len(sources), SOURCE.kv_heads, SOURCE.head_dim, TARGET.kv_heads, TARGET.head_dim
            )
            for head, read in enumerate(state.card.heads):
                weight[:, read[0], :, head] = local[head].view(
                    len(sources), SOURCE.head_dim, TARGET.head_dim
                )
            tensors[f"ridge.{layer}.{kind}.weight"] = weight.view(
                -1, TARGET.kv_heads * TARGET.head_dim
            )
    block = random_source(40)
    ours = mapped(Mapper.place(state, dtype=torch.float32), block)
    theirs = mapped(Mapper.place(MapperState(dense.card, tensors), dtype=torch.float32), block)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["residual", "standardised", "local-residual"])
def test_a_fresh_residual_is_ridge_bit_for_bit(form):
    state = random_state(**FORMS[form])
    fresh, ridge = zero_residual(state), state.ridge_only()
    block = random_source(TOKENS)
    assert fresh.card.residual is not None
    assert ridge.card.residual is None
    placed = [Mapper.place(each, dtype=torch.float32) for each in (fresh, ridge)]
    # By construction, whatever a wider GEMM would round: a residual that adds nothing is left out.
    assert placed[0].nbytes == placed[1].nbytes
    ours, theirs = (mapped(mapper, block) for mapper in placed)
    for kind in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(ours[kind], theirs[kind], strict=True))
    trained = mapped(Mapper.place(state, dtype=torch.float32), block)
    assert not torch.equal(trained[0][0], ours[0][0])


def test_a_bf16_mapper_rounds_operands_and_sums_in_float32():
    state = random_state(residual=SHAPE)
    block = random_source(40)
    keys, values = mapped(Mapper.place(state, dtype=torch.bfloat16), block)
    rounded = MapperState(
        state.card,
        {
            name: tensor.bfloat16().float() if name.endswith("weight") else tensor
            for name, tensor in state.tensors.items()
        },
    )
    ridge = rounded.ridge_only()
    plain = mapped(Mapper.place(ridge, dtype=torch.bfloat16), block)
    assert keys[0].dtype == torch.float32
    for layer in range(len(SETS)):
        expected = reference(ridge, block.bfloat16().float(), layer)
        torch.testing.assert_close(plain[0][layer].double(), expected[0], rtol=1e-5, atol=1e-5)
    full = reference(rounded, block.bfloat16().float(), 1, rounded.load_residual())
    torch.testing.assert_close(values[1].double(), full[1], rtol=0, atol=5e-3)


def test_float64_weights_give_float64():
    state = random_state()
    block = random_source(10)
    keys, _ = mapped(Mapper.place(state, dtype=torch.float64), block)
    expected, _ = reference(state, block, 2)
    assert keys[2].dtype == torch.float64
    torch.testing.assert_close(keys[2], expected, rtol=1e-12, atol=1e-12)


def test_position_0_is_spliced_for_the_bos_and_for_nothing_else():
    state = random_state(bos_id=5, residual=SHAPE)
    mapper = Mapper.place(state, dtype=torch.float32)
    block = random_source(8)
    unspliced = mapped(mapper, block, 0, ids=(6, 5))
    spliced = mapped(mapper, block, 0, ids=(5, 6))
    later = mapped(mapper, block, 8, ids=(5, 6))
    for kind, name in enumerate(("K", "V")):
        for layer in range(len(SETS)):
            own = state.tensors[f"position0.{layer}.{name}"]
            assert torch.equal(spliced[kind][layer][:, 0], own)
            assert not torch.equal(unspliced[kind][layer][:, 0], own)
            assert not torch.equal(later[kind][layer][:, 0], own)
            assert torch.equal(spliced[kind][layer][:, 1:], unspliced[kind][layer][:, 1:])


def test_the_order_of_layers_inside_x_matters():
    state = random_state()
    block = random_source(20)
    swapped = block.clone()
    swapped[:, [1, 3]] = block[:, [3, 1]]
    mapper = Mapper.place(state, dtype=torch.float32)
    assert not torch.allclose(mapped(mapper, block)[0][1], mapped(mapper, swapped)[0][1])


def test_neighbouring_layers_are_read_in_place():
    assert neighbours((0, 1, 2)) == [(0, 2)]
    assert neighbours((0, 2, 3, 7)) == [(0, 0), (2, 3), (7, 7)]
    block = Mapper.place(random_state(), dtype=torch.float32).open_block(0, 16)
    base = block.gather("K", (0, 1, 2, 3, 4))
    inner = block.gather("K", (1, 2))
    assert inner.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert block.gather("K", (1, 3)).untyped_storage().data_ptr() != base.data_ptr()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["K", "V"])
def test_a_block_with_nan_or_infinity_is_refused_by_layer(kind, value):
    block = Mapper.place(random_state(), dtype=torch.float32).open_block(256, 16)
    tensor = torch.zeros(SOURCE.kv_heads, 16, SOURCE.head_dim)
    block.write(3, kind, 256, tensor)
    block.check_finite()
    tensor[1, 7, 2] = value
    block.write(3, kind, 256, tensor)
    with pytest.raises(CorruptChunk, match=rf"\[256, 272\): layer 3 {kind}"):
        block.check_finite()


def test_tensors_must_be_those_of_the_card():
    state = random_state()
    missing = {n: t for n, t in state.tensors.items() if n != "ridge.1.V.bias"}
    wrong = dict(state.tensors) | {"ridge.0.K.weight": torch.zeros(3, 3)}
    extra = dict(state.tensors) | {"other": torch.zeros(1)}
    for tensors, words in (
        (missing, "'ridge.1.V.bias' has shape none; the card says"),
        (wrong, r"'ridge.0.K.weight' has shape \[3, 3\]; the card says"),
        (extra, "'other' has shape .* the card says none"),
    ):
        with pytest.raises(ManifestError, match=words):
            Mapper.place(MapperState(state.card, tensors), dtype=torch.float32)
