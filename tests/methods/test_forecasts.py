"""Which outcome tests which prediction, against trees by hand, a slow oracle, and a policy whose chances are known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import chain_group, group_from_spec, random_group, spec
from trace_async.core.types import Group, GrownBy, Score
from trace_async.methods.forecasts import (
    bare_outcomes,
    prefix_forecasts,
    promised_flips,
    promised_mixed,
    prompt_forecasts,
    root_outcomes,
)

NAN = float("nan")


def branched() -> Group:
    """Turns in pre-order, with their predictions:

    0 (0.8)  root rollout, goes on to 1 (0.7) and ends with 2: success
    3        continuation at 1: failure
    4 (0.4)  continuation at 0, goes on to 5: success
    6        second root rollout: failure
    """
    second = spec(spec(outcome=1.0), spec(outcome=0.0), success=0.7)
    other = spec(spec(outcome=1.0), success=0.4, grown_by=GrownBy.CONTINUATION)
    return group_from_spec([spec(second, other, success=0.8), spec(outcome=0.0)])


def believed(group: Group, success: float, strength: float = NAN) -> Group:
    return replace(group, root_score=Score(success=success, predictor_version=0, strength=strength))


# ---- outcomes ------------------------------------------------------------------------------------------------------


def test_a_rollout_is_followed_along_its_own_chain() -> None:
    assert bare_outcomes(branched()).tolist() == [1, 1, 1, 0, 1, 1, 0]
    assert root_outcomes(branched()).tolist() == [1, 0]


def test_a_rollout_that_failed_or_was_closed_has_no_outcome() -> None:
    group = group_from_spec([spec(spec(failed=True)), spec(), spec(spec(outcome=1.0))])
    assert np.isnan(bare_outcomes(group)[:3]).all()
    assert root_outcomes(group).tolist() == [1]


# ---- what tests a prediction ---------------------------------------------------------------------------------------


def test_a_prompt_is_tested_by_its_root_rollouts_alone() -> None:
    forecasts = prompt_forecasts([believed(branched(), 0.3)])
    assert [array.tolist() for array in forecasts] == [[0.3], [1], [2]]


def test_a_prefix_is_tested_by_its_own_rollout_and_by_continuations_granted_right_there() -> None:
    forecasts = prefix_forecasts([branched()])
    # turn 0: itself and the continuation 4, but not 3, whose place was chosen further down
    assert forecasts.predicted == pytest.approx([0.8, 0.7, 0.4])
    assert forecasts.successes.tolist() == [2, 1, 1]
    assert forecasts.draws.tolist() == [2, 2, 1]


def test_every_draw_is_a_pair_of_its_own() -> None:
    predicted, happened = prefix_forecasts([branched()]).per_draw()
    assert predicted == pytest.approx([0.8, 0.8, 0.7, 0.7, 0.4])
    assert happened.tolist() == [1, 1, 1, 0, 1]


def test_what_was_selected_after_a_look_at_it_tests_nothing() -> None:
    first = spec(spec(outcome=1.0), spec(outcome=0.0, grown_by=GrownBy.SELECTED), success=0.6)
    forecasts = prefix_forecasts([group_from_spec([first])])
    assert forecasts.draws.tolist() == [1]


@pytest.mark.parametrize(("above", "successes"), [(0.5, 2), (0.4, 3), (0.3, 4), (1.9, 1), (2.0, 0), (-1.0, 4)])
def test_graded_outcomes_are_split_at_the_groups_threshold(above: float, successes: int) -> None:
    group = replace(chain_group((0.4, 0.5, 0.6, 2.0)), success_above=above)
    forecasts = prompt_forecasts([group])
    assert (forecasts.successes.tolist(), forecasts.draws.tolist()) == ([successes], [4])


def test_graded_continuations_are_split_at_the_groups_threshold_too() -> None:
    # one turn with prediction .9: its own rollout comes to .8, its continuations to .8, .6 and .2
    first = spec(*(spec(outcome=outcome) for outcome in (0.8, 0.8, 0.6, 0.2)), success=0.9)
    repeats, differs = 1 - 0.9**3, 1 - 0.1**3
    for above, successes, expected, flipped in ((0.5, 3, repeats, 1), (0.8, 0, differs, 0), (0.1, 4, repeats, 0)):
        group = replace(group_from_spec([first]), success_above=above)
        assert prefix_forecasts([group]).successes.tolist() == [successes]
        assert prefix_forecasts([group]).draws.tolist() == [4]
        promise = promised_flips([group])
        assert (promise.places, promise.realised) == (1, flipped)
        assert promise.expected == pytest.approx(expected)


def test_each_group_is_split_at_its_own_threshold() -> None:
    graded = chain_group((0.8, 0.2))
    groups = [replace(graded, success_above=above) for above in (0.1, 0.5, 0.9)]
    assert prompt_forecasts(groups).successes.tolist() == [2, 1, 0]
    assert promised_mixed(groups).realised == 1


def test_without_a_prediction_or_without_an_outcome_there_is_nothing_to_test() -> None:
    unknown, failed = believed(chain_group(), NAN), group_from_spec([spec(failed=True)])
    assert prompt_forecasts([unknown, failed]).draws.size == 0
    assert prefix_forecasts([failed]).draws.size == 0
    assert prompt_forecasts([]).per_draw()[0].size == 0
    assert promised_mixed([unknown, failed]) == promised_flips([failed]) == (0, 0.0, 0)


def oracle_end(group: Group, turn: int) -> float:
    """Outcome at the end of a turn's own chain, by walking down."""
    for child in range(group.num_turns):
        if group.parent[child] == turn and group.grown_by[child] == GrownBy.CHAIN:
            return oracle_end(group, child)
    return float(group.outcome[turn])


