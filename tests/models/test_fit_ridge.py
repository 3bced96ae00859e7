"""The solve: against lstsq, in every λ mode, and when the Gram is singular."""

import pytest
import torch

from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.ridge import (
    HELD_OUT_LAMBDAS,
    centred,
    lambda_unit,
    r_squared,
    solve,
    solve_held_out,
)
from tests.models.synthetic_moments import accumulate, linear_data

SOURCES, TARGET = (0, 2), 1


def system(data=None, split="train"):
    moments = accumulate(linear_data(400, seed=1) if data is None else data)
    return moments.system(split, "K", SOURCES, (TARGET,))


def stacked_lstsq(data, added):
    """Ridge as least squares on data with ``sqrt(λ) I`` rows below."""
    x = torch.cat([data["K"][0][:, 8 * j : 8 * j + 8] for j in SOURCES], 1).double()
    y = data["K"][1][:, 8:16].double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    identity = torch.eye(x.shape[1], dtype=torch.float64) * added**0.5
    rows = torch.cat([x - mean_x, identity])
    targets = torch.cat([y - mean_y, torch.zeros(x.shape[1], 8, dtype=torch.float64)])
    weight = torch.linalg.lstsq(rows, targets, driver="gelsd").solution
    return weight, mean_y - mean_x @ weight


@pytest.mark.parametrize("mode", ["sum", "mean", "relative"])
@pytest.mark.parametrize("value", [0.0, 0.01, 3.0])
def test_every_mode_matches_least_squares(mode, value):
    data = linear_data(400, seed=1)
    unit = {
        "sum": 1.0,
        "mean": 400.0,
        "relative": float(centred(system(data))[0].diagonal().mean()),
    }
    ridge = solve(system(data), value, mode)
    weight, bias = stacked_lstsq(data, value * unit[mode])
    assert (ridge.weight - weight).abs().max() < 1e-7
    assert (ridge.bias - bias).abs().max() < 1e-6
    assert ridge.value == value
    assert ridge.warning == ""


def test_modes_differ_by_what_lambda_is_added_to():
    gram = centred(system())[0]
    assert lambda_unit(gram, 400, "sum") == 1
    assert lambda_unit(gram, 400, "mean") == 400
    assert lambda_unit(gram, 400, "relative") == pytest.approx(float(gram.diagonal().mean()))


def test_one_solve_of_all_heads_is_one_solve_a_head():
    whole = solve(system(), 0.1, "mean")
    for head in (0, 1):
        columns = slice(4 * head, 4 * head + 4)
        alone = solve(system().part(slice(None), columns), 0.1, "mean")
        assert (whole.weight[:, columns] - alone.weight).abs().max() < 1e-12
        assert (whole.bias[columns] - alone.bias).abs().max() < 1e-12


def test_a_singular_gram_raises_lambda_and_says_so():
    data = linear_data(400, seed=1)
    x = data["K"][0]
    x[:, 16:24] = x[:, 0:8]  # layer 2 repeats layer 0
    ridge = solve(system(data), 0.0, "sum")
    assert ridge.value > 0
    assert "singular at lambda 0; raised to" in ridge.warning
    assert "mode sum" in ridge.warning
    assert r_squared(system(data), ridge, 4) > 0.3
    calm = solve(system(data), 1.0, "sum")
    assert calm.value == 1.0
    assert calm.warning == ""


def test_lambda_escalates_in_tens():
    data = linear_data(400, seed=1)
    data["K"][0][:, 16:24] = data["K"][0][:, 0:8]
    asked = 1e-16
    ridge = solve(system(data), asked, "relative")
    steps = torch.log10(torch.tensor(ridge.value / asked)).item()
    assert ridge.value > asked
    assert steps == pytest.approx(round(steps), abs=1e-3) or ridge.value == pytest.approx(1e-13)


def test_constant_channels_do_no_harm():
    data = linear_data(400, seed=1)
    data["K"][0][:, 3] = 7.0
    ridge = solve(system(data), 0.01, "sum")
    assert torch.isfinite(ridge.weight).all()
    assert ridge.weight[3].abs().max() < 1e-6
    data["K"][1][:, 8:16] = 2.5  # a target that never changes
    constant = solve(system(data), 0.01, "sum")
    assert (constant.bias - 2.5).abs().max() < 1e-5
    assert r_squared(system(data), constant, 4) is None


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_lambda_that_is_none_is_refused(value):
    with pytest.raises(InvalidRequest, match="lambda is"):
        solve(system(), value, "sum")


def test_data_that_are_not_finite_end_in_an_error():
    data = linear_data(400, seed=1)
    data["K"][0][5, 5] = float("nan")
    with pytest.raises(InvalidRequest, match="finite"):
        solve(system(data), 0.01, "sum")


def test_the_held_out_lambda_is_the_best_of_its_candidates():
    train, other = linear_data(40, seed=1, noise=30.0), linear_data(400, seed=9, noise=30.0)
    moments = accumulate(train, other)
    parts = [moments.system(s, "K", (0, 1, 2, 3), (1,)) for s in ("train", "held_out")]
    chosen = solve_held_out(*parts, 4)
    scores = {v: r_squared(parts[1], solve(parts[0], v, "relative"), 4) for v in HELD_OUT_LAMBDAS}
    assert chosen.value == max(scores, key=scores.get)
    assert chosen.value > 0, "with 40 noisy rows for 32 unknowns a penalty helps"
