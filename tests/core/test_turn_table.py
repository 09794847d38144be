"""The table of turns: everything an objective reads stands where the groups have it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import group_from_spec, random_group, spec
from trace_async.core.group import paths, turn_spans
from trace_async.core.packing import PackItem, denominators
from trace_async.core.rows import Signal, carries_signal, leaf_parts, scored_turns, trainable_turns
from trace_async.core.staleness import ages, judge_turns
from trace_async.core.turn_table import make_table
from trace_async.core.types import FloatArray, Group, GrownBy, NodeState, Verdict
from trace_async.methods.credit import CREDITS, flat_credit, sibling_credit


def item_of(group: Group, rule: str = "sibling", *, hard: int = 100, **fields: object) -> PackItem:
    age = ages(group, trainer_version=6, trainer_epoch=group.epoch)
    verdicts = judge_turns(age, soft=min(3, hard), hard=hard)
    return PackItem(group=group, credit=CREDITS[rule](group), verdicts=verdicts, ages=age, **fields)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(sorted(CREDITS)), hard=st.integers(0, 8))
def test_every_turn_of_every_group_stands_in_the_table_once_and_in_order(seed: int, rule: str, hard: int) -> None:
    rng = np.random.default_rng(seed)
    items = [item_of(random_group(rng), rule, hard=hard, whole_tree=bool(seed % 2)) for _ in range(3)]
    table = make_table(items)
    j = 0
    for index, item in enumerate(items):
        group, spans = item.group, turn_spans(item.group)
        depth = {turn: place for path in paths(group) for place, turn in enumerate(path, start=1)}
        for turn in range(group.num_turns):
            parent = int(group.parent[turn])
            assert table.group[j] == index
            assert table.parent[j] == (-1 if parent < 0 else j - turn + parent)
            assert table.depth[j] == depth[turn]
            assert table.tokens[j] == group.action_lengths[turn]
            own = slice(int(table.token_start[j]), int(table.token_start[j]) + int(table.tokens[j]))
            first = int(spans.logprob_start[turn])
            np.testing.assert_array_equal(
                table.behaviour_logprobs[own], group.logprobs[first : first + int(group.action_lengths[turn])]
            )
            assert (table.turn[own] == j).all()
            assert table.trained[j] == trainable_turns(item)[turn]
            assert table.scored[j] == scored_turns(item)[turn]
            assert table.age[j] == item.ages[turn]
            assert table.verdict[j] == item.verdicts[turn]
            np.testing.assert_equal(float(table.outcome[j]), float(group.outcome[turn]))
            np.testing.assert_equal(float(table.belief[j]), float(group.score[turn]))
            drawn = group.state[turn] != NodeState.FAILED and group.grown_by[turn] != GrownBy.SELECTED
            assert table.drawn[j] == drawn
            j += 1
    assert table.num_turns == j
    assert table.behaviour_logprobs.size == sum(item.group.num_sampled_tokens for item in items)
    np.testing.assert_array_equal(table.root_belief, [item.group.root_score.success for item in items])


def test_advantages_of_both_signs_below_a_shared_turn_are_kept_apart() -> None:
    """Three leaves, outcomes 1, 0, 0 as in the worked example: root r, children a (two leaves) and b (one)."""
    group = group_from_spec((spec(spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(outcome=0.0))),))
    item = PackItem(
        group=group,
        credit=flat_credit(group),
        verdicts=np.full(group.num_turns, Verdict.TRAIN, np.uint8),
        ages=np.zeros(group.num_turns, np.int32),
        signal=Signal.LEAVES,
    )
    above, below = leaf_parts(item)
    mass = item.credit.mass
    np.testing.assert_allclose(mass, [1, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(mass * above, [2 / 9, 2 / 9, 2 / 9, 0, 0, 0], atol=1e-7)
    np.testing.assert_allclose(mass * below, [-2 / 9, -1 / 9, 0, -1 / 9, -1 / 9, -1 / 9], atol=1e-7)
    assert item.credit.advantage[0] == 0  # they cancel, and yet the turn is trained
    assert trainable_turns(item).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(sorted(CREDITS)))
def test_the_two_parts_of_an_advantage_sum_to_it(seed: int, rule: str) -> None:
    item = item_of(random_group(np.random.default_rng(seed)), rule)
    above, below = leaf_parts(item)
    assert (above >= 0).all()
    assert (below <= 0).all()
    np.testing.assert_allclose(above + below, item.credit.advantage, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), signal=st.sampled_from(list(Signal)))
def test_a_group_without_any_difference_carries_no_signal_of_any_kind(seed: int, signal: Signal) -> None:
    group = random_group(np.random.default_rng(seed))
    leaf = ~np.isnan(group.outcome)
    flat = group_with(group, np.where(leaf, np.float32(0.5), np.float32(np.nan)))
    for rule in CREDITS:
        assert not carries_signal(item_of(flat, rule, signal=signal)).any()


def test_a_tree_wanted_whole_is_scored_whole_if_a_turn_of_it_is_trained() -> None:
    group = group_from_spec((spec(spec(outcome=1.0, version=6), version=0), spec(outcome=0.0, version=0)))
    part, whole = (item_of(group, hard=2, whole_tree=wanted) for wanted in (False, True))
    assert trainable_turns(part).tolist() == [False, True, False]
    assert scored_turns(part).tolist() == [False, True, False]
    assert trainable_turns(whole).tolist() == [False, True, False]
    assert scored_turns(whole).tolist() == [True, True, True]
    stale = item_of(group_from_spec((spec(outcome=1.0), spec(outcome=0.0))), hard=2, whole_tree=True)
    assert not scored_turns(stale).any()


def test_denominators_count_what_was_played_whatever_became_of_it() -> None:
    mixed = group_from_spec((spec(outcome=1.0, actions=3), spec(outcome=0.0, actions=5)))
    flat = group_from_spec((spec(outcome=1.0, actions=4), spec(outcome=1.0, actions=4)))
    broken = group_from_spec((spec(),))
    items = [item_of(group, hard=0) for group in (mixed, flat, broken)]
    counts = denominators(items)
    assert counts.tokens == 3 / 2 + 5 / 2 + 4
    assert counts.turns == 2.0
    assert counts.prompts == 2
    assert sibling_credit(broken).mass.sum() == 0


def group_with(group: Group, outcome: FloatArray) -> Group:
    return replace(group, outcome=outcome)
