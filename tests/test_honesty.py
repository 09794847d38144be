"""The predictor's figures of a step, and what is remembered from one step to the next."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import chain_group, random_group
from trace_async.core.types import Group, Score
from trace_async.learning.honesty import KINDS, Honesty, KnownPrompts


def predicted(success: float, outcomes: tuple[float, ...], *, prompt_id: str = "a") -> Group:
    group = chain_group(outcomes, turns=1, prompt_id=prompt_id)
    return replace(group, root_score=Score(success=success, predictor_version=0))


def test_figures_of_prompts_by_hand() -> None:
    row = Honesty().measure([predicted(0.25, (1.0, 0.0, 0.0)), predicted(0.8, (1.0,), prompt_id="b")])

    assert row["predictor/prompts/outcomes"] == 4
    assert row["predictor/prompts/brier"] == pytest.approx((0.75**2 + 2 * 0.25**2 + 0.2**2) / 4)
    assert row["predictor/prompts/log_loss"] == pytest.approx(-np.log([0.25, 0.75, 0.75, 0.8]).mean())
    assert row["predictor/prompts/ece"] == pytest.approx((abs(0.75 - 1) + 0.2) / 4)
    assert row["predictor/prompts/spearman"] == pytest.approx(1.0)
    assert row["predictor/prompts/bins"] == [[5, 3, 0.75, 1], [16, 1, 0.8, 1]]


def test_figures_are_of_successes_above_the_groups_threshold() -> None:
    graded = replace(predicted(0.25, (0.6, 0.2)), success_above=0.1)  # two successes; above .5 it would be one

    row = Honesty().measure([graded])

    assert row["predictor/prompts/brier"] == pytest.approx(0.75**2)
    assert row["predictor/prompts/bins"] == [[5, 2, 0.5, 2]]


def test_the_constant_knows_the_steps_before_and_nothing_of_this_one() -> None:
    honesty = Honesty()

    first = honesty.measure([predicted(0.9, (1.0, 1.0, 0.0))])
    second = honesty.measure([predicted(0.9, (1.0, 0.0))])

    assert first["predictor/prompts/constant_brier"] == 0.25  # one half
    assert second["predictor/prompts/constant_brier"] == pytest.approx((0.4**2 + 0.6**2) / 2)  # (2 + 1) / (3 + 2)


def test_a_prompt_is_new_until_a_step_after_the_one_that_consumed_it_first() -> None:
    honesty = Honesty()
    both = [predicted(0.5, (1.0,)), predicted(0.5, (0.0, 0.0))]

    assert honesty.measure(both)["predictor/new_prompts/outcomes"] == 3
    again = honesty.measure([*both, predicted(0.5, (1.0,), prompt_id="b")])

    assert again["predictor/prompts/outcomes"] == 4
    assert again["predictor/new_prompts/outcomes"] == 1


def test_a_step_without_predictions_has_figures_that_are_unknown() -> None:
    row = Honesty().measure([predicted(float("nan"), (1.0, 0.0))])

    for kind in KINDS:
        assert row[f"predictor/{kind}/outcomes"] == 0
        for name in ("brier", "constant_brier", "log_loss", "ece", "spearman"):
            value = row[f"predictor/{kind}/{name}"]
            assert isinstance(value, float)
            assert math.isnan(value)
        assert row[f"predictor/{kind}/bins"] == []


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_a_resumed_run_measures_what_the_killed_one_would_have(seed: int, stop: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [[random_group(rng, prompt_id=f"p{rng.integers(4)}") for _ in range(2)] for _ in range(5)]
    whole = Honesty()
    expected = [whole.measure(step) for step in steps]

    before = Honesty()
    measured = [before.measure(step) for step in steps[:stop]]
    after = Honesty(json.loads(json.dumps(before.state())))
    measured += [after.measure(step) for step in steps[stop:]]

    assert json.dumps(measured) == json.dumps(expected)
    assert after.state() == whole.state()


@given(st.lists(st.text(max_size=8), max_size=30), st.text(max_size=8))
def test_a_known_prompt_is_never_taken_for_a_new_one(ids: list[str], other: str) -> None:
    known = KnownPrompts()
    known.add(ids)
    again = KnownPrompts(known.state())

    assert all(prompt_id in again for prompt_id in ids)
    assert (other in again) == (other in known)


def test_known_prompts_take_few_new_ones_for_known_and_bounded_space() -> None:
    known = KnownPrompts()
    known.add(f"train-{index}" for index in range(10_000))

    mistaken = sum(f"other-{index}" in known for index in range(10_000))

    assert mistaken / 10_000 == pytest.approx(1 - math.exp(-10_000 / 2**20), abs=0.004)
    assert len(known.state()) < 180_000


def test_known_prompts_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 131072"):
        KnownPrompts("eJxjAAAAAQAB")
