"""Ages, verdicts and admission, with numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import chain_group, group_from_spec, spec
from trace_async.core.staleness import ages, judge_turns, permits_left
from trace_async.core.types import IntArray, Verdict
from trace_async.errors import InvariantError

AGES = st.lists(st.integers(min_value=-1, max_value=20), min_size=1, max_size=12).map(lambda x: np.array(x, np.int32))


def test_a_turn_is_as_old_as_its_oldest_version_and_a_failed_one_has_no_age() -> None:
    group = group_from_spec([spec(spec(outcome=1.0, version=5), spec(failed=True), version=3, version_max=6)])
    assert ages(group, trainer_version=7, trainer_epoch=1).tolist() == [4, 2, -1]
    assert ages(group, trainer_version=7, trainer_epoch=1).dtype == np.int32


def test_versions_of_an_earlier_epoch_are_as_far_away_as_their_numbers() -> None:
    group = chain_group((1.0,), turns=1, version=10, epoch=1)
    assert ages(group, trainer_version=8, trainer_epoch=2).tolist() == [2]
    assert ages(group, trainer_version=13, trainer_epoch=2).tolist() == [3]


def test_a_turn_from_the_future_of_the_same_epoch_ends_the_run_with_its_ids() -> None:
    group = chain_group((1.0,), turns=1, version=10, epoch=2, lease_id="lease-9")
    with pytest.raises(InvariantError, match=r"lease-9 turn 0 was sampled by version 10.*version 8.*actor-0"):
        ages(group, trainer_version=8, trainer_epoch=2)


def test_both_bounds_are_inclusive() -> None:
    verdicts = judge_turns(np.array([0, 2, 3, 8, 9, -1], np.int32), soft=2, hard=8)
    assert verdicts.tolist() == [Verdict.TRAIN, Verdict.TRAIN, Verdict.TIGHT, Verdict.TIGHT, *[Verdict.CONTEXT] * 2]
    assert verdicts.dtype == np.uint8


@given(AGES, st.integers(0, 6), st.integers(0, 6))
def test_no_turn_over_the_hard_bound_is_ever_trained(ages: IntArray, soft: int, more: int) -> None:
    verdicts = judge_turns(ages, soft=soft, hard=soft + more)
    trained = verdicts != Verdict.CONTEXT
    assert ((ages[trained] <= soft + more) & (ages[trained] >= 0)).all()
    assert (verdicts[(ages >= 0) & (ages <= soft)] == Verdict.TRAIN).all()


def test_bounds_in_the_wrong_order_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="soft 3 and hard 2"):
        judge_turns(np.array([0], np.int32), soft=3, hard=2)


def test_permits_run_out_and_never_go_negative() -> None:
    assert permits_left(0, 384) == 384
    assert permits_left(384, 384) == 0
    assert permits_left(500, 384) == 0
