"""The default objective and the guards that all share: caps, vetoes, broken numbers, indifference to order and cuts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods.objectives.kit import OPEN, Turn, coefficients, policy, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.methods.objectives.measures import ObjectiveStats, finish_stats, merge_stats
from trace_async.methods.objectives.ratios import cap_of_sign
from trace_async.methods.objectives.registry import ChosenObjective


def test_caps_fall_with_age_for_good_turns_and_at_once_for_bad_ones() -> None:
    config = ObjectiveConfig(cap_positive=5.0, cap_negative=2.0, cap_decay=0.5)
    ages = (0, 1, 2, 3)
    good = cap_of_sign(turns_of(*[Turn(mu=(0.5,), age=age) for age in ages]), config)
    bad = cap_of_sign(turns_of(*[Turn(mu=(0.5,), age=age, advantage=-1.0) for age in ages]), config)
    tight = cap_of_sign(turns_of(*[Turn(mu=(0.5,), age=0, advantage=a, tight=True) for a in (-1.0, 1.0)]), config)
    assert good.tolist() == [5.0, 3.0, 2.0, 1.5]
    assert bad.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert tight.tolist() == [1.0, 1.0]


def test_a_decay_of_zero_leaves_the_full_cap_for_fresh_turns_only() -> None:
    turns = [Turn(mu=(0.5,), age=age) for age in (0, 1)]
    assert cap_of_sign(turns_of(*turns), ObjectiveConfig(cap_decay=0.0)).tolist() == [5.0, 1.0]


def test_a_turn_whose_geometric_ratio_leaves_the_window_is_vetoed_whole_and_counted() -> None:
    turns = turns_of(Turn(mu=(0.2, 0.2)), Turn(mu=(0.2, 0.2)), Turn(mu=(0.8, 0.8)))
    logprobs = policy((0.5, 0.2), (0.5, 0.5), (0.3, 0.3))  # geometric 1.58, 2.5, 0.375

    found = coefficients(logprobs, turns, ObjectiveConfig())
    metrics = finish_stats(ChosenObjective(ObjectiveConfig(m2_budget=0.0))(logprobs, turns)[1])

    torch.testing.assert_close(found[:2], torch.tensor([2.5, 1.0]))
    assert not found[2:].any()
    assert metrics["objective/vetoed_share"] == pytest.approx(2 / 3)
    assert metrics["objective/nonfinite_share"] == 0.0


def test_a_single_impossible_token_vetoes_its_turn() -> None:
    turns = turns_of(Turn(mu=(0.9,) * 40), Turn(mu=(0.9,) * 40))
    logprobs = policy((0.9,) * 39 + (0.9 * 0.9e-4,), (0.9,) * 39 + (0.9 * 1.1e-4,))
    found = coefficients(logprobs, turns, ObjectiveConfig())  # geometric ratios are .79 both times
    assert not found[:40].any()
    assert found[40:].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_no_number_takes_out_its_turn_and_nothing_else(poison: float) -> None:
    clean = turns_of(Turn(mu=(0.5, 0.5)), Turn(mu=(0.5, 0.5)))
    logprobs = policy((0.5, 0.5), (0.5, 0.5))
    with torch.no_grad():
        logprobs[1] = poison
    poisoned = replace(clean, behaviour_logprobs=clean.behaviour_logprobs.clone())
    poisoned.behaviour_logprobs[2] = poison

    for turns, broken in ((clean, 1), (poisoned, 2)):
        loss, stats = ChosenObjective(ObjectiveConfig(m2_budget=0.0))(logprobs, turns)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        metrics = finish_stats(stats)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert not gradient[: 2 * broken].any()
        assert metrics["objective/nonfinite_share"] == broken / 2
        assert metrics["objective/vetoed_share"] == 0.0
        assert metrics["objective/tokens"] == 4 - 2 * broken


def test_huge_ratios_do_not_overflow() -> None:
    turns = turns_of(Turn(mu=(0.5,)), Turn(mu=(0.5,), advantage=-1.0))
    far = replace(turns, behaviour_logprobs=torch.full((2,), -1000.0))
    loss, stats = ChosenObjective(replace(OPEN, veto_high=math.inf))(policy((0.5,), (0.5,)), far)
    metrics = finish_stats(stats)
    assert torch.isfinite(loss)
    assert all(math.isfinite(value) for key, value in metrics.items() if not key.endswith("harmful_sq_mean"))
    assert metrics["objective/max_abs_log_ratio"] == pytest.approx(1000.0 + math.log(0.5))
    assert metrics["objective/capped_share"] == 1.0


# ---- invariances -------------------------------------------------------------------------------------------------

RANDOM_TURNS = st.lists(
    st.builds(
        Turn,
        mu=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4).map(tuple),
        advantage=st.floats(-1.0, 1.0),
        mass=st.floats(0.1, 1.0),
        age=st.integers(0, 12),
        tight=st.booleans(),
        depth=st.integers(1, 12),
    ),
    min_size=2,
    max_size=6,
)


def policy_of(turns: list[Turn]) -> list[tuple[float, ...]]:
    """Another policy's probabilities of the same tokens."""
    return [
        tuple(min(1.0, p * (0.4 + 0.37 * ((j + t) % 5))) for t, p in enumerate(turn.mu)) for j, turn in enumerate(turns)
    ]


def by_turn(turns: list[Turn], rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    """Ascent coefficients under the default configuration, turn by turn."""
    found = coefficients(policy(*rows), turns_of(*turns), ObjectiveConfig())
    return list(torch.split(found, [len(turn.mu) for turn in turns]))


@settings(max_examples=40)
@given(RANDOM_TURNS)
def test_the_order_of_the_turns_does_not_matter(turns: list[Turn]) -> None:
    rows = policy_of(turns)
    first, second = by_turn(turns, rows), by_turn(turns[::-1], rows[::-1])
    torch.testing.assert_close(first, second[::-1])


@settings(max_examples=40)
@given(RANDOM_TURNS)
def test_a_turn_told_twice_with_half_its_mass_changes_nothing(turns: list[Turn]) -> None:
    mass = turns[0].mass
    assert mass is not None
    rows = policy_of(turns)
    whole = by_turn(turns, rows)
    split = by_turn([replace(turns[0], mass=mass / 2)] * 2 + turns[1:], [rows[0], *rows])
    torch.testing.assert_close(whole, [split[0] + split[1], *split[2:]])


@settings(max_examples=40)
@given(RANDOM_TURNS, st.integers(1, 5))
def test_micro_batches_add_up_to_the_whole(turns: list[Turn], cut: int) -> None:
    cut = min(cut, len(turns) - 1)
    rows = policy_of(turns)

    def run(part: list[Turn], probabilities: list[tuple[float, ...]]) -> tuple[float, ObjectiveStats]:
        loss, stats = ChosenObjective(ObjectiveConfig(m2_budget=0.0))(policy(*probabilities), turns_of(*part))
        return float(loss.detach()), stats

    whole, whole_stats = run(turns, rows)
    parts = [run(turns[:cut], rows[:cut]), run(turns[cut:], rows[cut:])]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-4, abs=1e-5)
    merged = finish_stats(merge_stats([stats for _, stats in parts]))
    assert merged == pytest.approx(finish_stats(whole_stats), rel=1e-9, abs=1e-12, nan_ok=True)
