"""What counts as success: by hand, at the threshold itself, and alike on both sides of the wire."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trace_async.core.outcomes import is_success

NUMBERS = st.floats(-1e9, 1e9)


def test_the_threshold_itself_and_what_has_no_outcome_are_no_success() -> None:
    outcomes = [0.0, 0.5, 0.51, 1.0, float("nan")]
    assert is_success(outcomes, 0.5).tolist() == [False, False, True, True, False]
    assert is_success(outcomes, 0.0).tolist() == [False, True, True, True, False]
    assert is_success([-2.0, -1.0, 0.0], -1.0).tolist() == [False, False, True]


def test_one_outcome_gives_one_answer() -> None:
    assert is_success(0.3, 0.2).shape == ()
    assert bool(is_success(0.3, 0.2))
    assert not bool(is_success(0.2, 0.3))


def test_rounding_makes_no_success_of_an_outcome_at_the_threshold() -> None:
    summed = 0.1 + 0.2
    assert summed > 0.3  # in double precision
    assert not is_success(summed, 0.3)
    travelled = np.asarray([0.1, 0.2, 0.8], np.float32).astype(np.float64)
    assert travelled[0] > 0.1  # as it comes from the wire
    assert not any(bool(is_success(value, above)) for value, above in zip(travelled, (0.1, 0.2, 0.8), strict=True))


@given(NUMBERS, NUMBERS)
def test_an_outcome_is_judged_alike_before_and_after_it_travelled(outcome: float, above: float) -> None:
    travelled = np.asarray([outcome], np.float32)
    before = bool(is_success(outcome, above))
    assert [before] == is_success(travelled, above).tolist() == is_success(travelled.astype(np.float64), above).tolist()
