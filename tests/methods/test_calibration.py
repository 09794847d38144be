"""Calibration metrics against numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.methods.calibration import brier, ece, log_loss, spearman


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
