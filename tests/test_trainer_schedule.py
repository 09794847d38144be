"""Learning rates by hand: warm-up, the three schedules, and the brake for old data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.config import LearnerConfig
from trace_async.trainer_schedule import ess_factor, scheduled_rate


def rates(learner: LearnerConfig, *steps: int) -> list[float]:
    return [scheduled_rate(learner, step=step) for step in steps]


def test_the_default_keeps_the_learning_rate() -> None:
    learner = LearnerConfig(learning_rate=3e-4, max_steps=10)
    assert rates(learner, 0, 5, 10, 99) == [3e-4] * 4


def test_a_line_falls_from_the_first_step_to_its_share_at_the_last() -> None:
    learner = LearnerConfig(learning_rate=1.0, schedule="linear", decay_to=0.2, max_steps=4)
    assert rates(learner, 0, 1, 2, 3, 4, 9) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_cosine_falls_slowly_at_both_ends() -> None:
    learner = LearnerConfig(learning_rate=1.0, schedule="cosine", decay_to=0.0, max_steps=4)
    middle = [0.5 * (1 + math.sqrt(0.5)), 0.5, 0.5 * (1 - math.sqrt(0.5))]
    assert rates(learner, 0, 1, 2, 3, 4, 9) == pytest.approx([1.0, *middle, 0.0, 0.0], abs=1e-12)
    half = LearnerConfig(learning_rate=1.0, schedule="cosine", decay_to=0.5, max_steps=4)
    assert rates(half, 2, 4) == pytest.approx([0.75, 0.5])


def test_a_constant_rate_never_falls() -> None:
    assert rates(LearnerConfig(learning_rate=2.0, schedule="constant", max_steps=3), 0, 2, 50) == [2.0] * 3


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_in_equal_parts_and_multiplies_the_schedule(schedule: str) -> None:
    cold = LearnerConfig(learning_rate=1.0, schedule=schedule, max_steps=8)
    warm = LearnerConfig(learning_rate=1.0, schedule=schedule, max_steps=8, warmup_steps=4)
    shares = [found / expected for found, expected in zip(rates(warm, *range(6)), rates(cold, *range(6)), strict=True)]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_the_brake_by_hand() -> None:
    weights = [1.0, 0.5, 2.0, 4.0]  # ESS 7.5^2 / 21.25 = 2.647059 of 4
    sums = (4.0, sum(weights), sum(weight * weight for weight in weights))
    assert ess_factor(sums) == pytest.approx(0.813489, abs=1e-6)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_the_brake_lies_between_one_turn_that_counts_and_all_alike(weights: list[float]) -> None:
    count = float(len(weights))
    factor = ess_factor((count, sum(weights), sum(weight * weight for weight in weights)))
    assert math.sqrt(1 / count) * (1 - 1e-9) <= factor <= 1.0


def test_on_policy_data_and_no_data_are_not_braked() -> None:
    assert ess_factor((3.0, 3.0, 3.0)) == 1.0
    assert ess_factor((0.0, 0.0, 0.0)) == 1.0
