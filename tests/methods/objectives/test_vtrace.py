"""V-trace on trees: the known numbers of the backup, and the gradient by exact enumeration of every tree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import group_from_spec, random_group, spec
from tests.methods.objectives.kit import OPEN, UNCAPPED, Turn, coefficients, evaluate, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.core.rows import PackItem, Signal
from trace_async.core.turn_table import make_table
from trace_async.core.types import Group
from trace_async.methods.credit import sibling_credit
from trace_async.methods.objectives.trees import Branches
from trace_async.methods.objectives.turns import TurnTensors, to_tensors
from trace_async.methods.objectives.vtrace import Values, back_up

UNTRUNCATED = {"future": "product", "future_bar": 1e6, "prefix": "product", "prefix_bar": 1e6}


def vtrace(base: ObjectiveConfig = UNCAPPED, /, **options: object) -> ObjectiveConfig:
    return replace(base, kind="vtrace", options=options)


def backed_up(turns: TurnTensors, future: tuple[float, ...]) -> Values:
    broken = torch.zeros(turns.num_turns, dtype=torch.bool)
    return back_up(torch.tensor(future), turns, Branches(turns), broken)


# ---- the backup -------------------------------------------------------------------------------------------------


def test_a_node_has_its_belief_plus_the_weighed_mean_of_what_its_children_say() -> None:
    """Belief .3, children 1 and 0 with weights .5 and 1: .3 + (.5 x .7 - .3) / 2."""
    turns = turns_of(Turn(belief=0.3), Turn(parent=0, outcome=1.0, mass=0.5), Turn(parent=0, outcome=0.0, mass=0.5))
    assert float(backed_up(turns, (1.0, 0.5, 1.0)).value[0]) == pytest.approx(0.325)
    assert float(backed_up(turns, (1.0, 1.0, 1.0)).value[0]) == pytest.approx(0.5)


def test_a_chain_has_the_values_of_impala() -> None:
    """Values .5 and .6 predicted, rewards 0 and 1, ratios 1.5 and .5, bars 1: v = (.8, .8), advantages (.3, .2)."""
    turns = replace(turns_of(Turn(belief=0.6), Turn(parent=0, outcome=1.0)), root_belief=torch.tensor([0.5]))
    first, last, prompt = backed_up(turns, (1.0, 0.5)).value.tolist()
    assert (prompt, first, last) == pytest.approx((0.8, 0.8, 1.0))

    config = replace(OPEN, kind="vtrace", cap_positive=1.0, options={"baseline": "belief", "prefix": "none"})
    logprobs = turns.behaviour_logprobs + torch.tensor([1.5, 0.5]).log()
    assert coefficients(logprobs, turns, config).tolist() == pytest.approx([0.3, 0.2])


def test_weights_of_one_make_plain_means_and_the_credit_of_siblings() -> None:
    """On-policy: mass times the advantage of leave-one-out among siblings, for any tree."""
    for seed in range(30):
        group = random_group(np.random.default_rng(seed), continuations=6)
        if not np.isfinite(group.outcome).any():
            continue
        turns, credit = table_of(group), sibling_credit(group)
        found = coefficients(turns.behaviour_logprobs, turns, vtrace(OPEN))
        expected = torch.from_numpy(credit.mass * credit.advantage)[turns.turn] * turns.trained[turns.turn]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def table_of(group: Group) -> TurnTensors:
    fresh = np.zeros(group.num_turns)
    item = PackItem(
        group=group,
        credit=sibling_credit(group),
        verdicts=fresh.astype(np.uint8),
        ages=fresh.astype(np.int32),
        signal=Signal.MASS,
        whole_tree=True,
    )
    return to_tensors(make_table([item]))


@pytest.mark.parametrize(("known", "belief"), [((0.2, 0.9), 0.2), ((math.nan, 0.9), 0.9), ((math.nan, math.nan), 0.5)])
def test_where_the_predictor_was_silent_the_belief_is_that_of_the_prefix_above(
    known: tuple[float, float], belief: float
) -> None:
    turns = turns_of(Turn(belief=known[0]), Turn(parent=0, outcome=1.0))
    turns = replace(turns, root_belief=torch.tensor([known[1]]))
    assert float(backed_up(turns, (1.0, 0.0)).value[0]) == pytest.approx(belief)


# ---- prefix factors ---------------------------------------------------------------------------------------------

RATIOS = (1.1, 0.6, 1.2, 0.9)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("product", (1.1, 0.66, 0.792, 0.7128)),
        ("minimum", (1.1, 0.66, 0.72, 0.54)),
        ("none", (1.1, 0.6, 1.2, 0.9)),
    ],
)
def test_a_chain_of_four_has_the_weights_of_the_exact_prefix_or_of_its_smallest_ratio(
    prefix: str, expected: tuple[float, ...]
) -> None:
    """Turns of one token on a chain, with a baseline that leaves every advantage 1."""
    turns = turns_of(*[Turn(parent=j - 1, belief=0.0, outcome=1.0 if j == 3 else math.nan) for j in range(4)])
    turns = replace(turns, root_belief=torch.zeros(1), belief=torch.zeros(4))
    config = vtrace(prefix=prefix, prefix_bar=9.0, baseline="belief", future_bar=1e-6)
    logprobs = turns.behaviour_logprobs + torch.tensor(RATIOS).log()
    found = coefficients(logprobs, turns, config)
    advantage = torch.tensor([1e-18, 1e-12, 1e-6, 1.0])  # V decays by future_bar at every step upwards
    assert (found / advantage).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_prefix_bar_caps_what_lies_above() -> None:
    turns = turns_of(Turn(), Turn(parent=0, outcome=1.0, mass=0.5), Turn(parent=0, outcome=0.0, mass=0.5))
    logprobs = turns.behaviour_logprobs + torch.tensor([0.5, 0.0, 0.0])
    for prefix in ("minimum", "product"):
        below = coefficients(logprobs, turns, vtrace(prefix=prefix))[1:]
        assert below.tolist() == pytest.approx([0.5, -0.5])
        raised = coefficients(logprobs, turns, vtrace(prefix=prefix, prefix_bar=1.2))[1:]
        assert raised.tolist() == pytest.approx([0.6, -0.6])


def test_several_tokens_make_a_geometric_mean_or_a_product() -> None:
    """Future ratios of a turn of two tokens, each .5 as likely as before: 1/2 or 1/4 of what is below reaches up."""
    for future, weight in (("geometric", 0.5), ("product", 0.25)):
        turns = turns_of(
            Turn(belief=0.0, mass=0.5),
            Turn(mu=(0.5, 0.5), parent=0, outcome=1.0, mass=0.5),
            Turn(outcome=0.0, mass=0.5),
        )
        logprobs = turns.behaviour_logprobs + torch.tensor([0.0, math.log(0.5), math.log(0.5), 0.0])
        first = float(coefficients(logprobs, turns, vtrace(future=future))[0])
        assert first == pytest.approx(0.5 * weight)


# ---- who takes part ---------------------------------------------------------------------------------------------


def test_a_number_that_is_none_counts_as_not_drawn_and_what_is_below_it_gets_nothing() -> None:
    group = group_from_spec(
        [spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(outcome=0.0)), spec(spec(outcome=1.0))]
    )
    turns = table_of(group)
    logprobs = turns.behaviour_logprobs.clone()
    logprobs[turns.turn == 3] = math.nan  # the second root, above one turn

    found = coefficients(logprobs, turns, vtrace(OPEN))

    expected = torch.tensor([-0.5, 1.0, -1.0, 0.0, 0.0, 0.5, 0.5]) * turns.mass
    torch.testing.assert_close(found, expected[turns.turn])


def test_caps_are_those_of_the_sign_of_its_own_advantage() -> None:
    turns = turns_of(Turn(outcome=1.0, mass=0.5, advantage=-1.0), Turn(outcome=0.0, mass=0.5, advantage=1.0))
    config = replace(OPEN, kind="vtrace", cap_positive=3.0, cap_negative=2.0)
    logprobs = turns.behaviour_logprobs + math.log(5.0)
    assert coefficients(logprobs, turns, config).tolist() == pytest.approx([1.5, -1.0])
    assert evaluate(logprobs, turns, config).touched.all()


# ---- the gradient, by enumeration -------------------------------------------------------------------------------

LOGITS, BEHAVIOUR_LOGITS = (0.4, -0.3, 0.8), (-0.2, 0.5, 0.1)  # of action 1: at the root, below 0, below 1
REWARD = ((0.2, 1.0), (0.7, -0.5))  # [root action][child action]
TRUE = [-0.160594, 0.078483, -0.153678]


class Rollout(NamedTuple):
    root: int
    children: tuple[int, ...]  # three below action 0, one below action 1


ROLLOUTS = [Rollout(root, children) for root in (0, 1) for children in product((0, 1), repeat=3 - 2 * root)]


def expected_gradient(config: ObjectiveConfig, *, roots: int, belief: float = 0.3) -> list[float]:
    """Mean ascent direction of `LOGITS` over every tree of `roots` rollouts that the behaviour policy can draw."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    behaviour = log_chances(torch.tensor(BEHAVIOUR_LOGITS, dtype=torch.float64))
    trained = log_chances(logits)
    total = torch.zeros((), dtype=torch.float64)
    for rollouts in product(ROLLOUTS, repeat=roots):
        taken = [place for rollout in rollouts for place in places(rollout)]
        logprobs = torch.stack([trained[place] for place in taken])
        recorded = torch.stack([behaviour[place] for place in taken])
        turns = replace(
            turns_of(
                *[turn for at, rollout in enumerate(rollouts) for turn in turns_of_rollout(rollout, rollouts[:at])]
            ),
            behaviour_logprobs=recorded.float(),
            root_belief=torch.tensor([belief]),
            belief=torch.full((len(taken),), belief),
        )
        total = total + recorded.sum().exp() * evaluate(logprobs.float(), turns, config).loss
    return [-slope for slope in torch.autograd.grad(total, logits)[0].tolist()]


