"""Every figure beside the gate, on cases with a closed form."""

import math

import pytest
import torch

from cachelink_core.fit.figures import (
    ErrorSums,
    ResidualSums,
    entropy,
    jensen_shannon,
    mean_cosine,
    next_token_figures,
    prefix_attention_figures,
    top_mass,
)


def drawn(seed=0, shape=(2, 50, 4)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(native, mapped):
    sums = ErrorSums()
    # In two pieces: sums, not means of means.
    sums.add(native[:, :20], mapped[:, :20])
    sums.add(native[:, 20:], mapped[:, 20:])
    return sums


def test_an_equal_cache_has_no_error():
    sums = errors(drawn(), drawn())
    assert (sums.mse, sums.relative_squared_l2, sums.r_squared) == (0, 0, 1)
    assert sums.cosine == pytest.approx(1)


def test_a_scaled_cache():
    native = drawn() + 3
    sums = errors(native, 1.5 * native)
    assert sums.mse == pytest.approx(0.25 * float(native.square().mean()))
    assert sums.relative_squared_l2 == pytest.approx(0.25)
    assert sums.cosine == pytest.approx(1)
    variance = (native - native.mean(1, keepdim=True)).square().sum() / native.square().sum()
    assert sums.r_squared == pytest.approx(1 - 0.25 / float(variance))
    assert sums.r_squared < 0 < 1 - sums.relative_squared_l2, "NMSE is not 1 - R²"


def test_a_zero_and_an_orthogonal_cache():
    native = drawn()
    zero = errors(native, torch.zeros_like(native))
    assert (zero.relative_squared_l2, zero.cosine) == (pytest.approx(1), 0)
    turned = torch.stack([-native[..., 1], native[..., 0], -native[..., 3], native[..., 2]], -1)
    orthogonal = errors(native, turned)
    assert orthogonal.cosine == pytest.approx(0, abs=1e-12)
    assert orthogonal.relative_squared_l2 == pytest.approx(2)


def test_the_mean_of_each_channel_has_r_squared_0():
    native = drawn() + torch.arange(4.0)
    assert errors(native, native.mean(1, keepdim=True).expand_as(native)).r_squared == (
        pytest.approx(0, abs=1e-12)
    )


def residual(native, ridge, mapped):
    sums = ResidualSums()
    sums.add(native, ridge, mapped)
    return sums


def test_a_perfect_residual():
    native, ridge = drawn(1), drawn(2)
    sums = residual(native, ridge, native)
    assert sums.cosine == pytest.approx(1)
    assert sums.removed == 1
    assert sums.error_ratio == 0
    expected = float((native - ridge).norm() / ridge.norm())
    assert sums.rms_ratio == pytest.approx(expected)


def test_an_orthogonal_residual_of_half_the_size():
    native, ridge = drawn(1), drawn(2)
    missing = native - ridge
    across = torch.stack([-missing[..., 1], missing[..., 0], -missing[..., 3], missing[..., 2]], -1)
    sums = residual(native, ridge, ridge + across / 2)
    assert sums.cosine == pytest.approx(0, abs=1e-12)
    assert sums.removed == pytest.approx(-0.25)
    assert sums.error_ratio == pytest.approx(math.sqrt(1.25))


def test_no_residual_and_a_half_one():
    native, ridge = drawn(1), drawn(2)
    none = residual(native, ridge, ridge)
    assert (none.rms_ratio, none.cosine, none.removed, none.error_ratio) == (0, 0, 0, 1)
    half = residual(native, ridge, (native + ridge) / 2)
    assert half.cosine == pytest.approx(1)
    assert half.removed == pytest.approx(0.75)
    assert half.error_ratio == pytest.approx(0.5)


def test_jensen_shannon_is_between_0_and_ln_2():
    first, second = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert jensen_shannon(first, second).tolist() == pytest.approx([math.log(2), 0.0])
    one, other = drawn(3, (6, 9)).softmax(-1), drawn(4, (6, 9)).softmax(-1)
    found = jensen_shannon(one, other)
    assert torch.allclose(found, jensen_shannon(other, one))
    assert bool(((found > 0) & (found < math.log(2))).all())
    middle = (one + other) / 2
    expected = ((one * (one / middle).log()).sum(-1) + (other * (other / middle).log()).sum(-1)) / 2
    assert torch.allclose(found, expected)


def test_entropy_and_top_mass():
    uniform, certain = torch.full((20,), 1 / 20), torch.eye(20)[3]
    assert entropy(uniform).item() == pytest.approx(math.log(20))
    assert entropy(certain).item() == 0
    assert top_mass(uniform).item() == pytest.approx(0.5)
    assert top_mass(certain).item() == 1
    assert top_mass(torch.tensor([0.25, 0.75])).item() == 1


def test_next_token_figures():
    native = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log()
    other = torch.tensor([[0.9, 0.1], [0.5, 0.6]]).log()
    found = next_token_figures(native, other)
    assert found["kl"][0].item() == pytest.approx(0, abs=1e-7)
    p, q = (0.9, 0.1), (0.5 / 1.1, 0.6 / 1.1)
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert found["kl"][1].item() == pytest.approx(expected, rel=1e-5)
    assert found["agreement"].tolist() == [1, 0]
    assert 0 < found["js"][1].item() < math.log(2)


def test_attention_within_the_prefix_and_its_mass():
    native = torch.tensor([0.2, 0.2, 0.6])
    # The same within the prefix, but half of it moved to the query.
    other = torch.tensor([0.1, 0.1, 0.8])
    found = {n: v.item() for n, v in prefix_attention_figures(native, other, 2).items()}
    assert found["attention_js"] == pytest.approx(0, abs=1e-7)
    assert found["attention_entropy"] == pytest.approx(math.log(2))
    assert found["prefix_mass_native"] == pytest.approx(0.4)
    assert found["prefix_mass"] == pytest.approx(0.2)
    swapped = prefix_attention_figures(
        torch.tensor([0.5, 0.0, 0.5]), torch.tensor([0, 0.5, 0.5]), 2
    )
    assert swapped["attention_js"].item() == pytest.approx(math.log(2))


def test_mean_cosine_is_over_tokens():
    first = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    assert mean_cosine(first, second).item() == pytest.approx(0.5)
