"""GSPO by turns and by paths: one ratio, one clip, and what each token gets of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.methods.objectives.kit import OPEN, Turn, coefficients, evaluate, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import GspoOptions

LOG_RATIOS = torch.tensor([0.1, -0.05, 0.15])
GEOMETRIC, PRODUCT = 1.068939, 1.221403


def gspo(level: str, low: float = 0.9, high: float = 9.0) -> ObjectiveConfig:
    return replace(OPEN, kind=f"gspo_{level}", options={"clip_low": low, "clip_high": high})


@pytest.mark.parametrize("level", ["turn", "path"])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_three_tokens_have_the_geometric_mean_of_their_ratios_and_not_the_product(level: str, advantage: float) -> None:
    turns = turns_of(Turn(mu=(0.5, 0.5, 0.5), leaf_advantage=advantage))
    logprobs = turns.behaviour_logprobs + LOG_RATIOS
    assert math.exp(float(LOG_RATIOS.sum())) == pytest.approx(PRODUCT, abs=1e-6)

    surrogate = evaluate(logprobs, turns, gspo(level))

    assert float(surrogate.loss) == pytest.approx(-advantage * GEOMETRIC, rel=1e-6)
    assert not surrogate.touched.any()
    assert coefficients(logprobs, turns, gspo(level)).tolist() == pytest.approx([advantage * GEOMETRIC / 3] * 3)


@pytest.mark.parametrize("level", ["turn", "path"])
@pytest.mark.parametrize(
    ("shift", "advantage", "clipped"),
    [(0.1, 1.0, True), (0.1, -1.0, False), (-0.1, 1.0, False), (-0.1, -1.0, True), (0.001, 1.0, False)],
)
def test_a_sequence_beyond_the_clip_stops_where_it_would_go_on(
    level: str, shift: float, advantage: float, clipped: bool
) -> None:
    turns = turns_of(Turn(mu=(0.5, 0.5), leaf_advantage=advantage))
    logprobs, config = turns.behaviour_logprobs + shift, replace(OPEN, kind=f"gspo_{level}")
    surrogate = evaluate(logprobs, turns, config)
    expected = 0.0 if clipped else advantage * math.exp(shift) / 2
    assert coefficients(logprobs, turns, config).tolist() == pytest.approx([expected] * 2, abs=1e-6)
    assert surrogate.touched.tolist() == [clipped] * 2
    bound = 1 + math.copysign(GspoOptions().clip_high, advantage) if clipped else math.exp(shift)
    assert float(surrogate.loss) == pytest.approx(-advantage * bound, rel=1e-6)


TREE = (  # r above a and b; a above a1 (A = 2/3) and a2; b above b1
    Turn(mu=(0.5, 0.5, 0.5)),
    Turn(mu=(0.5, 0.5), parent=0),
    Turn(mu=(0.5,), parent=1, leaf_advantage=2 / 3, mass=1 / 3),
    Turn(mu=(0.5, 0.5), parent=1, leaf_advantage=-1 / 3, mass=1 / 3),
    Turn(mu=(0.5, 0.5), parent=0),
    Turn(mu=(0.5, 0.5, 0.5), parent=4, leaf_advantage=-1 / 3, mass=1 / 3),
)


def test_a_shared_token_has_what_the_paths_below_it_that_are_not_clipped_have() -> None:
    """C = sum of mass A s 1[not clipped] / len; moving the token of a1 by .6 over a path of 6 tokens clips its path."""
    turns = turns_of(*TREE)
    logprobs = turns.behaviour_logprobs.clone()
    logprobs[5] += 0.6

    config = gspo("path", low=0.05, high=0.05)
    found = coefficients(logprobs, turns, config).tolist()

    a1, a2, b1 = 0.0, -1 / 9 / 7, -1 / 9 / 8
    expected = [*[a1 + a2 + b1] * 3, *[a1 + a2] * 2, a1, *[a2] * 2, *[b1] * 5]
    assert found == pytest.approx(expected, abs=1e-6)
    assert evaluate(logprobs, turns, config).touched.tolist() == [*[True] * 6, *[False] * 7]


def test_a_turn_with_leaves_of_both_signs_has_a_clip_for_each() -> None:
    turns = turns_of(*TREE)
    logprobs = turns.behaviour_logprobs.clone()
    logprobs[:3] += 0.1  # r: +2/9 is clipped, -2/9 is not
    found = coefficients(logprobs, turns, gspo("turn", low=0.05, high=0.05)).tolist()
    assert found[:3] == pytest.approx([-2 / 9 * math.exp(0.1) / 3] * 3, abs=1e-6)


def test_an_over_age_turn_counts_in_the_path_and_gets_no_gradient() -> None:
    turns = turns_of(Turn(mu=(0.5, 0.5), trained=False), Turn(mu=(0.5, 0.5), parent=0, leaf_advantage=1.0))
    logprobs = turns.behaviour_logprobs + torch.tensor([0.2, 0.2, 0.0, 0.0])
    found = coefficients(logprobs, turns, gspo("path")).tolist()
    assert found == pytest.approx([0.0, 0.0, *[math.exp(0.1) / 4] * 2])


@pytest.mark.parametrize("trained", [True, False])
def test_a_number_that_is_none_takes_out_the_paths_through_it(trained: bool) -> None:
    turns = turns_of(*[replace(turn, trained=trained or j != 1) for j, turn in enumerate(TREE)])
    logprobs = turns.behaviour_logprobs.clone()
    logprobs[3] = math.nan  # in a: a1 and a2 are gone, b1 is left
    found = coefficients(logprobs, turns, gspo("path")).tolist()
    b1 = -1 / 9 / 8
    assert found == pytest.approx([*[b1] * 3, *[0.0] * 5, *[b1] * 5], abs=1e-6)
