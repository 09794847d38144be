"""Who gets a round's roots: exact sums, caps, repeatable draws, nobody starved; and what each method prefers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.errors import ConfigError
from trace_async.methods.allocation import Counts, allocate_roots, root_values_beta
from trace_async.methods.root_allocators import ROOT_ALLOCATORS, make_root_allocator

POSITIVE = st.floats(0.05, 50.0)
SEEDS = st.integers(0, 2**32 - 1)
NAMES = sorted(ROOT_ALLOCATORS)


class Belief(NamedTuple):
    alpha: float
    beta: float


def sure(success: float, *, rollouts: float = 100.0) -> Belief:
    return Belief(success * rollouts, (1.0 - success) * rollouts)


def roots(
    name: str,
    beliefs: list[Belief],
    *,
    budget: int,
    max_roots: int = 8,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Counts:
    rng = np.random.default_rng(seed)
    return make_root_allocator(name, options or {}).allocate(beliefs, budget=budget, max_roots=max_roots, rng=rng)


# ---- what all of them keep -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_counts_sum_to_the_budget_under_the_cap_and_the_same_seed_draws_the_same(
    name: str, data: st.DataObject
) -> None:
    beliefs = [Belief(*pair) for pair in data.draw(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=20))]
    max_roots = data.draw(st.integers(1, 8))
    budget = data.draw(st.integers(0, max_roots * len(beliefs)))
    seed = data.draw(SEEDS)
    share = data.draw(st.floats(0.0, 1.0))
    options = {"explore_share": share} if name == "trace" else {}

    counts = roots(name, beliefs, budget=budget, max_roots=max_roots, seed=seed, options=options)
    again = roots(name, beliefs, budget=budget, max_roots=max_roots, seed=seed, options=options)

    assert counts.dtype == np.int64
    assert counts.shape == (len(beliefs),)
    assert counts.sum() == budget
    assert counts.min() >= 0
    assert counts.max() <= max_roots
    assert counts.tolist() == again.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_that_the_pool_cannot_take_is_refused_with_the_keys_to_change(name: str) -> None:
    with pytest.raises(ConfigError, match=r"17 root rollouts cannot be spent on 2 prompts.*candidates_per_round"):
        roots(name, [Belief(1.0, 1.0)] * 2, budget=17)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_which_the_same_is_believed_are_chosen_equally_often(name: str) -> None:
    times = np.zeros(12)
    for seed in range(400):
        times += roots(name, [Belief(2.0, 2.0)] * 12, budget=12, max_roots=4, seed=seed) > 0
    mean = float(times.mean())
    assert np.abs(times - mean).max() < 5 * np.sqrt(mean)


@pytest.mark.parametrize(("name", "size"), [("even", 8), ("mopps", 128), ("pcl", 128), ("trace", 128)])
def test_who_looks_at_beliefs_sees_the_whole_pool_and_even_draws_what_it_needs(name: str, size: int) -> None:
    assert make_root_allocator(name, {}).pool_size(128, budget=61, max_roots=8) == size


# ---- trace ---------------------------------------------------------------------------------------------------------


def test_without_exploration_trace_is_the_optimum_of_the_expected_number_of_mixed_groups() -> None:
    beliefs = [Belief(*pair) for pair in np.random.default_rng(5).uniform(0.3, 8.0, (40, 2)).tolist()]
    table = root_values_beta([b.alpha for b in beliefs], [b.beta for b in beliefs], 8)
    best = allocate_roots(table, budget=50, max_roots=8, rng=np.random.default_rng(0))

    counts = roots("trace", beliefs, budget=50, options={"explore_share": 0.0})

    rows = np.arange(40)
    assert float(table[rows, counts].sum()) == pytest.approx(float(table[rows, best].sum()))


def test_the_two_forms_differ_where_beliefs_are_vague() -> None:
    beliefs = [Belief(0.5, 0.5), sure(0.3)]  # worth of two: 2 E v(1-v) = 0.25 against 0.42; at the means 0.5, 0.42

    by_belief = roots("trace", beliefs, budget=2, options={"explore_share": 0.0})
    by_mean = roots("trace", beliefs, budget=2, options={"explore_share": 0.0, "form": "point"})

    assert by_belief.tolist() == [0, 2]
    assert by_mean.tolist() == [2, 0]


def test_the_point_form_keeps_means_off_the_ends() -> None:
    beliefs = [Belief(1.0, 1e-300), sure(0.99)]  # both clipped to 0.98, or the first would be worth nothing
    options = {"explore_share": 0.0, "form": "point"}
    taken = {tuple(roots("trace", beliefs, budget=2, seed=seed, options=options).tolist()) for seed in range(20)}
    assert taken == {(2, 0), (0, 2)}


def test_a_floor_of_one_leaves_nobody_out() -> None:
    beliefs = [sure(success) for success in (0.5, 0.3, 0.1, 0.9, 0.02)]
    counts = roots("trace", beliefs, budget=12, options={"explore_share": 0.0, "form": "point", "least": 1})
    assert counts.tolist() == [4, 3, 2, 2, 1]


@pytest.mark.parametrize("believed", [0.02, 0.98])
def test_a_prompt_believed_hopeless_or_solved_is_tried_now_and_then_by_exploration_alone(believed: float) -> None:
    beliefs = [sure(believed), *[sure(0.5)] * 15]

    explored = [int(roots("trace", beliefs, budget=20, seed=seed)[0]) for seed in range(800)]
    never = [
        int(roots("trace", beliefs, budget=20, seed=seed, options={"explore_share": 0.0})[0]) for seed in range(50)
    ]

    assert set(explored) == {0, 2}, "two roots: the fewest that can be mixed"
    expected = 800 * 0.1 * 20 / 2 / 16  # one of 16 candidates a round
    assert sum(count > 0 for count in explored) == pytest.approx(expected, abs=4 * np.sqrt(expected))
    assert set(never) == {0}


def test_a_budget_too_small_for_a_whole_explored_prompt_explores_by_chance() -> None:
    beliefs = [sure(0.02), sure(0.5), sure(0.5), sure(0.5)]
    tried = sum(int(roots("trace", beliefs, budget=6, max_roots=3, seed=seed)[0]) > 0 for seed in range(2000))
    expected = 2000 * 0.1 * 6 / 2 / 4
    assert tried == pytest.approx(expected, abs=4 * np.sqrt(expected))


def test_exploring_everything_is_two_roots_each_for_prompts_drawn_at_random() -> None:
    beliefs = [sure(0.02)] * 10 + [sure(0.5)] * 10
    counts = [roots("trace", beliefs, budget=20, seed=seed, options={"explore_share": 1.0}) for seed in range(200)]
    assert {frozenset(count.tolist()) for count in counts} == {frozenset({0, 2})}
    assert np.mean([count[:10].sum() for count in counts]) == pytest.approx(10.0, abs=0.5)


def test_in_a_world_that_moves_no_prompt_starves_and_solved_ones_come_back() -> None:
    """Half of twenty prompts are solved at the start and forgotten by the policy after round ten.

    Beliefs are discounted counts that change on a visit only, as those of the beta predictor.
    """
    rng = np.random.default_rng(0)
    success = np.array([0.97] * 10 + [0.5] * 10)
    counted = np.stack([success * 12, (1.0 - success) * 12], axis=1)
    roots_of_forgotten = []
    for number in range(150):
        if number == 10:
            success[:10] = 0.4
        beliefs = [Belief(float(1 + s), float(1 + f)) for s, f in counted]
        counts = roots("trace", beliefs, budget=20, max_roots=4, seed=number)
        succeeded = rng.binomial(counts, success)
        visited = counts > 0
        counted[visited] = 0.8 * counted[visited] + np.stack([succeeded, counts - succeeded], axis=1)[visited]
        roots_of_forgotten.append(int(counts[:10].sum()))

    assert sum(roots_of_forgotten[:10]) < 0.2 * 10 * 20, "solved prompts are left alone"
    assert sum(roots_of_forgotten[-20:]) > 0.4 * 20 * 20, "they are found to have drifted, and come back"


# ---- even, mopps, pcl ----------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 200), SEEDS)
def test_even_counts_differ_by_at_most_one_over_as_few_prompts_as_possible(
    num_candidates: int, max_roots: int, budget: int, seed: int
) -> None:
    budget = min(budget, num_candidates * max_roots)
    counts = roots("even", [Belief(1.0, 1.0)] * num_candidates, budget=budget, max_roots=max_roots, seed=seed)
    active = counts[counts > 0]
    assert len(active) == -(-budget // max_roots)
    assert len(active) == 0 or active.max() - active.min() <= 1


def test_pcl_takes_the_prompts_whose_mean_is_nearest_to_the_target() -> None:
    beliefs = [sure(0.1), sure(0.45), Belief(1.0, 1.0), sure(0.9), sure(0.7)]
    assert roots("pcl", beliefs, budget=8, max_roots=4).tolist() == [0, 4, 4, 0, 0]
    assert roots("pcl", beliefs, budget=8, max_roots=4, options={"target": 0.8}).tolist() == [0, 0, 0, 4, 4]


def test_mopps_draws_so_a_vague_belief_is_tried_where_a_sure_one_of_equal_mean_is_not() -> None:
    beliefs = [Belief(0.8, 0.2), sure(0.8), sure(0.6), sure(0.6)]
    chosen = np.zeros(4)
    for seed in range(300):
        chosen += roots("mopps", beliefs, budget=8, max_roots=4, seed=seed) > 0
    assert chosen[0] > 20
    assert chosen[1] < 5


def test_mopps_with_sure_beliefs_filters_like_pcl() -> None:
    beliefs = [sure(success, rollouts=1e9) for success in (0.1, 0.45, 0.52, 0.9, 0.7)]
    assert roots("mopps", beliefs, budget=8, max_roots=4).tolist() == [0, 4, 4, 0, 0]


# ---- names and options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("evn", {}, "tree.root_allocator = 'evn' is not known; did you mean 'even'"),
        ("even", {"clip": 0.1}, "tree.root_options.clip is no option here; it takes none"),
        ("trace", {"form": "bta"}, "tree.root_options.form must be one of 'beta', 'point'"),
        ("trace", {"clip": 0.5}, "tree.root_options.clip must be >= 0 and < 0.5"),
        ("trace", {"least": 2}, "tree.root_options.least must be 0"),
        ("trace", {"explore_share": 1.5}, "tree.root_options.explore_share must lie between 0 and 1"),
        ("mopps", {"target": -1}, "tree.root_options.target must lie between 0 and 1"),
    ],
)
def test_names_and_options_that_cannot_be_meant_are_refused(
    name: str, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_root_allocator(name, options)