def oracle_draws(group: Group, turn: int) -> list[bool]:
    """Every draw from a turn, its own first."""
    ends = [oracle_end(group, turn)] + [
        oracle_end(group, child)
        for child in range(group.num_turns)
        if group.parent[child] == turn and group.grown_by[child] == GrownBy.CONTINUATION
    ]
    return [end > 0.5 for end in ends if not math.isnan(end)]


@given(st.integers(0, 10_000))
def test_draws_agree_with_a_slow_walk_over_any_tree(seed: int) -> None:
    group = random_group(np.random.default_rng(seed))
    expected: Counter[tuple[float, bool]] = Counter()
    for turn in range(group.num_turns):
        if not math.isnan(group.score[turn]):
            expected.update((float(group.score[turn]), won) for won in oracle_draws(group, turn))

    predicted, happened = prefix_forecasts([group]).per_draw()

    assert Counter(zip(predicted.tolist(), (happened > 0.5).tolist(), strict=True)) == expected


def play_adaptively(rng: np.random.Generator) -> Group:
    """One rollout over two prefixes with chances 0.5 and then 0.2 or 0.8; a failure is tried again where it seems odd.

    Predictions are the true chances, so all that could make them look dishonest is where continuations go.
    """
    good = bool(rng.random() < 0.5)
    chance = 0.8 if good else 0.2

    def end(success: float, **fields: object) -> object:
        return spec(outcome=float(rng.random() < success), **fields)

    bare = end(chance)
    again = [] if bare.outcome else [end(chance) for _ in range(3 if good else 1)]  # type: ignore[attr-defined]
    further = [] if bare.outcome else [end(0.5) for _ in range(2)]  # type: ignore[attr-defined]
    inner = spec(bare, *again, success=chance)  # type: ignore[arg-type]
    return group_from_spec([spec(inner, *further, success=0.5)])  # type: ignore[arg-type]


def test_true_chances_look_honest_although_continuations_follow_outcomes() -> None:
    rng = np.random.default_rng(0)
    predicted, happened = prefix_forecasts([play_adaptively(rng) for _ in range(500)]).per_draw()
    for chance in (0.2, 0.5, 0.8):
        of_chance = happened[np.isclose(predicted, chance)]
        deviation = math.sqrt(chance * (1 - chance) / of_chance.size)
        assert abs(of_chance.mean() - chance) < 3.5 * deviation, f"{of_chance.mean():.3f} for {chance}"


# ---- promises ------------------------------------------------------------------------------------------------------


def test_expected_mixed_groups_by_hand() -> None:
    groups = [believed(chain_group((1.0, 0.0)), 0.5), believed(chain_group((1.0, 1.0, 1.0)), 0.2)]
    promise = promised_mixed(groups)
    assert promise.places == 2
    assert promise.expected == pytest.approx(0.5 + (1 - 0.2**3 - 0.8**3))
    assert promise.realised == 1


def test_a_weak_belief_expects_fewer_mixed_groups_than_its_mean() -> None:
    # Beta(1, 1): two draws agree with chance 2/3
    weak, sure = believed(chain_group((1.0, 0.0)), 0.5, 2.0), believed(chain_group((1.0, 0.0)), 0.5, 1e9)
    assert promised_mixed([weak]).expected == pytest.approx(1 / 3)
    assert promised_mixed([sure]).expected == pytest.approx(0.5)


def test_a_single_rollout_is_never_expected_to_be_mixed() -> None:
    assert promised_mixed([believed(chain_group((1.0,)), 0.5)]) == (1, 0.0, 0)


def test_only_rollouts_that_came_to_an_outcome_were_promised_anything() -> None:
    group = believed(group_from_spec([spec(outcome=1.0), spec(outcome=0.0), spec(failed=True)]), 0.3)
    assert promised_mixed([group]).expected == pytest.approx(2 * 0.3 * 0.7)


def test_expected_flips_by_hand() -> None:
    # turn 0: success, one continuation, also a success; turn 1: success, one continuation, a failure
    promise = promised_flips([branched()])
    assert promise.places == 2
    assert promise.expected == pytest.approx(0.2 + 0.3)
    assert promise.realised == 1


def test_one_of_several_continuations_is_enough_to_flip_a_failure() -> None:
    first = spec(spec(outcome=0.0), spec(outcome=0.0), spec(outcome=1.0), spec(failed=True), success=0.4)
    promise = promised_flips([group_from_spec([first])])
    assert (promise.places, promise.realised) == (1, 1)
    assert promise.expected == pytest.approx(1 - 0.6**2)
