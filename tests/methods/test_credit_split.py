"""Split credit by hand: which outcome a turn answers for, what it is compared with, and how much it weighs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import TurnSpec, chain_group, group_from_spec, random_group, spec
from trace_async.core.types import Group, GrownBy
from trace_async.methods.credit import sibling_credit
from trace_async.methods.credit_split import split_credit

SEEDS = st.integers(0, 2**32 - 1)


def leaf(outcome: float, **fields: object) -> TurnSpec:
    return spec(outcome=outcome, **fields)


def pull(group: Group) -> np.ndarray:
    credit = split_credit(group)
    return np.asarray(credit.mass.astype(np.float64) * credit.advantage)


def test_a_tree_by_hand() -> None:
    """Root rollouts a-a1 (1) and b-b1 (0); two continuations from a, 0 and 1. Order a, a1, a2, a3, b, b1."""
    group = group_from_spec([spec(leaf(1.0), leaf(0.0), leaf(1.0)), spec(leaf(0.0))])

    # root rollouts: 1 - 0 and 0 - 1, half each, whatever was grown below them
    # continuations: mass 1/6; the other one, the bare outcome 1 and twice the bare rollout's own baseline 0
    bare, first, second = 1 / 2, (0 - (1 + 1) / 4) / 6, (1 - (0 + 1) / 4) / 6
    np.testing.assert_allclose(pull(group), [bare, bare, first, second, -1 / 2, -1 / 2], rtol=1e-6)
    np.testing.assert_allclose(split_credit(group).mass, [1 / 2, 1 / 6, 1 / 6, 1 / 6, 1 / 2, 1 / 2])


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6), st.integers(1, 3))
def test_on_chains_it_is_sibling_credit(outcomes: list[float], turns: int) -> None:
    group = chain_group(outcomes, turns=turns)
    np.testing.assert_allclose(split_credit(group).advantage, sibling_credit(group).advantage, atol=2e-5)


@settings(max_examples=60)
@given(SEEDS)
def test_masses_and_values_are_those_of_sibling_credit(seed: int) -> None:
    group = random_group(np.random.default_rng(seed), continuations=8, failures=0.2)
    split, sibling = split_credit(group), sibling_credit(group)
    np.testing.assert_array_equal(split.mass, sibling.mass)
    np.testing.assert_array_equal(split.value, sibling.value)


@settings(max_examples=60)
@given(SEEDS)
def test_outcomes_of_continuations_do_not_touch_the_root_rollouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = random_group(rng, continuations=8)
    of_root = np.zeros(group.num_turns, np.bool_)
    for turn, (parent, grown_by) in enumerate(zip(group.parent.tolist(), group.grown_by.tolist(), strict=True)):
        of_root[turn] = grown_by == GrownBy.ROOT or (grown_by == GrownBy.CHAIN and of_root[parent])
    before = pull(group)[of_root]
    others = ~of_root & ~np.isnan(group.outcome)
    group.outcome.setflags(write=True)
    group.outcome[others] = rng.integers(0, 2, int(others.sum()))
    np.testing.assert_allclose(pull(group)[of_root], before, atol=1e-6)


def test_turns_below_several_anchors_keep_one_weight() -> None:
    group = group_from_spec([spec(spec(leaf(1.0), leaf(0.0)), leaf(0.0)), leaf(0.0)])
    np.testing.assert_allclose(pull(group)[[0, 1, 2]], [1 / 2] * 3, rtol=1e-6)
    np.testing.assert_allclose(split_credit(group).advantage[[0, 1, 2]], [1, 2, 4], rtol=1e-6)


def test_continuations_from_the_prompt_are_compared_with_every_rollout_from_there_but_not_the_other_way_round() -> None:
    further = [leaf(outcome, grown_by=GrownBy.CONTINUATION) for outcome in (0.0, 1.0)]
    group = group_from_spec([leaf(1.0), leaf(0.0), *further])
    np.testing.assert_allclose(pull(group), [1 / 2, -1 / 2, (0 - 2 / 3) / 4, (1 - 1 / 3) / 4], rtol=1e-6)


def test_one_root_rollout_has_no_baseline_but_its_continuations_have_it() -> None:
    group = group_from_spec([spec(leaf(1.0), leaf(0.0))])
    np.testing.assert_allclose(pull(group), [0, 0, (0 - 1) / 2])


def test_a_rollout_that_failed_trains_nothing_and_is_compared_with_by_nobody() -> None:
    group = group_from_spec([spec(spec(failed=True), leaf(0.0), leaf(1.0)), leaf(1.0), leaf(0.0)])
    # continuations at the first anchor have each other only: its own rollout has neither outcome nor baseline
    np.testing.assert_allclose(pull(group), [0, 0, -1 / 6, 1 / 6, 1 / 2, -1 / 2], rtol=1e-6)


def test_a_continuation_of_a_continuation_is_compared_at_its_own_anchor() -> None:
    inner = spec(leaf(0.0), leaf(1.0), grown_by=GrownBy.CONTINUATION)
    group = group_from_spec([spec(leaf(1.0), inner), leaf(0.0)])
    # order: root, its leaf 1, continuation turn, its leaf 0, the inner continuation 1, second root 0
    outer = (0 - (1 + 2 * 0) / 3) / 4  # bare outcome 1, the root's baseline 0 twice
    within = (1 - (0 + 2 * (1 / 3)) / 3) / 8  # bare outcome 0, the continuation's baseline 1/3 twice
    np.testing.assert_allclose(pull(group), [1 / 2, 1 / 2, outer, outer, within, -1 / 2], rtol=1e-6)
