"""Credit rules of independent rows: RLOO, TreePO, Tree-GRPO and both forms of ARPO, by hand and on chains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import TurnSpec, chain_group, group_from_spec, random_group, spec
from trace_async.core.types import Group, GrownBy
from trace_async.methods.credit import CREDITS, sibling_credit
from trace_async.methods.credit_flat import flat_credit, rloo_credit
from trace_async.methods.credit_tree_grpo import tree_grpo_credit
from trace_async.methods.credit_treepo import treepo_credit

SEEDS = st.integers(0, 2**32 - 1)
LEAVES = [1, 2, 4, 5]  # of two_pairs, in pre-order a, a1, a2, b, b1, b2
BY_ROWS = ("flat", "flat_normalised", "rloo", "treepo", "treepo_mean", "tree_grpo")


def leaf(outcome: float, **fields: object) -> TurnSpec:
    return spec(outcome=outcome, **fields)


def two_pairs() -> Group:
    """Two first turns with two leaves each, outcomes 1 0 and 0 0."""
    return group_from_spec([spec(leaf(1.0), leaf(0.0)), spec(leaf(0.0), leaf(0.0))])


def test_rloo_compares_a_leaf_with_all_others() -> None:
    credit = rloo_credit(two_pairs())
    np.testing.assert_allclose(credit.advantage, [1 / 3, 1, -1 / 3, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(credit.mass, [1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 4, 1 / 4])


@settings(max_examples=60)
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=6), st.integers(1, 3))
def test_on_chains_rloo_is_sibling_credit(outcomes: list[float], turns: int) -> None:
    group = chain_group(outcomes, turns=turns)
    np.testing.assert_allclose(rloo_credit(group).advantage, sibling_credit(group).advantage, atol=2e-5)


def test_treepo_has_its_known_numbers() -> None:
    by_size, plain = treepo_credit(two_pairs()), treepo_credit(two_pairs(), by_size=False)

    np.testing.assert_allclose(by_size.advantage[LEAVES], [2 / 3, -1 / 3, -1 / 6, -1 / 6], rtol=1e-6)
    np.testing.assert_allclose(plain.advantage[LEAVES], [0.625, -0.375, -0.125, -0.125], rtol=1e-6)
    np.testing.assert_allclose(by_size.advantage[[0, 3]], [1 / 6, -1 / 6], rtol=1e-6)  # means of the leaves below


def test_treepo_passes_over_ancestors_with_a_single_leaf_but_never_the_prompt() -> None:
    group = group_from_spec([spec(spec(leaf(1.0))), spec(leaf(0.0))])
    np.testing.assert_allclose(treepo_credit(group).advantage, [0.5, 0.5, 0.5, -0.5, -0.5])


def test_treepo_counts_every_ancestor_though_two_of_them_have_the_same_leaves() -> None:
    fork = spec(leaf(1.0), leaf(0.0))
    credit = treepo_credit(group_from_spec([spec(fork), leaf(0.0)]))
    # leaf 1: prompt 3 leaves, 1 - 1/3; two turns with 2 leaves, 1 - 1/2 each
    assert credit.advantage[2] == pytest.approx((3 * (2 / 3) + 2 * 0.5 + 2 * 0.5) / 7, rel=1e-6)


def test_tree_grpo_has_its_known_numbers() -> None:
    first = spec(leaf(1.0), leaf(0.0), leaf(0.0))
    second = spec(leaf(1.0), leaf(1.0), leaf(1.0))
    credit = tree_grpo_credit(group_from_spec([first, second]))

    expected = [1.8002, -1.8683, -1.8683, 0.6455, 0.6455, 0.6455]
    np.testing.assert_allclose(credit.advantage[[1, 2, 3, 5, 6, 7]], expected, atol=1e-4)


def test_continuations_from_the_prompt_join_the_trees_of_tree_grpo_by_turn() -> None:
    further = [leaf(outcome, grown_by=GrownBy.CONTINUATION) for outcome in (0.0, 1.0, 1.0)]
    credit = tree_grpo_credit(group_from_spec([leaf(1.0), leaf(0.0), *further]))

    everyone, first, second = (np.array(outcomes) for outcomes in ((1, 0, 0, 1, 1), (1, 0, 1), (0, 1)))

    def z(outcome: float, among: np.ndarray) -> float:
        return float((outcome - among.mean()) / (among.std(ddof=1) + 1e-6))

    inside = [z(1, first), z(0, second), z(0, first), z(1, second), z(1, first)]
    np.testing.assert_allclose(
        credit.advantage, [z(o, everyone) + i for o, i in zip((1, 0, 0, 1, 1), inside, strict=True)], rtol=1e-5
    )


def test_on_chains_every_tree_of_tree_grpo_has_one_leaf_and_only_the_group_is_left() -> None:
    group = chain_group((1.0, 0.0, 0.0), turns=2)
    np.testing.assert_allclose(tree_grpo_credit(group).advantage, flat_credit(group, normalise=True).advantage)


@settings(max_examples=60)
@given(st.sampled_from(["flat", "flat_normalised", "rloo", "tree_grpo"]), SEEDS)
def test_advantages_of_all_leaves_sum_to_zero(name: str, seed: int) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6, selected=False)
    credit, is_leaf = CREDITS[name](group), ~np.isnan(group.outcome)
    assert float(credit.advantage[is_leaf].sum()) == pytest.approx(0.0, abs=1e-4)


def test_both_forms_of_arpo_train_a_shared_prefix_as_one_and_the_same_number() -> None:
    """Soft: duplicated rows, each with its z-score. Hard: the prefix gets the mean of its branches' advantages."""
    group = group_from_spec([spec(leaf(1.0), leaf(0.0)), leaf(0.0), leaf(1.0)])
    z = (np.array([1.0, 0.0, 0.0, 1.0]) - 0.5) / (np.std([1, 0, 0, 1], ddof=1) + 1e-6)
    soft_prefix = 0.25 * z[0] + 0.25 * z[1]  # two of four equal rows contain it
    hard_prefix = 0.5 * np.mean(z[:2])  # once, with the weight of both

    credit = CREDITS["flat_normalised"](group)
    pull = credit.mass * credit.advantage
    assert pull[0] == pytest.approx(soft_prefix, abs=1e-9)
    assert pull[0] == pytest.approx(hard_prefix, abs=1e-9)
    np.testing.assert_allclose(pull[[1, 2, 3, 4]], 0.25 * z, rtol=1e-5)


@settings(max_examples=60)
@given(st.sampled_from(BY_ROWS), SEEDS)
def test_a_turn_is_trained_as_if_it_stood_in_the_row_of_every_leaf_below_it(name: str, seed: int) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6)
    credit = CREDITS[name](group)
    pull = credit.mass.astype(np.float64) * credit.advantage
    leaves = np.flatnonzero(~np.isnan(group.outcome)).tolist()
    duplicated = np.zeros(group.num_turns)
    for end in leaves:
        turn = end
        while turn >= 0:
            duplicated[turn] += credit.advantage[end] / len(leaves)
            turn = int(group.parent[turn])
    np.testing.assert_allclose(pull, duplicated, atol=2e-6)
