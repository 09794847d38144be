"""TOPR: failures fade as they become unlikely, successes keep their weight."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.methods.objectives.kit import OPEN, Turn, coefficients, evaluate, turns_of
from trace_async.config import ObjectiveConfig


def topr(**options: float) -> ObjectiveConfig:
    return replace(OPEN, kind="topr", options=options)


@pytest.mark.parametrize(("advantage", "coefficient"), [(1.0, 1.0), (-1.0, -1.0)])
def test_one_token_has_its_number_of_the_table(advantage: float, coefficient: float) -> None:
    """Behaviour probability .2, trained .5: a ratio of 2.5 counts as 1 for either sign."""
    turns = turns_of(Turn(mu=(0.2,), leaf_advantage=advantage))
    found = coefficients(torch.tensor([0.5]).log(), turns, topr())
    assert found.tolist() == pytest.approx([coefficient])
    assert evaluate(torch.tensor([0.5]).log(), turns, topr()).touched.tolist() == [True]


@pytest.mark.parametrize(("advantage", "weight"), [(1.0, 1.0), (-1.0, 0.25)])
def test_what_became_unlikely_fades_if_it_failed(advantage: float, weight: float) -> None:
    turns = turns_of(Turn(mu=(0.5, 0.5), leaf_advantage=advantage))
    logprobs = torch.tensor([0.25, 0.25]).log()  # the product of the path: 1/4
    surrogate = evaluate(logprobs, turns, topr())
    assert coefficients(logprobs, turns, topr()).tolist() == pytest.approx([advantage * weight] * 2)
    assert surrogate.touched.tolist() == [advantage > 0] * 2
    assert float(surrogate.loss) == pytest.approx(-advantage * weight * 2 * math.log(0.25), rel=1e-6)


def test_windows_are_the_general_form() -> None:
    windows = topr(positive_low=0.5, positive_high=2.0, negative_low=0.1, negative_high=0.8)
    found = []
    for advantage in (1.0, -1.0):
        for shift in (-3.0, -0.5, 0.5, 3.0):
            turns = turns_of(Turn(mu=(0.5,), leaf_advantage=advantage))
            found.append(float(coefficients(turns.behaviour_logprobs + shift, turns, windows)))
    middle = [math.exp(-0.5), math.exp(0.5)]
    assert found == pytest.approx([0.5, *middle, 2.0, -0.1, -middle[0], -0.8, -0.8])


FORK = (
    Turn(mu=(0.5,), trained=False),
    Turn(mu=(0.5,), parent=0, leaf_advantage=1.0, mass=0.5),
    Turn(mu=(0.5,), parent=0, leaf_advantage=-1.0, mass=0.25),
    Turn(mu=(0.5,), leaf_advantage=-1.0, mass=0.25),
)


def test_a_shared_turn_has_the_weighed_advantages_of_its_leaves_and_the_ratio_is_that_of_the_whole_path() -> None:
    turns = turns_of(*[replace(turn, trained=True) for turn in FORK])
    logprobs = turns.behaviour_logprobs + torch.tensor([-0.2, 0.0, -0.3, -0.1])
    fails = [-0.25 * math.exp(-0.5), -0.25 * math.exp(-0.1)]
    found = coefficients(logprobs, turns, topr()).tolist()
    assert found == pytest.approx([0.5 + fails[0], 0.5, fails[0], fails[1]])


def test_an_over_age_turn_counts_in_the_ratio_and_gets_no_gradient() -> None:
    turns = turns_of(*FORK)
    logprobs = turns.behaviour_logprobs + torch.tensor([-0.2, 0.0, 0.0, 0.0])
    found = coefficients(logprobs, turns, topr()).tolist()
    assert found == pytest.approx([0.0, 0.5, -0.25 * math.exp(-0.2), -0.25])


def test_a_number_that_is_none_takes_out_the_leaves_below_it() -> None:
    turns = turns_of(*FORK)
    logprobs = turns.behaviour_logprobs.clone()
    logprobs[0] = math.nan
    assert coefficients(logprobs, turns, topr()).tolist() == pytest.approx([0.0, 0.0, 0.0, -0.25])
