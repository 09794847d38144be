"""The second-moment budget of M2PO: its solver's worked numbers and what it drops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.methods.objectives.kit import UNCAPPED, Turn, coefficients, evaluate, turns_of
from trace_async.methods.objectives.m2po import clip_limit, mask_limit, masses_by_sign

SIZES = (0.05, 0.1, 0.2, 0.5)


def test_the_second_moment_solver_has_its_known_numbers() -> None:
    sizes, ones = torch.tensor(SIZES), torch.ones(4)
    assert float(sizes.square().mean()) == pytest.approx(0.075625)

    kept = sizes[sizes <= mask_limit(sizes, ones, 0.04)]
    tau = clip_limit(sizes, ones, 0.04)

    assert kept.tolist() == pytest.approx([0.05, 0.1, 0.2])
    assert float(kept.square().mean()) == pytest.approx(0.0175)
    assert tau == pytest.approx(0.2)
    assert float(sizes.clamp(max=tau).square().mean()) == pytest.approx(0.023125)
    assert (1 - math.exp(-tau), math.exp(tau) - 1) == pytest.approx((0.181269, 0.221403), abs=1e-6)


@pytest.mark.parametrize("limit", [mask_limit, clip_limit])
def test_the_solver_at_its_ends(limit: Callable[[Tensor, Tensor, float], float]) -> None:
    none, one = torch.zeros(0), torch.ones(1)
    assert limit(none, none, 0.04) == math.inf
    assert limit(one * 0.2, one, 0.04001) == math.inf
    assert limit(one * 0.3, one, 0.04) == 0.0
    order = torch.tensor([2, 0, 3, 1])
    weights = torch.tensor([1.0, 2.0, 3.0, 0.5])
    sizes = torch.tensor(SIZES)
    assert limit(sizes[order], weights[order], 0.03) == limit(sizes, weights, 0.03)
    doubled = limit(torch.cat([sizes, sizes]), torch.cat([weights, weights]) / 2, 0.03)
    assert doubled == limit(sizes, weights, 0.03)


def test_tokens_equally_far_are_dropped_together() -> None:
    sizes = torch.tensor([0.1, 0.3, 0.3])  # .1 and one .3 have mean square .05, all have .0633
    assert mask_limit(sizes, torch.ones(3), 0.055) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [True, True, True, False, True]),  # the mask: .5 is dropped
        ({"variant": "clip"}, [True, True, True, False, True]),  # the floor: up to log 1.5 = .405
        ({"variant": "clip", "floor_high": 0.0}, [True, True, True, False, True]),  # tau itself: up to .2
        ({"variant": "clip", "floor_high": 0.7}, [True, True, True, True, True]),  # up to log 1.7 = .53
        ({"budget": 0.0757}, [True, True, True, True, True]),
    ],
)
def test_m2po_drops_what_its_budget_does_not_pay_for(options: dict[str, object], kept: list[bool]) -> None:
    """Log-ratios as in the solver's numbers, and one of -2 that no clip would touch and that does not count."""
    config = replace(UNCAPPED, kind="m2po", options=options)
    turns = turns_of(Turn(mu=(0.05,) * 5))
    logprobs = turns.behaviour_logprobs + torch.tensor([*SIZES, -2.0])
    assert coefficients(logprobs, turns, config).bool().tolist() == kept
    assert evaluate(logprobs, turns, config).touched.tolist() == [not each for each in kept]


def test_m2po_bounds_bad_tokens_from_below_with_its_floor() -> None:
    config = replace(UNCAPPED, kind="m2po", options={"variant": "clip"})
    turns = turns_of(Turn(mu=(0.5,) * 4, advantage=-1.0))
    for last, kept in ((math.log(0.71), True), (math.log(0.69), False)):  # one token at 1 - .3 = .7
        logprobs = turns.behaviour_logprobs + torch.tensor([-0.05, -0.3, -0.3, last])
        assert bool(coefficients(logprobs, turns, config)[3]) == kept


def test_masses_by_sign_are_those_of_the_leaves_below() -> None:
    leaves = [Turn(parent=0, leaf_advantage=a, mass=m) for a, m in ((2.0, 0.1), (-1.0, 0.2), (0.0, 0.3), (1.0, 0.4))]
    positive, negative = masses_by_sign(turns_of(Turn(), *leaves))
    assert positive.tolist() == pytest.approx([0.5, 0.1, 0.0, 0.0, 0.4])
    assert negative.tolist() == pytest.approx([0.2, 0.0, 0.2, 0.0, 0.0])
    by_turn = masses_by_sign(turns_of(Turn(advantage=-0.5, mass=0.7), Turn(parent=0, advantage=0.2, mass=0.7)))
    assert [each.tolist() for each in by_turn] == [pytest.approx([0.0, 0.7]), pytest.approx([0.7, 0.0])]
