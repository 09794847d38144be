"""The second-moment budget in front of an objective: what it keeps out of the gradient, and that nothing else moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.methods.objectives.kit import UNCAPPED, Turn, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import KINDS, Scope
from trace_async.methods.objectives.measures import finish_stats
from trace_async.methods.objectives.registry import ChosenObjective
from trace_async.methods.objectives.turns import TurnTensors

SIZES = (0.05, 0.1, 0.2, 0.5)  # mean square .075625, without the last .0175


def gradient(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig) -> tuple[Tensor, dict[str, float]]:
    variable = logprobs.detach().clone().requires_grad_()
    loss, stats = ChosenObjective(config)(variable, turns)
    (found,) = torch.autograd.grad(loss, variable)
    return found, finish_stats(stats)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (0.0, [True, True, True, True, True]),  # off
        (0.04, [True, True, True, False, True]),
        (0.0757, [True, True, True, True, True]),
        (0.0174, [True, True, False, False, True]),
        (0.001, [False, False, False, False, True]),  # nothing harmful fits
    ],
)
def test_the_furthest_harmful_tokens_lose_their_gradient_until_the_rest_is_within(
    sign: float, budget: float, kept: list[bool]
) -> None:
    """The last token has moved the other way, which no clip would touch, and does not count."""
    turns = turns_of(Turn(mu=(0.1,) * 5, advantage=sign))
    logprobs = turns.behaviour_logprobs + sign * torch.tensor([*SIZES, -0.9])
    slopes, metrics = gradient(logprobs, turns, replace(UNCAPPED, m2_budget=budget))
    free, _ = gradient(logprobs, turns, UNCAPPED)
    assert torch.equal(slopes, torch.where(torch.tensor(kept), free, 0.0))
    assert metrics["objective/held_back_share"] == pytest.approx(kept.count(False) / 5)


def test_a_token_counts_with_the_mass_of_its_turn() -> None:
    turns = turns_of(Turn(mu=(0.1,), mass=3.0), Turn(mu=(0.1,), mass=1.0))
    logprobs = turns.behaviour_logprobs + torch.tensor([0.1, 0.5])  # (3 x .01 + .25) / 4 = .07
    for budget, kept in ((0.0701, True), (0.0699, False)):
        slopes, _ = gradient(logprobs, turns, replace(UNCAPPED, m2_budget=budget))
        assert bool(slopes[1]) == kept


def test_vetoes_see_the_tokens_that_are_held_back() -> None:
    """Geometric mean ratio e^.3 = 1.35; without its furthest token the turn would pass the window."""
    turns = turns_of(Turn(mu=(0.1, 0.1)))
    logprobs = turns.behaviour_logprobs + torch.tensor([0.1, 0.5])
    slopes, metrics = gradient(logprobs, turns, replace(UNCAPPED, veto_high=1.3, m2_budget=0.01))
    assert not slopes.any()
    assert metrics["objective/vetoed_share"] == 1.0
    assert metrics["objective/held_back_share"] == 0.0  # a vetoed turn's tokens are not on the budget


@pytest.mark.parametrize("kind", ["tree_tis", "icepop"])
def test_with_a_budget_an_objective_sees_the_whole_update(kind: str) -> None:
    assert ChosenObjective(ObjectiveConfig(kind=kind, m2_budget=0.0)).scope is Scope.TURN
    assert ChosenObjective(ObjectiveConfig(kind=kind, m2_budget=0.04)).scope is Scope.STEP


@pytest.mark.parametrize("kind", ["m2po", "vtrace", "lpo", "reinforce", "ppo", "dppo", "gspo_turn"])
def test_a_budget_does_nothing_before_an_objective_that_has_its_own_bounds_or_wants_none(kind: str) -> None:
    turns = turns_of(Turn(mu=(0.1,) * 4), Turn(mu=(0.1,) * 4, advantage=-1.0))
    logprobs = turns.behaviour_logprobs + torch.tensor([*SIZES, *SIZES])
    braked, free = (gradient(logprobs, turns, replace(UNCAPPED, kind=kind, m2_budget=m2)) for m2 in (0.001, 0.0))
    assert torch.equal(braked[0], free[0])
    assert braked[1]["objective/held_back_share"] == 0.0
    assert ChosenObjective(ObjectiveConfig(kind=kind)).scope is KINDS[kind].scope
