"""Root and prefix allocation: worked numbers, brute force, exact sums, fair ties."""

from __future__ import annotations

import math
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
    allocate_prefixes,
    allocate_prefixes_beta,
    allocate_roots,
    check_spendable,
    prefix_value,
    repeat_probability,
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


def by_heap(table: Floats, budget: int, *, least: int = 0) -> Counts:
    return allocation._opening_heap(table, np.full(len(table), least), budget)


def test_root_values_have_their_known_numbers() -> None:
    expected = [0.0, 0.0, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.9921875]
    np.testing.assert_allclose(root_value(0.5, np.arange(9)), expected)
    assert float(root_value(0.1, 8)) == pytest.approx(0.5695, abs=1e-4)
    assert float(root_value(0.05, 8)) == pytest.approx(0.3366, abs=1e-4)


@given(PROBABILITIES, st.integers(0, 12))
def test_success_and_failure_may_change_places(v: float, m: int) -> None:
    assert float(root_value(v, m)) == pytest.approx(float(root_value(1.0 - v, m)), abs=1e-12)


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_what_one_more_rollout_adds_has_a_closed_form_and_never_increases(v: float, m: int) -> None:
    first, second = (float(root_value(v, n + 1) - root_value(v, n)) for n in (m, m + 1))
    assert first == pytest.approx(v**m * (1.0 - v) + (1.0 - v) ** m * v, abs=1e-12)
    assert second <= first + 1e-12


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.5), (7.0, 3.0)])
@pytest.mark.parametrize("m", [0, 1, 2, 5, 8])
def test_the_beta_form_is_the_expectation_of_the_point_form(alpha: float, beta: float, m: int) -> None:
    draws = rng(1).beta(alpha, beta, 200_000)
    assert float(root_value_beta(alpha, beta, m)) == pytest.approx(float(root_value(draws, m).mean()), abs=4e-3)


@given(st.floats(0.1, 50.0), st.floats(0.1, 50.0), st.integers(2, 12))
def test_the_beta_form_is_the_integral_that_gamma_functions_give(alpha: float, beta: float, m: int) -> None:
    """E v^m = B(alpha + m, beta) / B(alpha, beta)."""

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    all_succeed = math.exp(log_beta(alpha + m, beta) - log_beta(alpha, beta))
    all_fail = math.exp(log_beta(alpha, beta + m) - log_beta(alpha, beta))
    assert float(root_value_beta(alpha, beta, m)) == pytest.approx(1.0 - all_succeed - all_fail, abs=1e-9)


@given(st.floats(0.1, 50.0), st.floats(0.1, 50.0))
def test_three_rollouts_are_worth_as_much_apiece_as_two_under_any_belief(alpha: float, beta: float) -> None:
    """Which is why opening with two and growing by one walks along the concave envelope."""
    values = root_values_beta([alpha], [beta], 8)[0]
    assert values[3] / 3 == pytest.approx(values[2] / 2)
    assert (np.diff(values[2:], 2) <= 1e-12).all()


def test_a_sure_belief_gives_the_point_form_and_a_flat_one_gives_less() -> None:
    v = np.array([0.2, 0.5, 0.9])
    np.testing.assert_allclose(root_values_beta(v * 1e9, (1 - v) * 1e9, 6), root_values(v, 6), atol=1e-6)
    assert float(root_value_beta(1.0, 1.0, 4)) == pytest.approx(1 - 2 / 5)
    assert float(root_value_beta(1.0, 1.0, 4)) < float(root_value(0.5, 4))


def test_the_worked_example_with_a_floor_of_one_is_found() -> None:
    table = root_values([0.5, 0.3, 0.1, 0.9, 0.02], 8)

    counts = allocate_roots(table, budget=12, max_roots=8, least=1, rng=rng())

    assert sorted(counts[2:4].tolist()) == [2, 2]  # 0.1 and 0.9 are worth the same
    assert counts.tolist() == [4, 3, 2, 2, 1]
    assert worth(table, counts) == pytest.approx(1.865)
    assert worth(table, counts) == pytest.approx(best_by_trying_all(table, 12, 1))


def test_the_worked_example_with_zeros_is_1_9745_by_the_heap_and_more_by_the_exact_solver() -> None:
    table = root_values([0.5, 0.3, 0.1, 0.9, 0.02], 8)

    greedy = by_heap(table, 12)
    exact = allocate_roots(table, budget=12, max_roots=8, rng=rng())

    assert greedy.tolist() == [4, 5, 3, 0, 0]
    assert worth(table, greedy) == pytest.approx(1.9745, abs=1e-4)
    assert worth(table, exact) == pytest.approx(best_by_trying_all(table, 12, 0)) == pytest.approx(1.9868)


