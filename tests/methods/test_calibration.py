"""Calibration metrics against numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.methods.calibration import Floats, brier, ece, ece_of, log_loss, reliability, spearman


def test_always_saying_one_half_has_the_known_scores() -> None:
    assert brier([0.5, 0.5], [1, 0]) == 0.25
    assert log_loss([0.5, 0.5], [1, 0]) == pytest.approx(math.log(2))
    assert ece([0.5, 0.5], [1, 0]) == 0.0


def test_scores_by_hand() -> None:
    predicted, happened = [0.9, 0.8, 0.3, 0.2], [1, 0, 0, 1]
    assert brier(predicted, happened) == pytest.approx((0.01 + 0.64 + 0.09 + 0.64) / 4)
    assert log_loss(predicted, happened) == pytest.approx(-np.log([0.9, 0.2, 0.7, 0.2]).mean())
    assert ece(predicted, happened) == pytest.approx((0.1 + 0.8 + 0.3 + 0.8) / 4)


def test_bins_pool_their_errors_before_the_sign_is_dropped() -> None:
    assert ece([0.51, 0.59, 1.0], [0, 1, 1]) == pytest.approx(abs(1.1 - 1.0) / 3)
    assert ece([0.51, 0.59], [0, 1], bins=100) == pytest.approx((0.51 + 0.41) / 2)


def test_a_sure_and_wrong_prediction_has_a_finite_log_loss() -> None:
    assert log_loss([0.0], [1]) == pytest.approx(16.118, abs=1e-3)


def test_nothing_has_no_score() -> None:
    assert all(math.isnan(score([], [])) for score in (brier, log_loss, ece, spearman))


def test_rank_correlation_by_hand_with_a_tie() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 25]) == pytest.approx(0.8)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=20, unique=True))
def test_rank_correlation_looks_at_order_only(values: list[float]) -> None:
    assert spearman(values, np.argsort(np.argsort(values))) == pytest.approx(1.0)
    assert spearman(values, [-value for value in values]) == pytest.approx(-1.0)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="equally long"):
        brier([0.5], [1, 0])
    with pytest.raises(ValueError, match="finite"):
        brier([float("nan")], [1])


def slow_ece(predicted: list[float], happened: list[int], bins: int) -> float:
    """By the book: for each bin the gap of the two means, weighted by the share of pairs in the bin."""
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = [i for i, p in enumerate(predicted) if low <= p < high or (p == 1.0 and number == bins - 1)]
        if inside:
            confidence = sum(predicted[i] for i in inside) / len(inside)
            accuracy = sum(happened[i] for i in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(confidence - accuracy)
    return total


PAIRS = st.lists(st.tuples(st.integers(0, 64).map(lambda n: n / 64), st.integers(0, 1)), min_size=1, max_size=40)


@given(PAIRS, st.sampled_from([1, 2, 4, 16]))
def test_scores_agree_with_the_slow_way(pairs: list[tuple[float, int]], bins: int) -> None:
    predicted, happened = [p for p, _ in pairs], [y for _, y in pairs]
    clipped = [min(max(p, 1e-7), 1 - 1e-7) for p in predicted]
    losses = [-math.log(p if y else 1 - p) for p, y in zip(clipped, happened, strict=True)]

    assert brier(predicted, happened) == pytest.approx(sum((p - y) ** 2 for p, y in pairs) / len(pairs))
    assert log_loss(predicted, happened) == pytest.approx(sum(losses) / len(pairs))
    assert ece(predicted, happened, bins=bins) == pytest.approx(slow_ece(predicted, happened, bins))


@given(PAIRS)
def test_scores_do_not_depend_on_the_order_of_pairs(pairs: list[tuple[float, int]]) -> None:
    forth, back = zip(*pairs, strict=True), zip(*pairs[::-1], strict=True)
    (p, y), (q, z) = forth, back
    for score in (brier, log_loss, ece, spearman):
        assert score(p, y) == pytest.approx(score(q, z), nan_ok=True)


def test_a_reliability_table_by_hand() -> None:
    table = reliability([0.0, 0.2, 0.6, 1.0], [0, 1, 1, 1], bins=2)
    assert table.tolist() == [[2, pytest.approx(0.2), 1], [2, pytest.approx(1.6), 2]]
    assert ece_of(table) == pytest.approx((0.8 + 0.4) / 4)


@given(PAIRS, PAIRS)
def test_tables_of_two_steps_add_up_to_the_table_of_both(
    first: list[tuple[float, int]], second: list[tuple[float, int]]
) -> None:
    def table(pairs: list[tuple[float, int]]) -> Floats:
        return reliability([p for p, _ in pairs], [y for _, y in pairs], bins=20)

    assert table(first) + table(second) == pytest.approx(table(first + second))


def test_an_empty_table_has_no_calibration_error() -> None:
    assert math.isnan(ece_of(np.zeros((10, 3))))
