"""Sums along the branches of trees, against walking over parents one by one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods.objectives.kit import Turn, turns_of
from trace_async.methods.objectives.trees import Branches, unreadable


def random_turns(rng: np.random.Generator, num_turns: int) -> list[Turn]:
    """Turns of two groups in any order in which parents stand first."""
    turns: list[Turn] = []
    for j in range(num_turns):
        parent = int(rng.integers(-1, j)) if j else -1
        turns.append(Turn(parent=parent, group=turns[parent].group if parent >= 0 else int(rng.integers(0, 2))))
    return turns


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_sums_above_and_below_are_those_of_a_walk(seed: int, num_turns: int) -> None:
    rng = np.random.default_rng(seed)
    turns = random_turns(rng, num_turns)
    values = torch.from_numpy(rng.integers(-5, 6, num_turns).astype(np.float32)).requires_grad_()
    above: list[set[int]] = []
    for j, turn in enumerate(turns):
        above.append({j} | (above[turn.parent] if turn.parent >= 0 else set()))

    branches = Branches(turns_of(*turns))

    on_path = [float(values.detach()[list(path)].sum()) for path in above]
    below = [float(values.detach()[[j in path for path in above]].sum()) for j in range(num_turns)]
    assert branches.sum_on_path(values).tolist() == on_path
    assert branches.sum_below(values).tolist() == below
    (slope,) = torch.autograd.grad(branches.sum_on_path(values)[-1], values)
    assert slope.tolist() == [float(j in above[-1]) for j in range(num_turns)]


def test_places_are_turns_and_then_prompts() -> None:
    branches = Branches(turns_of(Turn(), Turn(group=1), Turn(parent=0), Turn(parent=0), Turn(parent=1, group=1)))
    assert branches.place.tolist() == [5, 6, 0, 0, 1]
    assert branches.sum_at_place(torch.ones(5)).tolist() == [2.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_a_token_that_is_no_number_makes_its_turn_unreadable_trained_or_not() -> None:
    turns = turns_of(Turn(mu=(0.5, 0.5)), Turn(trained=False), Turn())
    logprobs = turns.behaviour_logprobs + torch.tensor([0.0, torch.nan, torch.inf, 0.0])
    assert unreadable(logprobs, turns).tolist() == [True, True, False]