def log_chances(logits: Tensor) -> Tensor:
    """[action, place]"""
    log = torch.nn.functional.logsigmoid
    return torch.stack([log(-logits), log(logits)])


def places(rollout: Rollout) -> Iterator[tuple[int, int]]:
    yield rollout.root, 0
    yield from ((child, 1 + rollout.root) for child in rollout.children)


def turns_of_rollout(rollout: Rollout, before: tuple[Rollout, ...]) -> Iterator[Turn]:
    first = sum(1 + len(earlier.children) for earlier in before)
    yield Turn()
    for child in rollout.children:
        yield Turn(parent=first, outcome=REWARD[rollout.root][child], mass=1 / len(rollout.children))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TRUE),
        ({"prefix": "none"}, [-0.160594, 0.107529, -0.115554]),  # first turns stay exact
        ({"future": "none"}, [-0.150870, 0.078483, -0.153678]),  # last turns stay exact
        ({"prefix": "none", "future": "none"}, [-0.150870, 0.107529, -0.115554]),
    ],
)
def test_all_factors_untruncated_are_unbiased_and_each_that_is_left_out_has_its_known_bias(
    options: dict[str, object], expected: list[float]
) -> None:
    config = vtrace(baseline="belief", **{**UNTRUNCATED, **options})
    assert expected_gradient(config, roots=1) == pytest.approx(expected, abs=2e-6)


def test_siblings_as_the_baseline_are_unbiased_as_well() -> None:
    """Two rollouts: each first turn against the other, children against each other or, alone, as the turn above."""
    found = expected_gradient(vtrace(**UNTRUNCATED), roots=2)
    assert [g / 2 for g in found] == pytest.approx(TRUE, abs=2e-6)


def test_the_belief_does_not_matter_while_nothing_is_truncated() -> None:
    config = vtrace(baseline="belief", **UNTRUNCATED)
    for belief in (0.0, 0.9):
        assert expected_gradient(config, roots=1, belief=belief) == pytest.approx(TRUE, abs=2e-6)


def test_a_turn_that_was_chosen_is_compared_with_all_draws_and_is_none_of_them() -> None:
    """Draws 1 and 0, a chosen turn of 1: its baseline is their mean, theirs are each other."""
    turns = turns_of(Turn(outcome=1.0, mass=0.5), Turn(outcome=0.0, mass=0.5), Turn(outcome=1.0, mass=0.5, drawn=False))
    found = coefficients(turns.behaviour_logprobs, turns, vtrace())
    assert found.tolist() == pytest.approx([0.5, -0.5, 0.25])
