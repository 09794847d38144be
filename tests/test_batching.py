"""What becomes of a group at consumption, on trees small enough to judge by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.builders import TurnSpec, chain_group, group_from_spec, spec
from trace_async.core.tree_packing import TreeBatch
from trace_async.core.types import Group, GroupVerdict
from trace_async.errors import InvariantError
from trace_async.learning.batching import BatchRule, as_of, make_batch
from trace_async.methods.credit import sibling_credit

RULE = BatchRule(credit=sibling_credit, soft_age_steps=1, max_age_steps=2, pad_id=0, micro_batch_tokens=64)


def verdict(group: Group, *, version: int = 0) -> GroupVerdict:
    (only,) = make_batch([group], rule=RULE, version=version, epoch=1).verdicts
    return only


def test_a_mixed_group_is_trained() -> None:
    assert verdict(chain_group((1.0, 0.0))) is GroupVerdict.TRAINED


@pytest.mark.parametrize("outcomes", [(1.0, 1.0), (0.0, 0.0, 0.0), (0.3, 0.3), (1.0,)])
def test_a_group_without_contrast_is_flat(outcomes: tuple[float, ...]) -> None:
    assert verdict(chain_group(outcomes)) is GroupVerdict.FLAT


def test_a_group_whose_every_rollout_failed_is_broken() -> None:
    assert verdict(group_from_spec([spec(failed=True), spec(failed=True)])) is GroupVerdict.BROKEN


@pytest.mark.parametrize(("version", "expected"), [(2, GroupVerdict.TRAINED), (3, GroupVerdict.STALE)])
def test_a_group_is_stale_when_every_turn_with_credit_is_over_the_bound(version: int, expected: GroupVerdict) -> None:
    assert verdict(chain_group((1.0, 0.0)), version=version) is expected


def test_a_fresh_turn_under_an_old_one_still_trains() -> None:
    def chain(outcome: float) -> TurnSpec:
        return spec(spec(outcome=outcome, version=4), version=0)

    batch = make_batch([group_from_spec([chain(1.0), chain(0.0)])], rule=RULE, version=4, epoch=1)

    assert batch.verdicts == [GroupVerdict.TRAINED]
    (part,) = batch.minibatches
    assert part.turns.depth[part.turns.trained].tolist() == [2, 2]
    (row,) = part.rows
    assert sorted(set(part.turns.turn[row.token_index[row.scored]].tolist())) == [1, 3]
    assert part.turns.depth[[1, 3]].tolist() == [2, 2]


def test_the_denominator_does_not_depend_on_what_is_masked() -> None:
    groups = [chain_group((1.0, 0.0)), replace(chain_group((1.0, 1.0)), group_id="flat", lease_id="flat")]

    fresh = make_batch(groups, rule=RULE, version=0, epoch=1)
    old = make_batch(groups, rule=RULE, version=9, epoch=1)

    (before,), (after,) = fresh.minibatches, old.minibatches
    assert after.rows == []
    assert before.denominators == after.denominators
    assert before.denominators.tokens == pytest.approx(8.0)  # 2 groups x 2 turns deep x 2 tokens, mass 1


def test_a_group_of_an_earlier_epoch_is_judged_by_the_distance_of_versions() -> None:
    group = chain_group((1.0, 0.0), version=7)

    batch = make_batch([group], rule=RULE, version=5, epoch=2)

    assert np.unique(batch.items[0].ages).tolist() == [2]


def test_a_turn_from_the_future_of_the_same_epoch_ends_the_run() -> None:
    with pytest.raises(InvariantError, match="stamps wrong versions"):
        make_batch([chain_group((1.0, 0.0), version=7)], rule=RULE, version=5, epoch=1)


@pytest.mark.parametrize("packs_trees", [True, False])
def test_a_model_that_packed_trees_would_change_gets_path_rows(packs_trees: bool) -> None:
    rule = replace(RULE, packs_trees=packs_trees)
    batch = make_batch([chain_group((1.0, 0.0))], rule=rule, version=0, epoch=1)
    (part,) = batch.minibatches
    assert [isinstance(row, TreeBatch) for row in part.rows] == [packs_trees]


def test_stamps_of_discarded_weights_count_as_the_present_ones_and_others_stay() -> None:
    group = chain_group((1.0, 0.0), version=7)
    assert as_of(group, version=7) is group
    early = as_of(group, version=3)
    assert set(early.version_min.tolist()) == set(early.version_max.tolist()) == {3}
    np.testing.assert_array_equal(early.token_ids, group.token_ids)