@settings(max_examples=60)
@given(st.data())
def test_the_exact_solver_finds_what_brute_force_finds(data: st.DataObject) -> None:
    num_prompts, max_roots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    least = data.draw(st.integers(0, 1))
    budget = data.draw(st.integers(least * num_prompts, max_roots * num_prompts))
    table = data.draw(arrays(np.float64, (num_prompts, max_roots + 1), elements=st.floats(0, 1)))

    counts = allocate_roots(table, budget=budget, max_roots=max_roots, least=least, rng=rng(data.draw(SEEDS)))

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

    counts = by_heap(table, budget, least=least)

    assert counts.sum() == budget
    assert counts.min() >= least
    assert counts.max() <= max_roots
    if least == 1:
        assert worth(table, counts) == pytest.approx(best_by_trying_all(table, budget, 1))


def test_on_a_pool_of_1024_both_solvers_more_than_double_what_even_groups_reach() -> None:
    """Budget 2,048, at most 8 each; v are the 1,024 quantiles of Beta(.5, .5), sin^2 of evenly spaced angles."""
    table = root_values(np.sin(np.pi / 2 * (np.arange(1024) + 0.5) / 1024) ** 2, 8)

    exact = allocate_roots(table, budget=2048, max_roots=8, rng=rng())

    assert np.bincount(exact).tolist() == [476, 0, 0, 144, 404], "it spreads thin"
    assert worth(table, exact) == pytest.approx(376.246, abs=1e-3)
    assert worth(table, by_heap(table, 2048)) == pytest.approx(376.246, abs=1e-3)
    assert 256 * float(table[:, 8].mean()) == pytest.approx(155.453, abs=1e-3), "256 prompts with 8 each"


def test_pools_drawn_at_random_scatter_around_the_known_figures() -> None:
    """One draw of this setting was computed elsewhere: 547 active prompts, 370 mixed groups, 151 for even groups."""
    figures = []
    for seed in range(40):
        table = root_values(rng(seed).beta(0.5, 0.5, 1024), 8)
        counts = by_heap(table, 2048)
        figures.append((float(np.count_nonzero(counts)), worth(table, counts), 256 * float(table[:, 8].mean())))

    mean, deviation = np.mean(figures, axis=0), np.std(figures, axis=0)
    assert (np.abs(np.array([547, 370, 151]) - mean) < 2.5 * deviation).all(), (mean, deviation)


def test_on_large_pools_the_heap_is_the_optimum_to_a_thousandth_of_a_group() -> None:
    for seed, budget in product(range(4), (1001, 2047, 2048)):
        table = root_values(rng(seed).beta(0.5, 0.5, 1024), 8)
        exact = allocate_roots(table, budget=budget, max_roots=8, rng=rng())
        assert 0.0 <= worth(table, exact) - worth(table, by_heap(table, budget)) + 1e-9 < 1e-3


def test_on_small_pools_the_heap_reaches_nearly_all_of_the_optimum() -> None:
    """1,500 pools of 2 to 6 prompts, v ~ Beta(.5, .5), budgets up to 15."""
    draw = rng(0)
    shares, losses = [], []
    for _ in range(1500):
        table = root_values(draw.beta(0.5, 0.5, draw.integers(2, 7)), 8)
        budget = int(draw.integers(2, 16))
        optimum = worth(table, allocate_roots(table, budget=budget, max_roots=8, rng=draw))
        found = worth(table, by_heap(table, budget))
        shares.append(found / optimum)
        losses.append(optimum - found)

    assert float(np.mean(shares)) > 0.995
    assert float(np.mean(np.array(losses) < 1e-12)) > 0.9
    assert min(shares) > 0.87
    assert max(losses) < 0.125


