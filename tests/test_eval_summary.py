"""Statistics of an evaluation: hand-computed means, a slow oracle of the bootstrap, and its coverage."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_async.app import eval_summary
from trace_async.app.eval_records import Row
from trace_async.app.eval_summary import NUM_RESAMPLES, bootstrap_interval, natural, summarize_mode
from trace_async.app.evaluate import wilson_interval


def row(index: int, outcome: float = 0.0, *, failed: bool = False, **changes: object) -> Row:
    made = Row(
        mode="sampled",
        task_index=index,
        task_id=f"t{index}",
        labels={},
        failed=failed,
        outcome=math.nan if failed else outcome,
        num_turns=0 if failed else 2,
        num_invalid=0,
        sampled_tokens=0 if failed else 10,
        prompt_tokens=0 if failed else 5,
        context_tokens=0 if failed else 20,
        metrics={},
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def test_means_and_counts_by_hand() -> None:
    rows = [
        row(0, 1.0, metrics={"em": 1.0, "f1": 1.0}, labels={"hops": "2", "kind": "bridge"}, num_turns=1),
        row(1, 0.0, metrics={"em": 0.0, "f1": 0.5}, labels={"hops": "2", "kind": "comparison"}, num_turns=3),
        row(2, 0.6, metrics={"f1": 0.25}, labels={"hops": "10", "kind": "bridge"}, num_turns=4, num_invalid=2),
        row(3, failed=True, labels={"hops": "10"}),
    ]
    found = summarize_mode(rows)
    overall = found.overall
    assert (overall.num_played, overall.num_failed) == (3, 1)
    means = {name: measure.mean for name, measure in overall.measures.items()}
    assert means == pytest.approx(
        {
            "success": 2 / 3,
            "outcome": 1.6 / 3,
            "em": 0.5,
            "f1": 1.75 / 3,
            "turns": 8 / 3,
            "invalid_share": 2 / 8,  # of turns, not of episodes
            "sampled_tokens": 10.0,
            "prompt_tokens": 5.0,
            "context_tokens": 20.0,
        }
    )
    assert list(means)[:4] == ["success", "outcome", "em", "f1"]
    assert overall.measures["em"].num == 2  # the third did not say
    assert overall.measures["success"][1:3] == pytest.approx(wilson_interval(2, 3))
    assert {name: list(parts) for name, parts in found.by_label.items()} == {
        "hops": ["2", "10"],
        "kind": ["bridge", "comparison"],
    }
    long = found.by_label["hops"]["10"]
    assert (long.num_played, long.num_failed, long.measures["f1"].mean) == (1, 1, 0.25)
    assert math.isnan(long.measures["em"].mean)
    assert long.measures["em"].num == 0
    assert math.isnan(long.measures["f1"].low)  # one task says nothing of others


@pytest.mark.parametrize(("above", "wins"), [(0.5, 2), (0.6, 1), (0.2, 3), (1.0, 0), (-2.0, 4)])
def test_success_is_an_outcome_above_the_threshold(above: float, wins: int) -> None:
    rows = [row(index, outcome) for index, outcome in enumerate((1.0, 0.6, 0.3, -1.0))] + [row(4, failed=True)]
    measures = summarize_mode(rows, success_above=above).overall.measures
    assert measures["success"].mean == wins / 4
    assert measures["success"][1:3] == pytest.approx(wilson_interval(wins, 4))
    assert measures["outcome"].mean == pytest.approx(0.9 / 4)


def test_nothing_played_is_unknown_and_no_zero() -> None:
    part = summarize_mode([row(0, failed=True)]).overall
    assert (part.num_played, part.num_failed) == (0, 1)
    assert all(math.isnan(value) for measure in part.measures.values() for value in measure[:3])


def test_a_metric_that_is_called_as_a_measure_is_told_apart() -> None:
    measures = summarize_mode(
        [row(0, 1.0, metrics={"turns": 7.0}), row(1, 0.0, metrics={"turns": 9.0})]
    ).overall.measures
    assert measures["turns"].mean == 2
    assert measures["environment/turns"].mean == 8


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30), st.randoms())
@settings(max_examples=20, deadline=None)
def test_the_order_in_which_episodes_ended_changes_nothing(values: list[float], draw: random.Random) -> None:
    rows = [row(index, value, metrics={"m": value}) for index, value in enumerate(values)]
    once = summarize_mode(rows)
    draw.shuffle(rows)
    assert summarize_mode(rows) == once
    measure = once.overall.measures["m"]
    assert min(values) - 1e-9 <= measure.low <= measure.high <= max(values) + 1e-9


def slow_interval(above: list[float], below: list[float], seed: int) -> tuple[float, float]:
    """One resample after the other, task by task."""
    rng = np.random.default_rng(seed)
    n = len(above)
    ratios: list[float] = []
    for _ in range(NUM_RESAMPLES):
        drawn = rng.integers(n, size=n).tolist()
        total = sum(below[task] for task in drawn)
        if total > 0:
            ratios.append(sum(above[task] for task in drawn) / total)
    ratios.sort()

    def percentile(share: float) -> float:
        place = share * (len(ratios) - 1)
        left = math.floor(place)
        right = min(left + 1, len(ratios) - 1)
        return ratios[left] + (place - left) * (ratios[right] - ratios[left])

    return percentile(0.025), percentile(0.975)


@pytest.mark.parametrize("chunk", [1, 7, 4_000_000])
def test_the_bootstrap_agrees_with_one_resample_after_the_other(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_summary, "_CHUNK_DRAWS", chunk)
    above = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [3.5, 2.0, 1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0]]
    below = [[1.0, 2.0, 0.0], [1.0, 3.0, 0.0], [1.0, 2.0, 1.0], [1.0, 1.0, 0.0], [1.0, 4.0, 0.0]]
    found = bootstrap_interval(np.array(above), np.array(below), seed=11)
    for place in range(3):
        expected = slow_interval([one[place] for one in above], [one[place] for one in below], 11)
        assert found[:, place] == pytest.approx(expected, abs=1e-12)


def test_the_bootstrap_of_two_tasks_is_theirs() -> None:
    # resamples are (a, a), (a, b), (b, a), (b, b): a quarter each, so the percentiles are the tasks themselves
    interval = bootstrap_interval(np.array([[0.0], [1.0]]), np.ones((2, 1)))
    assert interval[:, 0].tolist() == [0.0, 1.0]


def test_the_intervals_of_means_hold_the_truth_as_often_as_they_say() -> None:
    """Means of 60 exponential values: the percentile bootstrap is known to fall a little short of 95 %."""
    rng = np.random.default_rng(5)
    trials = 600
    values = rng.exponential(2.0, size=(60, trials))
    low, high = bootstrap_interval(values, np.ones_like(values))
    covered = float(np.mean((low <= 2.0) & (high >= 2.0)))
    assert 0.89 <= covered <= 0.965  # 0.93 within three standard errors of the share


def test_the_intervals_of_ratios_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(6)
    turns = rng.integers(1, 6, size=(80, 600)).astype(float)
    unreadable = rng.binomial(turns.astype(int), 0.3).astype(float)
    low, high = bootstrap_interval(unreadable, turns)
    assert 0.92 <= float(np.mean((low <= 0.3) & (high >= 0.3))) <= 0.97


def test_numbers_inside_words_sort_as_numbers() -> None:
    assert sorted(["10", "2", "3hop2", "3hop1", "", "bridge", "1", "²"], key=natural) == [
        *("1", "2", "3hop1", "3hop2", "10", ""),
        *("bridge", "²"),
    ]
