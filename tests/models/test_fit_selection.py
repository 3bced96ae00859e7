"""Choosing layers: what was planted is found."""

import msgspec
import pytest
import torch

from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.selection import (
    all_head_scores,
    joint_score,
    same_head_scores,
    select_layers,
)
from tests.models.synthetic_moments import RECEIVER, SENDER, accumulate, linear_data

PLANTED = {0: (2,), 1: (0,), 2: (3,)}


def select(moments, k, rule, **kwargs):
    arguments = {"value": 1e-6, "mode": "relative"} | kwargs
    return select_layers(moments, SENDER, RECEIVER, k=k, rule=rule, **arguments)


def head_by_head(count, seed, held=None):
    """Targets whose heads follow from the same head of one layer, permuted."""
    generator = torch.Generator().manual_seed(7)
    data = linear_data(count, seed=seed)
    for x, y in data.values():
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
        for target, (source,) in PLANTED.items():
            for head in (0, 1):
                turn = torch.randn(4, 4, generator=generator)
                read = x[:, 8 * source + 4 * head : 8 * source + 4 * head + 4]
                y[:, 8 * target + 4 * head : 8 * target + 4 * head + 4] = read @ turn
        y.add_(noise, alpha=0.1)
    return data


@pytest.mark.parametrize("rule", ["same-head", "all-head", "greedy"])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_planted_permutation_of_layers_is_recovered(rule, held_out):
    other = head_by_head(200, 5) if held_out else None
    moments = accumulate(head_by_head(400, 1), other)
    assert select(moments, 1, rule) == [PLANTED[target] for target in range(3)]


def test_all_heads_see_what_the_same_head_does_not():
    data = head_by_head(400, 1)
    for _, y in data.values():
        y[:, :8] = y[:, [4, 5, 6, 7, 0, 1, 2, 3]]  # the heads of target layer 0 change places
    moments = accumulate(data)
    same = same_head_scores(moments, SENDER, RECEIVER)
    every = all_head_scores(moments, RECEIVER, 1e-6, "relative")
    assert same[0].max() < 0.2
    assert every[0].argmax() == 2
    assert every[0, 2] > 0.9


def test_sets_are_ascending_and_ties_go_to_the_lower_layer():
    data = linear_data(300, seed=1)
    for x, _ in data.values():
        x[:, 8:16] = x[:, 0:8]
        x[:, 16:24] = x[:, 0:8]
    moments = accumulate(data)
    sets = select(moments, 3, "all-head")
    assert all(list(layers) == sorted(layers) for layers in sets)
    scores = all_head_scores(moments, RECEIVER, 1e-6, "relative")
    assert torch.equal(scores[:, 0], scores[:, 1])
    for layers in select(moments, 1, "all-head"):
        assert layers[0] not in (1, 2)


def test_greedy_is_never_worse_than_the_best_singles():
    train, other = (
        linear_data(500, seed=s, only={0: (1, 3), 1: (0, 2), 2: (1, 2)}) for s in (1, 6)
    )
    for data in (train, other):
        for x, _ in data.values():
            # Layer 0 is a copy of layer 1 with noise: a good single, useless beside it.
            x[:, 0:8] = x[:, 8:16] + 0.3 * x[:, 0:8]
    moments = accumulate(train, other)
    singles, greedy = select(moments, 2, "all-head"), select(moments, 2, "greedy")
    found = [
        [joint_score(moments, sets[t], t, 4, 1e-6, "relative") for t in range(3)]
        for sets in (singles, greedy)
    ]
    assert all(b >= a for a, b in zip(*found, strict=True))


def test_the_text_that_was_held_out_decides():
    train = linear_data(300, seed=1, only={0: (0,), 1: (1,), 2: (2,)}, noise=0.1)
    other = linear_data(300, seed=5, only={0: (3,), 1: (1,), 2: (2,)}, noise=0.1)
    scores = all_head_scores(accumulate(train, other), RECEIVER, 1e-6, "relative")
    alone = all_head_scores(accumulate(train), RECEIVER, 1e-6, "relative")
    assert alone[0, 0] > 0.95
    assert scores[0, 0] < 0.1


@pytest.mark.parametrize("k", [0, 5])
def test_k_must_fit_the_sender(k):
    with pytest.raises(InvalidRequest, match=f"k is {k}; the sender has 4 layers"):
        select(accumulate(linear_data(50, seed=1)), k, "all-head")


def test_an_unknown_rule_is_refused():
    with pytest.raises(InvalidRequest, match="selection is 'best'"):
        select(accumulate(linear_data(50, seed=1)), 1, "best")


def test_layers_that_slide_are_never_read():
    sliding = msgspec.structs.replace(SENDER[0], attention="sliding", window=8)
    sender = (SENDER[0], sliding, SENDER[0], SENDER[0])
    moments = accumulate(linear_data(300, seed=1), sender=sender)
    assert moments.candidates(0) == (0, 2, 3)
    chosen = select_layers(
        moments, sender, RECEIVER, k=3, rule="all-head", value=1e-6, mode="relative"
    )
    assert chosen == [(0, 2, 3)] * 3