@settings(max_examples=60)
@given(st.data())
def test_the_heap_never_loses_more_than_a_quarter_of_a_mixed_group(data: st.DataObject) -> None:
    positive = st.floats(0.05, 50.0)
    beliefs = data.draw(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
    max_roots = data.draw(st.integers(1, 8))
    alpha, beta = (np.array(column) for column in zip(*beliefs, strict=True))
    table = data.draw(st.sampled_from([root_values_beta(alpha, beta, max_roots), root_values(alpha / 50, max_roots)]))
    least = data.draw(arrays(np.int64, len(table), elements=st.integers(0, max_roots)))
    budget = data.draw(st.integers(int(least.sum()), max_roots * len(table)))

    exact = allocate_roots(table, budget=budget, max_roots=max_roots, rng=rng(), least=least)
    greedy = allocation._opening_heap(table, least, budget)

    for counts in (exact, greedy):
        assert counts.sum() == budget
        assert (counts >= least).all()
        assert counts.max() <= max_roots
    assert worth(table, exact) - 0.25 <= worth(table, greedy) <= worth(table, exact) + 1e-9


@settings(max_examples=40)
@given(st.data())
def test_prompts_that_must_get_some_get_them_and_the_rest_is_optimal(data: st.DataObject) -> None:
    v = data.draw(st.lists(PROBABILITIES, min_size=1, max_size=4))
    least = data.draw(st.lists(st.integers(0, 3), min_size=len(v), max_size=len(v)))
    budget = data.draw(st.integers(sum(least), 4 * len(v)))
    table = root_values(v, 4)

    counts = allocate_roots(table, budget=budget, max_roots=4, rng=rng(data.draw(SEEDS)), least=least)

    legal = [m for m in product(range(5), repeat=len(v)) if sum(m) == budget and (np.array(m) >= least).all()]
    best = max(sum(row[count] for row, count in zip(table, m, strict=True)) for m in legal)
    assert counts.sum() == budget
    assert (counts >= least).all()
    assert worth(table, counts) == pytest.approx(best)


@given(st.lists(PROBABILITIES, min_size=2, max_size=8), st.integers(0, 16), SEEDS)
def test_prompts_as_hard_as_they_were_easy_get_as_much(v: list[float], budget: int, seed: int) -> None:
    easy, hard = root_values(v, 8), root_values([1.0 - x for x in v], 8)
    budget = min(budget, 8 * len(v))
    counts = allocate_roots(easy, budget=budget, max_roots=8, rng=rng(seed))
    mirrored = allocate_roots(hard, budget=budget, max_roots=8, rng=rng(seed))
    assert worth(easy, counts) == pytest.approx(worth(hard, mirrored), abs=1e-9)


def test_the_belief_form_prefers_what_is_sure_to_be_undecided() -> None:
    """Equal means; worth of two roots is 2 E v(1-v) = 2 (mean (1-mean) - variance)."""
    table = root_values_beta([1.0, 50.0], [1.0, 50.0], 4)

    assert allocate_roots(table, budget=4, max_roots=4, rng=rng()).tolist() == [0, 4]
    assert float(table[0, 2]) == pytest.approx(2 * (0.25 - 1 / 12))


def test_a_pool_too_large_for_the_exact_solver_goes_to_the_heap() -> None:
    v = rng(4).random(3000)
    assert allocation.EXACT_CELLS < 3000 * 9 * 4001

    counts = allocate_roots(v, budget=4000, max_roots=8, rng=rng())

    assert counts.sum() == 4000
    assert counts.max() <= 8


def test_equal_prompts_are_chosen_equally_often() -> None:
    chosen = sum(np.minimum(allocate_roots([0.5] * 6, budget=4, max_roots=4, rng=rng(seed)), 1) for seed in range(600))
    mean = float(np.mean(chosen))
    assert np.abs(chosen - mean).max() < 5 * np.sqrt(mean)


@settings(max_examples=40)
@given(st.lists(PROBABILITIES, min_size=2, max_size=8), st.integers(0, 16), SEEDS)
def test_the_order_of_the_prompts_does_not_matter(v: list[float], budget: int, seed: int) -> None:
    table = root_values(v, 8)
    budget = min(budget, 8 * len(v))
    forward = allocate_roots(table, budget=budget, max_roots=8, rng=rng(seed))
    backward = allocate_roots(table[::-1], budget=budget, max_roots=8, rng=rng(seed))
    assert worth(table, forward) == pytest.approx(worth(table[::-1], backward), abs=1e-9)


def test_a_budget_that_does_not_fit_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"33 root rollouts cannot be spent on 4 prompts, which take 0 to 32"):
        allocate_roots([0.5] * 4, budget=33, max_roots=8, rng=rng())
    with pytest.raises(ConfigError, match=r"3 root rollouts cannot be spent on 4 prompts, which take 4 to 32"):
        allocate_roots([0.5] * 4, budget=3, max_roots=8, least=1, rng=rng())
    with pytest.raises(ConfigError, match=r"tree.max_roots_per_prompt is 0"):
        check_spendable(np.zeros(4, np.int64), budget=0, max_roots=0)
    with pytest.raises(ValueError, match="least must be 0 to max_roots 8"):
        allocate_roots([0.5, 0.5], budget=9, max_roots=8, least=[9, 0], rng=rng())


@pytest.mark.parametrize("values", [[0.5, float("nan")], [1.5], np.zeros((2, 3)), np.full((2, 5), np.inf)])
def test_values_that_are_no_table_of_numbers_are_refused(values: Floats) -> None:
    with pytest.raises(ValueError, match=r"got shape|in \[0, 1\]"):
        allocate_roots(values, budget=2, max_roots=4, rng=rng())
    with pytest.raises(ValueError, match="positive numbers"):
        root_values_beta([1.0, 0.0], [1.0, 1.0], 4)


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


def test_continuations_under_beliefs_are_best_on_average_over_what_may_be_true() -> None:
    a, b = np.array([9.0, 1.0, 0.6, 12.0]), np.array([1.0, 1.0, 0.4, 8.0])
    draws = rng(2).beta(a, b, (100_000, 4))
    table = np.stack([prefix_value(draws, k).mean(axis=0) for k in range(7)], axis=1)

    counts = allocate_prefixes_beta(a, b, budget=6, rng=rng())

    assert worth(table, counts) == pytest.approx(best_by_trying_all(table, 6, 0), abs=3e-3)


def test_a_doubtful_anchor_saturates_sooner_than_a_sure_one_of_equal_mean() -> None:
    """Marginals: sure of q = .5: 1/2 1/4 1/8 1/16; Beta(1, 1), E q^k = 1/(k+1): 1/2 1/6 1/12 1/20."""
    counts = allocate_prefixes_beta([1e9, 1.0], [1e9, 1.0], budget=5, rng=rng())
    assert counts.tolist() == [3, 2]


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
