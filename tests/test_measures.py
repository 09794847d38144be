"""The metrics of a step, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.builders import chain_group, group_from_spec, spec
from trace_async.core.types import ActorStatus, Group, GrownBy
from trace_async.learning.batching import Batch, BatchRule, make_batch
from trace_async.learning.measures import Rates, batch_measures
from trace_async.methods.credit import sibling_credit

RULE = BatchRule(credit=sibling_credit, soft_age_steps=1, max_age_steps=2, pad_id=0, micro_batch_tokens=64)


def batch_of(*groups: Group, version: int = 0) -> Batch:
    named = [replace(group, group_id=f"g{index}", lease_id=f"g{index}") for index, group in enumerate(groups)]
    return make_batch(named, rule=RULE, version=version, epoch=1)


def branched() -> Group:
    """Root rollouts end with 1 and 0; a continuation of the first ends with 0."""
    first = spec(spec(outcome=1.0), spec(outcome=0.0, grown_by=GrownBy.CONTINUATION))
    return group_from_spec([first, spec(outcome=0.0)])


def test_success_counts_root_rollouts_only_and_the_score_every_end() -> None:
    row = batch_measures(batch_of(branched()), max_age_steps=2)

    assert row["rollout/success"] == pytest.approx(1 / 2)
    assert row["critic/score/mean"] == pytest.approx(1 / 3)


def test_success_is_above_each_groups_threshold_and_the_score_is_not_touched() -> None:
    graded = chain_group((0.8, 0.4))
    for thresholds, success in (((0.5, 0.5), 1 / 2), ((0.3, 0.5), 3 / 4), ((0.8, 0.5), 1 / 4), ((0.9, 1.0), 0.0)):
        groups = [replace(graded, success_above=above) for above in thresholds]
        row = batch_measures(batch_of(*groups), max_age_steps=2)
        assert row["rollout/success"] == pytest.approx(success)
        assert row["critic/score/mean"] == pytest.approx(0.6)
        assert row["rollout/effective_ratio"] == 1.0


def test_effective_ratio_is_the_share_of_groups_with_different_outcomes() -> None:
    groups = [chain_group((1.0, 0.0)), chain_group((1.0, 1.0)), chain_group((0.0, 0.0)), chain_group((0.2, 0.3))]

    assert batch_measures(batch_of(*groups), max_age_steps=2)["rollout/effective_ratio"] == 0.5


def test_ages_are_of_trained_turns_and_shares_of_played_ones() -> None:
    fresh, old = chain_group((1.0, 0.0), turns=1, version=3), chain_group((1.0, 0.0), turns=1, version=0)

    row = batch_measures(batch_of(fresh, old, version=3), max_age_steps=2)

    assert (row["staleness/age_mean"], row["staleness/age_max"]) == (0.0, 0.0)
    assert row["staleness/age_0_share"] == 0.5
    assert row["staleness/over_age_share"] == 0.5


def test_failed_nodes_are_neither_turns_nor_invalid() -> None:
    group = group_from_spec([spec(outcome=1.0), spec(outcome=0.0), spec(failed=True)])

    row = batch_measures(batch_of(group), max_age_steps=2)

    assert (row["rollout/turns"], row["rollout/failed_nodes"], row["rollout/invalid_share"]) == (2, 1, 0)


def test_what_is_not_known_is_nan_and_not_zero() -> None:
    row = batch_measures(batch_of(group_from_spec([spec(failed=True)])), max_age_steps=2)

    for key in ("rollout/success", "critic/score/mean", "staleness/age_mean", "staleness/age_max"):
        assert math.isnan(row[key])


def status(*, busy_s: float, idle_s: float) -> ActorStatus:
    return ActorStatus(
        actor_id="a", host="h", pid=1, version=0, live_roots=0, counters={"busy_s": busy_s, "idle_s": idle_s}, trees=()
    )


def test_rates_are_between_two_readings() -> None:
    rates = Rates(10.0)
    rates.receive(chain_group((1.0, 0.0), turns=2), num_bytes=160)

    row = rates.read(12.0, {"a": status(busy_s=3.0, idle_s=1.0)})
    again = rates.read(14.0, {"a": status(busy_s=4.0, idle_s=4.0)})

    assert row["rollout/turns_per_s"] == 2.0
    assert row["wire/bytes_per_sampled_token"] == 20.0
    assert row["engine/idle_share"] == 0.25
    assert again["rollout/turns_per_s"] == 0.0
    assert math.isnan(again["wire/bytes_per_sampled_token"])
    assert again["engine/idle_share"] == 0.75


def test_a_restarted_actor_counts_from_nothing() -> None:
    rates = Rates(0.0)
    rates.read(1.0, {"a": status(busy_s=100.0, idle_s=100.0)})

    assert rates.read(2.0, {"a": status(busy_s=1.0, idle_s=3.0)})["engine/idle_share"] == 0.75
