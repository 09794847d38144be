"""Root and prefix allocation: worked numbers, brute force, exact sums, fair ties."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trace_async.errors import ConfigError
from trace_async.methods import allocation
from trace_async.methods.allocation import (
    Counts,
    Floats,
    allocate_evenly,
    allocate_prefixes,
    allocate_prefixes_beta,
    allocate_roots,
    prefix_value,
    repeat_probability,
    root_marginal,
    root_value,
    root_value_beta,
    root_values,
    root_values_beta,
)

PROBABILITIES = st.floats(0.0, 1.0, allow_subnormal=False)
SEEDS = st.integers(0, 2**32 - 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def best_by_trying_all(table: Floats, budget: int, least: int) -> float:
    """The oracle: every legal vector of counts."""
    choices = range(least, table.shape[1])
    sums = [
        sum(row[count] for row, count in zip(table, counts, strict=True))
        for counts in product(choices, repeat=len(table))
        if sum(counts) == budget
    ]
    return float(max(sums))


def worth(table: Floats, counts: Counts) -> float:
    return float(table[np.arange(len(table)), counts].sum())


def test_root_values_have_their_known_numbers() -> None:
    expected = [0.0, 0.0, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.9921875]
    np.testing.assert_allclose(root_value(0.5, np.arange(9)), expected)
    assert float(root_value(0.1, 8)) == pytest.approx(0.5695, abs=1e-4)
    assert float(root_value(0.05, 8)) == pytest.approx(0.3366, abs=1e-4)


@given(PROBABILITIES, st.integers(0, 12))
def test_success_and_failure_may_change_places(v: float, m: int) -> None:
    assert float(root_value(v, m)) == pytest.approx(float(root_value(1.0 - v, m)), abs=1e-12)


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_the_marginal_is_the_difference_of_two_values_and_never_increases(v: float, m: int) -> None:
    assert float(root_marginal(v, m)) == pytest.approx(float(root_value(v, m + 1) - root_value(v, m)), abs=1e-12)
    assert float(root_marginal(v, m + 1)) <= float(root_marginal(v, m)) + 1e-15


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.5), (7.0, 3.0)])
@pytest.mark.parametrize("m", [0, 1, 2, 5, 8])
def test_the_beta_form_is_the_expectation_of_the_point_form(alpha: float, beta: float, m: int) -> None:
    draws = rng(1).beta(alpha, beta, 200_000)
    assert float(root_value_beta(alpha, beta, m)) == pytest.approx(float(root_value(draws, m).mean()), abs=4e-3)


def test_a_sure_belief_gives_the_point_form_and_a_flat_one_gives_less() -> None:
    v = np.array([0.2, 0.5, 0.9])
    np.testing.assert_allclose(root_values_beta(v * 1e9, (1 - v) * 1e9, 6), root_values(v, 6), atol=1e-6)
    assert float(root_value_beta(1.0, 1.0, 4)) == pytest.approx(1 - 2 / 5)
    assert float(root_value_beta(1.0, 1.0, 4)) < float(root_value(0.5, 4))


def test_the_worked_example_with_a_floor_of_one_is_found() -> None:
    table = root_values([0.5, 0.3, 0.1, 0.9, 0.02], 8)

    counts = allocate_roots(table, budget=12, max_roots=8, allow_zero=False, rng=rng())

    assert sorted(counts[2:4].tolist()) == [2, 2]  # 0.1 and 0.9 are worth the same
    assert counts.tolist() == [4, 3, 2, 2, 1]
    assert worth(table, counts) == pytest.approx(1.865)
    assert worth(table, counts) == pytest.approx(best_by_trying_all(table, 12, 1))


def test_the_worked_example_with_zeros_is_1_9745_by_the_heap_and_more_by_the_exact_solver() -> None:
    table = root_values([0.5, 0.3, 0.1, 0.9, 0.02], 8)

    by_heap = allocation._opening_heap(table, 12, 0)
    exact = allocate_roots(table, budget=12, max_roots=8, allow_zero=True, rng=rng())

    assert by_heap.tolist() == [4, 5, 3, 0, 0]
    assert worth(table, by_heap) == pytest.approx(1.9745, abs=1e-4)
    assert worth(table, exact) == pytest.approx(best_by_trying_all(table, 12, 0)) == pytest.approx(1.9868)


@settings(max_examples=60)
@given(st.data())
def test_the_exact_solver_finds_what_brute_force_finds(data: st.DataObject) -> None:
    num_prompts, max_roots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    least = data.draw(st.integers(0, 1))
    budget = data.draw(st.integers(least * num_prompts, max_roots * num_prompts))
    table = data.draw(arrays(np.float64, (num_prompts, max_roots + 1), elements=st.floats(0, 1)))

    counts = allocate_roots(table, budget=budget, max_roots=max_roots, allow_zero=least == 0, rng=rng(data.draw(SEEDS)))

    assert counts.sum() == budget
    assert counts.min() >= least
    assert counts.max() <= max_roots
    assert worth(table, counts) == pytest.approx(best_by_trying_all(table, budget, least))


@settings(max_examples=60)
@given(st.data())
def test_the_heap_spends_exactly_and_with_a_floor_of_one_it_is_exact(data: st.DataObject) -> None:
    v = data.draw(st.lists(PROBABILITIES, min_size=1, max_size=4))
    max_roots, least = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1))
    budget = data.draw(st.integers(least * len(v), max_roots * len(v)))
    table = root_values(v, max_roots)

    counts = allocation._opening_heap(table, budget, least)

    assert counts.sum() == budget
    assert counts.min() >= least
    assert counts.max() <= max_roots
    if least == 1:
        assert worth(table, counts) == pytest.approx(best_by_trying_all(table, budget, 1))


def test_on_a_large_pool_the_heap_is_the_optimum_and_spreads_thin() -> None:
    table = root_values(rng(3).beta(0.5, 0.5, 1024), 8)
    exact = allocate_roots(table, budget=2048, max_roots=8, allow_zero=True, rng=rng())
    by_heap = allocation._opening_heap(table, 2048, 0)
    even = allocate_evenly(1024, budget=2048, max_roots=8, rng=rng())

    assert worth(table, by_heap) == pytest.approx(worth(table, exact), rel=1e-6)
    assert set(exact.tolist()) <= {0, 2, 3, 4}
    assert 500 < np.count_nonzero(exact) < 600  # 547 of 1,024 in the published check of this setting
    assert worth(table, exact) > 2.2 * worth(table, even)  # 370 expected mixed groups against 151


def test_a_pool_too_large_for_the_exact_solver_goes_to_the_heap() -> None:
    v = rng(4).random(3000)
    assert allocation.EXACT_CELLS < 3000 * 9 * 4001

    counts = allocate_roots(v, budget=4000, max_roots=8, allow_zero=True, rng=rng())

    assert counts.sum() == 4000
    assert counts.max() <= 8


def test_equal_prompts_are_chosen_equally_often() -> None:
    chosen = sum(
        np.minimum(allocate_roots([0.5] * 6, budget=4, max_roots=4, allow_zero=True, rng=rng(seed)), 1)
        for seed in range(600)
    )
    mean = float(np.mean(chosen))
    assert np.abs(chosen - mean).max() < 5 * np.sqrt(mean)


@settings(max_examples=40)
@given(st.lists(PROBABILITIES, min_size=2, max_size=8), st.integers(0, 16), SEEDS)
def test_the_order_of_the_prompts_does_not_matter(v: list[float], budget: int, seed: int) -> None:
    table = root_values(v, 8)
    budget = min(budget, 8 * len(v))
    forward = allocate_roots(table, budget=budget, max_roots=8, allow_zero=True, rng=rng(seed))
    backward = allocate_roots(table[::-1], budget=budget, max_roots=8, allow_zero=True, rng=rng(seed))
    assert worth(table, forward) == pytest.approx(worth(table[::-1], backward), abs=1e-9)


def test_a_budget_that_does_not_fit_is_refused_with_its_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"33 root rollouts cannot be spent on 4 prompts with 0 to 8 each \(0 to 32\)"
    ):
        allocate_roots([0.5] * 4, budget=33, max_roots=8, allow_zero=True, rng=rng())
    with pytest.raises(ConfigError, match=r"3 root rollouts cannot be spent on 4 prompts with 1 to 8 each \(4 to 32\)"):
        allocate_roots([0.5] * 4, budget=3, max_roots=8, allow_zero=False, rng=rng())
    with pytest.raises(ConfigError, match="max_roots_per_prompt is 0"):
        allocate_evenly(4, budget=0, max_roots=0, rng=rng())


@pytest.mark.parametrize("values", [[0.5, float("nan")], [1.5], np.zeros((2, 3)), np.full((2, 5), np.inf)])
def test_values_that_are_no_table_of_numbers_are_refused(values: Floats) -> None:
    with pytest.raises(ValueError, match=r"got shape|in \[0, 1\]"):
        allocate_roots(values, budget=2, max_roots=4, allow_zero=True, rng=rng())
    with pytest.raises(ValueError, match="positive numbers"):
        root_values_beta([1.0, 0.0], [1.0, 1.0], 4)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 200), SEEDS)
def test_even_counts_differ_by_at_most_one_over_as_few_prompts_as_possible(
    num_candidates: int, max_roots: int, budget: int, seed: int
) -> None:
    budget = min(budget, num_candidates * max_roots)
    counts = allocate_evenly(num_candidates, budget=budget, max_roots=max_roots, rng=rng(seed))
    active = counts[counts > 0]
    assert counts.sum() == budget
    assert len(active) == -(-budget // max_roots)
    assert len(active) == 0 or active.max() - active.min() <= 1


def test_continuations_have_their_known_numbers() -> None:
    for q, expected, value in (([0.9, 0.6, 0.2], [0, 2, 2], 1.6), ([0.1, 0.4, 0.8], [1, 2, 1], 1.94)):
        counts = allocate_prefixes(q, budget=4, rng=rng())
        assert counts.tolist() == expected
        assert float(prefix_value(q, counts).sum()) == pytest.approx(value)


def test_a_prediction_that_contradicts_the_outcome_is_likely_to_be_flipped() -> None:
    np.testing.assert_allclose(repeat_probability([0.9, 0.9], [True, False]), [0.9, 0.1])


@settings(max_examples=60)
@given(st.lists(st.tuples(PROBABILITIES, st.integers(0, 3)), min_size=1, max_size=4), st.integers(0, 5), SEEDS)
def test_continuations_are_optimal_given_what_was_granted_before(
    anchors: list[tuple[float, int]], budget: int, seed: int
) -> None:
    q = np.array([anchor[0] for anchor in anchors])
    granted = np.array([anchor[1] for anchor in anchors])

    counts = allocate_prefixes(q, budget=budget, rng=rng(seed), granted=granted)

    table = prefix_value(q[:, None], granted[:, None] + np.arange(budget + 1))
    assert counts.sum() == budget
    assert worth(table, counts) == pytest.approx(best_by_trying_all(table, budget, 0), abs=1e-12)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.05, 20.0), st.floats(0.05, 20.0), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 5),
    SEEDS,
)
def test_continuations_under_beliefs_are_optimal_too(
    anchors: list[tuple[float, float, int]], budget: int, seed: int
) -> None:
    a, b, granted = (np.array(column) for column in zip(*anchors, strict=True))

    counts = allocate_prefixes_beta(a, b, budget=budget, rng=rng(seed), granted=granted)

    def expected_value(k: int) -> Floats:
        """1 - E q^k by the rising factorials."""
        steps = np.arange(k)
        return np.asarray(1.0 - np.prod((a[:, None] + steps) / (a[:, None] + b[:, None] + steps), axis=1))

    values = np.stack([expected_value(k) for k in range(budget + 4)], axis=1)
    table = np.take_along_axis(values, granted[:, None] + np.arange(budget + 1), axis=1)
    assert counts.sum() == budget
    assert worth(table, counts) == pytest.approx(best_by_trying_all(table, budget, 0), abs=1e-9)


def test_sure_beliefs_of_repeating_give_the_point_form() -> None:
    q = np.array([0.9, 0.6, 0.2])
    counts = allocate_prefixes_beta(q * 1e8, (1 - q) * 1e8, budget=4, rng=rng())
    assert counts.tolist() == [0, 2, 2]


def test_an_untrained_predictor_spreads_continuations_by_chance() -> None:
    totals = sum(allocate_prefixes([0.5] * 4, budget=2, rng=rng(seed)) for seed in range(600))
    mean = float(np.mean(totals))
    assert np.abs(totals - mean).max() < 5 * np.sqrt(mean)


def test_continuations_without_an_anchor_are_refused() -> None:
    assert allocate_prefixes([], budget=0, rng=rng()).tolist() == []
    with pytest.raises(ValueError, match="2 continuations cannot be spent on 0 anchors"):
        allocate_prefixes([], budget=2, rng=rng())
    with pytest.raises(ValueError, match="repeat probabilities"):
        allocate_prefixes([1.5], budget=1, rng=rng())
    with pytest.raises(ValueError, match="granted must be 1 counts"):
        allocate_prefixes([0.5], budget=1, rng=rng(), granted=[-1])
    with pytest.raises(ValueError, match="positive numbers"):
        allocate_prefixes_beta([0.0], [1.0], budget=1, rng=rng())
