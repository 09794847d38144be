"""What a run has spent, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import chain_group, group_from_spec, random_group, spec
from trace_async.core.types import NodeState
from trace_async.learning.costs import Costs
from trace_async.learning.saving import success_since


def test_a_chain_costs_what_it_says() -> None:
    costs = Costs().after([chain_group((1.0, 0.0), turns=3)])  # two tokens a turn

    assert (costs.sampled_tokens, costs.environment_steps) == (12, 6)
    assert costs.rollout_equivalents == costs.nominal_rollouts == 2
    assert (costs.generate_s, costs.environment_s) == (6 * 0.25, 6 * 0.125)


def test_a_continuation_costs_the_tokens_behind_its_anchor_and_nominally_one_half() -> None:
    tail = spec(spec(outcome=1.0), spec(outcome=0.0))  # the continuation is one turn of two tokens
    group = group_from_spec([spec(spec(tail))])

    costs = Costs().after([group])

    assert costs.sampled_tokens == 8 + 2
    assert costs.rollout_equivalents == pytest.approx(10 / 8)
    assert costs.nominal_rollouts == 1.5


def test_a_rollout_that_failed_is_paid_for_but_is_no_measure_of_length() -> None:
    group = group_from_spec([spec(spec(failed=True)), spec(spec(spec(outcome=1.0)))])

    costs = Costs().after([group])

    assert (costs.sampled_tokens, costs.environment_steps, costs.nominal_rollouts) == (2 + 6, 4, 2)
    assert costs.rollout_equivalents == pytest.approx(8 / 6)


def test_before_the_first_outcome_nobody_knows_how_long_a_rollout_is() -> None:
    assert math.isnan(Costs().rollout_equivalents)
    assert math.isnan(Costs().after([group_from_spec([spec(failed=True)])]).rollout_equivalents)


def test_successes_are_those_of_root_rollouts_on_their_own_chains() -> None:
    tail = spec(spec(outcome=0.0), spec(outcome=1.0))  # the continuation, which succeeds, is nobody's own chain
    costs = Costs().after(
        [group_from_spec([spec(tail), spec(outcome=1.0), spec(failed=True)]), chain_group((1.0, 0.0))]
    )

    assert (costs.chains, costs.successes) == (4, 2)
    assert success_since(Costs(), costs) == 0.5
    assert success_since(costs, costs.after([chain_group((1.0,))])) == 1.0
    assert math.isnan(success_since(costs, costs))


def test_graded_root_rollouts_succeed_above_their_groups_threshold() -> None:
    graded = chain_group((0.2, 0.6, 1.0))
    thresholds = {0.5: 2, 0.2: 2, 0.1: 3, 0.6: 1, 1.0: 0}
    found = {above: Costs().after([replace(graded, success_above=above)]).successes for above in thresholds}
    assert found == thresholds


def test_wall_time_is_not_a_matter_of_groups() -> None:
    assert Costs(wall_s=3.0).after([chain_group()]).wall_s == 3.0


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_totals_add_up_however_groups_are_cut_into_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_group(rng) for _ in range(4)]
    together, apart = Costs().after(groups), Costs()
    for group in groups:
        apart = apart.after([group])

    assert asdict(apart) == pytest.approx(asdict(together))
    assert together.sampled_tokens == sum(int(group.action_lengths.sum()) for group in groups)
    assert together.environment_steps == sum(int((group.state != NodeState.FAILED).sum()) for group in groups)
    assert together.chain_tokens <= together.sampled_tokens
    assert together.roots + together.continuations <= sum(g.budget.roots + g.budget.continuations for g in groups)
