"""The residual: exactly the published network, and nothing at the start."""

import torch

from cachelink_core.fit.plan import residual_parameters
from cachelink_core.fit.shapes import read_pair_card
from cachelink_core.transport.card import ResidualShape
from cachelink_core.transport.residual import Residual, ResidualLayer
from tests.models.mapper_states import SHAPE, random_state

PUBLISHED = 5_508_096


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_full_size_layer_has_the_published_parameters(pytestconfig):
    layer = ResidualLayer(8 * 8 * 128, 8 * 128, ResidualShape(), device="meta")
    assert count(layer) == PUBLISHED == residual_parameters(8_192, 1_024)
    assert 64 * PUBLISHED == 352_518_144
    assert len(list(layer.parameters())) == 10, "five linears, each with a bias"
    card = read_pair_card(pytestconfig.rootpath / "manifests/pairs/qwen3-14b-32b.json")
    assert card.receiver.layers * PUBLISHED == 352_518_144
    inputs = card.k * card.sender.channels
    assert residual_parameters(inputs, card.receiver.channels) == PUBLISHED


def test_standardisation_is_never_trained():
    shape = ResidualShape(stem=4, fused=6, standardised=True)
    layer = ResidualLayer(8, 6, shape)
    assert count(layer) == count(ResidualLayer(8, 6, ResidualShape(stem=4, fused=6)))
    layer.standardise("K", torch.full((8,), 3.0), torch.full((8,), 2.0))
    assert torch.equal(layer.mean_k, torch.full((8,), 3.0))
    assert torch.equal(layer.inverse_scale_k, torch.full((8,), 0.5))
    assert torch.equal(layer.mean_v, torch.zeros(8))


def test_heads_start_at_zero_and_stems_do_not():
    layer = ResidualLayer(16, 8, SHAPE)
    for head in (layer.head_k, layer.head_v):
        assert not head.weight.any()
        assert not head.bias.any()
    assert layer.stem_k.weight.any()
    assert layer.fuse.weight.any()
    keys, values = layer(torch.randn(5, 16), torch.randn(5, 16))
    assert torch.equal(keys, torch.zeros(5, 8))
    assert torch.equal(values, torch.zeros(5, 8))


def test_both_kinds_reach_both_corrections():
    torch.manual_seed(0)
    layer = ResidualLayer(16, 8, SHAPE)
    torch.nn.init.normal_(layer.head_k.weight)
    torch.nn.init.normal_(layer.head_v.weight)
    for moved in (0, 1):
        inputs = [torch.randn(1, 16, requires_grad=True) for _ in range(2)]
        sum(out.sum() for out in layer(*inputs)).backward()
        assert inputs[moved].grad.abs().sum() > 0
        deltas = layer(*inputs)
        for out in deltas:
            gradient = torch.autograd.grad(out.sum(), inputs[moved], retain_graph=True)[0]
            assert gradient.abs().sum() > 0, "late fusion couples the kinds"


def test_layers_share_nothing():
    residual = Residual(random_state(residual=SHAPE).card)
    pointers = [parameter.data_ptr() for parameter in residual.parameters()]
    assert len(set(pointers)) == len(pointers) == 10 * len(residual)
    assert {name.split(".")[0] for name in residual.state_dict()} == set("0123")


def test_a_residual_survives_the_round_trip_through_a_state():
    state = random_state(residual=SHAPE)
    residual = state.load_residual()
    again = state.with_residual(residual)
    assert again.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(again.tensors[n], t) for n, t in state.tensors.items())
