"""The loss: directions, terms, alignment and what counts."""

import math

import pytest
import torch

from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.aligned import align
from cachelink_core.fit.losses import LOSS_NAMES, forward_kl, functional_loss, mean_counted
from cachelink_core.fit.train_data import Example
from cachelink_core.fit.train_settings import TrainSettings

CPU = torch.device("cpu")


def logits(*rows):
    return torch.tensor([rows]).log()


def loss(mapped, native, targets, name, **kwargs):
    counted = torch.ones(targets.shape, dtype=torch.bool)
    return functional_loss(mapped, native, targets, counted, name=name, **kwargs)


def test_kl_of_a_distribution_with_itself_is_zero():
    drawn = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(forward_kl(drawn, drawn), torch.zeros(3, 5))
    assert torch.allclose(forward_kl(drawn, drawn + 3.0), torch.zeros(3, 5), atol=1e-6)


def test_forward_and_reverse_are_told_apart():
    native, mapped = logits([0.9, 0.1]), logits([0.5, 0.5])
    targets = torch.tensor([[0]])
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert loss(mapped, native, targets, "kl").total.item() == pytest.approx(forward, rel=1e-5)
    assert loss(mapped, native, targets, "rkl").total.item() == pytest.approx(reverse, rel=1e-5)
    assert abs(forward - reverse) > 0.1


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_each_name_has_its_terms(name):
    native, mapped, targets = logits([0.7, 0.3]), logits([0.4, 0.6]), torch.tensor([[1]])
    entropy = -math.log(0.6)
    parts = {
        "kl": 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6),
        "rkl": 0.4 * math.log(0.4 / 0.7) + 0.6 * math.log(0.6 / 0.3),
    }
    kinds = name.split("+")
    alone = len(kinds) == 1
    expected = entropy * ("ce" in kinds)
    expected += sum(parts[kind] * (1 if alone else 2.5) for kind in kinds if kind != "ce")
    found = loss(mapped, native, targets, name, kl_weight=2.5)
    assert found.total.item() == pytest.approx(expected, rel=1e-5)
    assert found.cross_entropy.item() == pytest.approx(entropy, rel=1e-5)


def test_temperature_keeps_the_scale_of_gradients_and_is_not_in_the_reported_kl():
    native = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(1)).double() * 1e-2
    mapped = native + 1e-2 * torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(2))
    targets = torch.zeros(1, 4, dtype=torch.long)
    plain, warm = (loss(mapped, native, targets, "kl", temperature=t) for t in (1.0, 4.0))
    # For near distributions KL falls with the square of the temperature.
    assert warm.total.item() == pytest.approx(plain.total.item(), rel=0.02)
    assert warm.divergence.item() == pytest.approx(plain.total.item(), rel=1e-5)


def test_what_does_not_count_does_not_matter():
    native, mapped = torch.randn(2, 1, 3, 5, generator=torch.Generator().manual_seed(3))
    counted = torch.tensor([[True, False, True]])
    targets = torch.tensor([[1, 2, 3]])
    found = functional_loss(mapped, native, targets, counted)
    mapped[:, 1] += 100 * torch.randn(5, generator=torch.Generator().manual_seed(4))
    assert torch.equal(found.total, functional_loss(mapped, native, targets, counted).total)


def test_examples_or_tokens_weigh_the_same():
    values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 99.0, 99.0]])
    counted = torch.tensor([[True, True, True], [True, False, False]])
    assert mean_counted(values, counted, "example").item() == 3.0
    assert mean_counted(values, counted, "token").item() == 2.0


def test_the_last_query_token_predicts_the_first_of_the_continuation():
    short, long = Example((0,), (1, 2, 3), (4, 5)), Example((0,), (6,), (7, 8, 9))
    aligned = align([short, long], "continuation", CPU)
    assert aligned.ids == ((1, 2, 3, 4), (6, 7, 8))
    assert aligned.targets[aligned.counted].tolist() == [4, 5, 7, 8, 9]
    assert aligned.counted[0].tolist() == [False, False, True, True]
    assert aligned.counted[1].tolist() == [True, True, True, False]
    whole = align([short, long], "query+continuation", CPU)
    assert whole.targets[whole.counted].tolist() == [2, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("loss", "mse"),
        ("temperature", 0.0),
        ("kl_weight", -1.0),
        ("warm_up", 1.0),
        ("clip", float("nan")),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(InvalidRequest, match=rf"^{field} is .*must be"):
        TrainSettings(**{field: value})


def test_the_rate_rises_and_falls():
    settings = TrainSettings(steps=100, warm_up=0.1, learning_rate=2.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert 0 < rates[99] < 1e-2
    assert rates[10:] == sorted(rates[10:], reverse=True)
