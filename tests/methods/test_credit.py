"""Credit on trees: numbers by hand, conservation laws, and unbiasedness by exact enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.builders import TurnSpec, chain_group, group_from_spec, random_group, spec
from trace_async.core.types import Group, GrownBy, NodeState, TurnCredit
from trace_async.errors import ConfigError
from trace_async.methods.credit import CREDITS, credit_rule, flat_credit, sibling_credit

Floats = NDArray[np.float64]
SEEDS = st.integers(0, 2**32 - 1)
RULES = st.sampled_from(sorted(CREDITS))
BY_DRAWS = ("sibling", "sibling_shrunk", "split")


def leaf(outcome: float) -> TurnSpec:
    return spec(outcome=outcome)


def forked_group() -> Group:
    """One first turn r; below it a with leaves 1 and 0, and b with leaf 0. Pre-order r, a, a1, a2, b, b1."""
    return group_from_spec([spec(spec(leaf(1.0), leaf(0.0)), spec(leaf(0.0)))])


def two_pairs() -> list[TurnSpec]:
    """Two first turns with two leaves each, outcomes 1 0 and 0 0."""
    return [spec(leaf(1.0), leaf(0.0)), spec(leaf(0.0), leaf(0.0))]


def test_hierarchical_values_and_masses_have_their_known_numbers() -> None:
    credit = sibling_credit(forked_group())

    np.testing.assert_allclose(credit.value, [1 / 4, 1 / 2, 1, 0, 0, 0])
    np.testing.assert_allclose(credit.mass, [1, 1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 2])
    # mass x (value - mean), the coefficients under the hierarchical group mean
    np.testing.assert_allclose(
        credit.mass * (credit.value - 1 / 4), [0, 1 / 8, 3 / 16, -1 / 16, -1 / 8, -1 / 8], atol=1e-7
    )


def test_flat_coefficients_have_their_known_numbers() -> None:
    credit = flat_credit(forked_group())

    np.testing.assert_allclose(credit.mass, [1, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(credit.mass * credit.advantage, [0, 1 / 9, 2 / 9, -1 / 9, -1 / 9, -1 / 9], atol=1e-7)


def test_siblings_are_compared_with_each_other_and_an_only_child_inherits_its_parents_baseline() -> None:
    credit = sibling_credit(forked_group())

    np.testing.assert_allclose(credit.advantage, [0, 1 / 2, 1, -1, -1 / 2, -1 / 2])


def test_two_pairs_of_leaves_by_hand() -> None:
    sibling, flat = (rule(group_from_spec(two_pairs())) for rule in (sibling_credit, flat_credit))

    np.testing.assert_allclose(sibling.value, [0.5, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(sibling.advantage, [0.5, 1, -1, -0.5, 0, 0])
    np.testing.assert_allclose(sibling.mass, [1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 4, 1 / 4])
    np.testing.assert_allclose(flat.advantage, [0.25, 0.75, -0.25, -0.25, -0.25, -0.25])


def test_a_parents_baseline_counts_as_two_more_siblings_by_hand() -> None:
    first, second = two_pairs()
    credit = CREDITS["sibling_shrunk"](group_from_spec([spec(*first.children, leaf(1.0)), second]))

    # first turns 2/3 and 0 have each other for a baseline, so 0 and 2/3; below them two siblings or one, and twice that
    expected = [2 / 3, 1 - 1 / 4, 0 - 2 / 4, 1 - 1 / 4, -2 / 3, 0 - 4 / 9, 0 - 4 / 9]
    np.testing.assert_allclose(credit.advantage, expected, rtol=1e-6)


def test_a_further_leaf_pulls_the_flat_mean_but_not_the_hierarchical_one() -> None:
    first, second = two_pairs()
    group = group_from_spec([spec(*first.children, leaf(1.0)), second])

    sibling, flat = sibling_credit(group), flat_credit(group)

    assert float(sibling.value[[0, 4]].mean()) == pytest.approx(1 / 3)  # two first turns: 2/3 and 0
    assert float(1.0 - flat.advantage[1]) == pytest.approx(0.4)  # mean of 1 0 1 0 0


def test_ends_without_an_outcome_have_no_credit_and_leave_their_share_to_the_others() -> None:
    group = group_from_spec([spec(leaf(1.0), spec(failed=True), spec()), leaf(0.0), spec(failed=True), spec(spec())])
    assert group.state.tolist().count(NodeState.CLOSED) == 2

    for rule in CREDITS.values():
        credit = rule(group)
        np.testing.assert_allclose(credit.mass, [1 / 2, 1 / 2, 0, 0, 1 / 2, 0, 0, 0])
        assert np.isnan(credit.value).tolist() == [False, False, True, True, False, True, True, True]
        assert (credit.advantage[[2, 3, 5, 6, 7]] == 0).all()
    np.testing.assert_allclose(sibling_credit(group).advantage[[0, 1, 4]], [1, 1, -1])


def test_a_selected_child_stays_out_of_its_parents_mean_and_is_not_trained() -> None:
    chosen = spec(leaf(1.0), leaf(0.5), grown_by=GrownBy.SELECTED)
    credit = sibling_credit(group_from_spec([spec(leaf(0.0), leaf(1.0), chosen), leaf(0.0)]))

    np.testing.assert_allclose(credit.value, [0.5, 0, 1, 0.75, 1, 0.5, 0])
    np.testing.assert_allclose(credit.mass, [1 / 2, 1 / 4, 1 / 4, 0, 0, 0, 1 / 2])
    assert credit.advantage[3] == 0


def test_a_group_without_any_outcome_has_no_credit_at_all() -> None:
    group = group_from_spec([spec(failed=True), spec(spec())])
    for rule in CREDITS.values():
        credit = rule(group)
        assert np.isnan(credit.value).all()
        assert not credit.advantage.any()
        assert not credit.mass.any()


def test_one_root_rollout_alone_has_nothing_to_be_compared_with() -> None:
    assert not sibling_credit(chain_group((1.0,), turns=3)).advantage.any()


@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=6), st.integers(1, 3))
def test_on_chains_sibling_credit_is_flat_credit_left_one_out(outcomes: list[float], turns: int) -> None:
    group = chain_group(outcomes, turns=turns)
    sibling, flat = sibling_credit(group), flat_credit(group)
    m = len(outcomes)
    np.testing.assert_allclose(sibling.advantage, flat.advantage * m / (m - 1), atol=2e-5)
    np.testing.assert_array_equal(sibling.mass, flat.mass)
    np.testing.assert_allclose(sibling.value, np.repeat(outcomes, turns), atol=1e-6)


def test_normalised_flat_credit_is_the_z_score_of_chains() -> None:
    credit = CREDITS["flat_normalised"](chain_group((1.0, 1.0, 0.0, 1.0, 0.0, 1.0), turns=1))
    mean, std = 4 / 6, np.std([1, 1, 0, 1, 0, 1], ddof=1)
    np.testing.assert_allclose(credit.advantage, (np.array([1, 1, 0, 1, 0, 1]) - mean) / std, rtol=1e-5)


@settings(max_examples=150)
@given(RULES, SEEDS)
def test_masses_of_children_sum_to_their_parents(name: str, seed: int) -> None:
    selected = name not in BY_DRAWS  # whose masses leave them out
    group = random_group(np.random.default_rng(seed), continuations=6, failures=0.2, selected=selected)
    credit = CREDITS[name](group)
    has_leaf = ~np.isnan(credit.value)
    for turn in [-1, *np.flatnonzero(group.state == NodeState.EXPANDED).tolist()]:
        below = credit.mass[group.parent == turn].sum()
        own = credit.mass[turn] if turn >= 0 else float(has_leaf.any())
        assert below == pytest.approx(own, abs=1e-6)
    assert ((credit.mass > 0) == has_leaf).all()
    assert np.isfinite(credit.advantage).all()
    assert (credit.advantage[~has_leaf] == 0).all()


@settings(max_examples=60)
@given(st.sampled_from(BY_DRAWS), SEEDS)
def test_selected_turns_and_all_below_them_carry_nothing(name: str, seed: int) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6)
    credit = CREDITS[name](group)
    chosen = group.grown_by == GrownBy.SELECTED
    for turn, parent in enumerate(group.parent.tolist()):
        chosen[turn] |= parent >= 0 and chosen[parent]
    assert not credit.mass[chosen].any()
    assert not credit.advantage[chosen].any()


@settings(max_examples=60)
@given(RULES, SEEDS, st.integers(-2, 2))
def test_outcomes_that_are_all_higher_by_the_same_get_the_same_credit(name: str, seed: int, shift: int) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6)
    raised, first = replace(group, outcome=group.outcome + np.float32(shift)), CREDITS[name](group)
    second = CREDITS[name](raised)
    np.testing.assert_allclose(second.advantage, first.advantage, atol=1e-6)
    np.testing.assert_allclose(second.value, first.value + shift, atol=1e-6)


@settings(max_examples=100)
@given(SEEDS)
def test_sibling_advantages_sum_to_zero_where_there_are_siblings(seed: int) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6, selected=True)
    credit = sibling_credit(group)
    draws = ~np.isnan(credit.value) & (group.grown_by != GrownBy.SELECTED)
    for parent in np.unique(group.parent):
        siblings = draws & (group.parent == parent)
        if siblings.sum() >= 2:
            assert credit.advantage[siblings].sum() == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=60)
@given(RULES, SEEDS, st.floats(-2, 2, width=32))
def test_equal_outcomes_give_advantages_of_exactly_zero(name: str, seed: int, outcome: float) -> None:
    group = random_group(np.random.default_rng(seed), continuations=8)
    group.outcome.setflags(write=True)
    group.outcome[group.state == NodeState.LEAF] = outcome
    assert not CREDITS[name](group).advantage.any()


def test_equal_values_of_siblings_are_exactly_zero_although_their_sum_rounds() -> None:
    """Values of a third: neither 7/3 - 1/3 nor its sixth is exact in binary."""
    for width in range(3, 12):
        third = spec(leaf(1.0), leaf(0.0), leaf(0.0))
        advantage = sibling_credit(group_from_spec([third] * width)).advantage
        assert not advantage[::4].any(), f"{width} siblings"
        assert advantage.any()


# ---- unbiasedness ------------------------------------------------------------------------------------------------
# Two turns of two actions. First action a ~ sigmoid(X), second c ~ sigmoid(Y[a]), outcome R[a][c]. Two first turns; a
# first turn with a = 0 gets three children, with a = 1 one: branching depends on the prefix.

X, Y, R = 0.4, (-0.3, 0.8), ((0.2, 1.0), (0.7, -0.5))
TRUE_GRADIENT = (-0.160594, 0.078483, -0.153678)  # d E[R] / d (X, Y0, Y1)


def probability(logit: float, action: int) -> float:
    p = 1 / (1 + math.exp(-logit))
    return p if action else 1 - p


def score(logit: float, action: int) -> float:
    """d log p(action) / d logit."""
    return action - probability(logit, 1)


def expected_gradient(coefficients: Callable[[TurnCredit, Group], Floats]) -> Floats:
    """Exact expectation over all trees of sum over turns of coefficient x grad log p."""
    total = np.zeros(3)
    for firsts in product((0, 1), repeat=2):
        widths = [3 if a == 0 else 1 for a in firsts]
        for seconds in product(*(product((0, 1), repeat=width) for width in widths)):
            chance, scores = 1.0, []
            for a, below in zip(firsts, seconds, strict=True):
                chance *= probability(X, a)
                scores.append((0, score(X, a)))
                for c in below:
                    chance *= probability(Y[a], c)
                    scores.append((1 + a, score(Y[a], c)))
            roots = [spec(*[leaf(R[a][c]) for c in below]) for a, below in zip(firsts, seconds, strict=True)]
            group = group_from_spec(roots)
            for (parameter, gradient), weight in zip(scores, coefficients(sibling_credit(group), group), strict=True):
                total[parameter] += chance * gradient * weight
    return total


def test_sibling_credit_is_an_unbiased_policy_gradient_when_branching_depends_on_the_prefix() -> None:
    found = expected_gradient(lambda credit, _: credit.mass.astype(np.float64) * credit.advantage)
    np.testing.assert_allclose(found, TRUE_GRADIENT, atol=2e-6)


def test_hierarchical_values_without_a_baseline_are_unbiased_too() -> None:
    found = expected_gradient(lambda credit, _: credit.mass.astype(np.float64) * credit.value)
    np.testing.assert_allclose(found, TRUE_GRADIENT, atol=2e-6)


def test_a_mean_that_includes_the_turn_itself_halves_the_gradient_of_two_first_turns() -> None:
    def with_group_mean(credit: TurnCredit, group: Group) -> Floats:
        mean = credit.value[group.parent < 0].astype(np.float64).mean()
        return np.asarray(credit.mass * (credit.value - mean))

    np.testing.assert_allclose(expected_gradient(with_group_mean), (-0.080297, 0.065403, -0.076839), atol=2e-6)


def test_equally_weighted_leaves_are_biased_towards_what_was_expanded() -> None:
    def flat(_: TurnCredit, group: Group) -> Floats:
        credit = flat_credit(group)
        return np.asarray(credit.mass.astype(np.float64) * credit.value)

    np.testing.assert_allclose(expected_gradient(flat), (-0.193294, 0.101977, -0.122842), atol=2e-6)


def test_rules_are_found_by_name() -> None:
    assert credit_rule("sibling") is sibling_credit
    with pytest.raises(ConfigError, match=r"learner.credit = 'siblings' is not known; did you mean 'sibling'"):
        credit_rule("siblings")
