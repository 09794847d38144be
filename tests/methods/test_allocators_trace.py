"""TRACE's second stage on real trees: by hand, against brute force, and its two modes against each other."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import NAN, failure_of, make_turn
from tests.methods.allocator_kit import allocator, granted, play, spend, tree_of
from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Score
from trace_async.methods.trace_allocator import known_anchors, suffix_costs

ROLLOUTS = st.lists(
    st.tuples(st.lists(st.integers(2, 98), min_size=1, max_size=3, unique=True), st.integers(0, 1)),
    min_size=1,
    max_size=3,
)
"""Of each root rollout: predictions in hundredths along its turns, and its outcome."""


def grow(rollouts: list[tuple[list[int], int]], per_root: int, **options: Any) -> TurnTree:
    """The root rollouts end one after the other; what is granted is not played."""
    tree = tree_of(len(rollouts), per_root * len(rollouts))
    rule = allocator("trace", **options)
    for first, (hundredths, outcome) in zip(spend(tree, rule.start(tree)), rollouts, strict=True):
        end = play(tree, first, rule, *[one / 100 for one in hundredths], outcome=float(outcome))
        spend(tree, rule.on_rollout_end(tree, end))
    assert tree.continuations_left == 0
    return tree


def repeats(tree: TurnTree) -> list[float]:
    return [one.success if one.succeeded else 1.0 - one.success for one in known_anchors(tree)]


def value(tree: TurnTree) -> float:
    """Sum of V_pref over the anchors, for what they were given."""
    anchors = zip(repeats(tree), known_anchors(tree), strict=True)
    return sum(1.0 - q**anchor.granted for q, anchor in anchors)


def best_value(repeat: list[float], budget: int) -> float:
    """Of every way to spend the budget."""
    ways = combinations_with_replacement(range(len(repeat)), budget)
    return max(sum(1.0 - q ** way.count(anchor) for anchor, q in enumerate(repeat)) for way in ways)


# ---- one rollout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["streaming", "joint"])
@pytest.mark.parametrize(("outcome", "expected"), [(1.0, {2: 2, 3: 2}), (0.0, {1: 1, 2: 2, 3: 1})])
def test_continuations_go_where_the_prediction_contradicts_the_outcome(
    mode: str, outcome: float, expected: dict[int, int]
) -> None:
    """Predictions .9, .6, .2 repeat a success with q = .9, .6, .2 and a failure with .1, .4, .8: the known optima."""
    tree, rule = tree_of(1, 4), allocator("trace", mode=mode)
    (first,) = spend(tree, rule.start(tree))
    assert granted(rule.on_rollout_end(tree, play(tree, first, rule, 0.9, 0.6, 0.2, outcome=outcome))) == expected


@pytest.mark.parametrize(
    ("outcome", "above", "expected"),
    [
        *[(0.4, 0.5, {1: 1}), (0.5, 0.5, {1: 1}), (0.6, 0.5, {2: 1})],
        *[(0.4, 0.3, {2: 1}), (0.6, 0.7, {1: 1}), (1.0, 1.5, {1: 1})],
        *[(-1.0, -1.5, {2: 1}), (0.1 + 0.2, 0.3, {1: 1})],
    ],
)
def test_an_outcome_is_a_success_above_the_trees_threshold_only(
    outcome: float, above: float, expected: dict[int, int]
) -> None:
    """Predictions .9 and .2: a success is most likely flipped at the second turn, a failure at the first."""
    tree, rule = tree_of(1, 1, success_above=above), allocator("trace")
    (first,) = spend(tree, rule.start(tree))
    assert granted(rule.on_rollout_end(tree, play(tree, first, rule, 0.9, 0.2, outcome=outcome))) == expected


def test_there_is_no_opinion_where_there_is_no_score() -> None:
    tree, rule = tree_of(1, 2), allocator("trace")
    (first,) = spend(tree, rule.start(tree))
    end = play(tree, first, rule, NAN, 0.9, outcome=1.0)
    assert granted(rule.on_rollout_end(tree, end)) == {first: 2}  # q = .5 twice is worth .75; .9 is worth .1


def test_predictions_are_clipped_so_that_a_sure_one_can_still_be_tried() -> None:
    tree, rule = tree_of(1, 1), allocator("trace", clip=0.4)
    (first,) = spend(tree, rule.start(tree))
    assert granted(rule.on_rollout_end(tree, play(tree, first, rule, 1.0, 0.55, outcome=1.0))) == {2: 1}
    chosen = Counter[int]()
    for seed in range(200):  # clipped to .6 and .6: a tie
        tree, rule = tree_of(1, 1), allocator("trace", seed, clip=0.4)
        (first,) = spend(tree, rule.start(tree))
        chosen.update(granted(rule.on_rollout_end(tree, play(tree, first, rule, 1.0, 0.8, outcome=1.0))))
    assert min(chosen[1], chosen[2]) > 70


def test_a_doubtful_prediction_spreads_what_a_trusted_one_repeats() -> None:
    """q = .5 and .8. Trusted, a second try at .5 is worth .25 and a first at .8 is worth .2. As Beta(1, 1) the second
    try is worth 1/6 only: the first has told something of q."""
    for form, expected in (("point", {1: 2}), ("beta", {1: 1, 2: 1})):
        tree, rule = tree_of(1, 2), allocator("trace", form=form, strength=2.0)
        (first,) = spend(tree, rule.start(tree))
        assert granted(rule.on_rollout_end(tree, play(tree, first, rule, 0.5, 0.8, outcome=1.0))) == expected


# ---- several rollouts ----------------------------------------------------------------------------------------------


def test_what_an_anchor_already_has_counts() -> None:
    """Two equal rollouts; with the second, the anchors of both compete and the first's has had its best one."""
    for seed in range(8):
        tree, rule = tree_of(2, 2), allocator("trace", seed)
        first, second = spend(tree, rule.start(tree))
        spend(tree, rule.on_rollout_end(tree, play(tree, first, rule, 0.4, outcome=1.0)))
        end = play(tree, second, rule, 0.4, outcome=1.0)
        assert granted(rule.on_rollout_end(tree, end)) == {second: 1}


def test_only_anchors_with_a_known_outcome_are_looked_at() -> None:
    """The second rollout runs through a far better anchor, but nobody knows yet how it ends, and then it fails."""
    tree, rule = tree_of(2, 2), allocator("trace", hold_below=0.0)
    first, second = spend(tree, rule.start(tree))
    tree.record_turn(second, make_turn())
    tree.record_score(second, Score(success=0.02, predictor_version=0))
    (running,) = spend(tree, rule.on_turn(tree, second))
    assert granted(rule.on_rollout_end(tree, play(tree, first, rule, 0.9, outcome=1.0))) == {first: 1}
    tree.fail(running, failure_of(running))
    assert granted(rule.on_rollout_end(tree, running)) == {first: 2}


def test_nothing_branches_below_a_continuation_or_when_one_ends() -> None:
    tree, rule = tree_of(2, 4), allocator("trace")
    first, second = spend(tree, rule.start(tree))
    further = spend(tree, rule.on_rollout_end(tree, play(tree, first, rule, 0.5, outcome=1.0)))
    for node in further:
        assert rule.on_rollout_end(tree, play(tree, node, rule, 0.1, 0.1, outcome=1.0)) == []
    grants = granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.5, outcome=1.0)))
    assert set(grants) <= {first, second}


def test_joint_waits_for_the_last_root_rollout_and_then_chooses_among_all() -> None:
    """Each share alone would go to its own rollout; together all four go to the surprising one's two anchors."""
    tree, rule = tree_of(2, 4), allocator("trace", mode="joint")
    first, second = spend(tree, rule.start(tree))
    assert rule.on_rollout_end(tree, play(tree, first, rule, 0.95, outcome=1.0)) == []
    grants = granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.6, 0.7, outcome=0.0)))
    assert grants == {second: 2, tree.nodes[second].children[0]: 2}


@pytest.mark.parametrize("mode", ["streaming", "joint"])
def test_rollouts_that_fail_lend_no_anchors_and_do_not_keep_the_budget(mode: str) -> None:
    tree, rule = tree_of(3, 6), allocator("trace", mode=mode, hold_below=0.0)
    first, second, third = spend(tree, rule.start(tree))
    tree.fail(first, failure_of(first))
    assert rule.on_rollout_end(tree, first) == []
    early = rule.on_rollout_end(tree, play(tree, second, rule, 0.5, outcome=1.0))
    assert granted(early) == ({second: 4} if mode == "streaming" else {})
    spend(tree, early)
    tree.fail(third, failure_of(third))
    assert granted(rule.on_rollout_end(tree, third)) == {second: 2 if mode == "streaming" else 6}


def test_a_share_waits_for_anchors_that_may_still_come() -> None:
    """The first rollout had one turn. Whether the prompt has a prefix to go on from, only the second one tells."""
    tree, rule = tree_of(2, 4), allocator("trace")
    first, second = spend(tree, rule.start(tree))
    assert rule.on_rollout_end(tree, play(tree, first, rule, outcome=1.0)) == []
    assert granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.5, outcome=1.0))) == {second: 4}


@pytest.mark.parametrize("mode", ["streaming", "joint"])
def test_a_prompt_without_prefixes_gets_rollouts_from_itself(mode: str) -> None:
    tree, rule = tree_of(2, 5), allocator("trace", mode=mode)
    first, second = spend(tree, rule.start(tree))
    assert rule.on_rollout_end(tree, play(tree, first, rule, outcome=1.0)) == []
    assert granted(rule.on_rollout_end(tree, play(tree, second, rule, outcome=0.0))) == {ROOT: 5}


def test_where_a_tree_cannot_branch_streaming_waits_for_nothing() -> None:
    tree, rule = tree_of(2, 5, can_branch=False), allocator("trace", hold_below=0.5)
    first, second = spend(tree, rule.start(tree))
    early = rule.on_rollout_end(tree, play(tree, first, rule, 0.5, 0.5, outcome=1.0))
    assert granted(early) == {ROOT: 2}
    spend(tree, early)
    assert granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.5, outcome=1.0))) == {ROOT: 3}


def test_what_is_less_likely_than_hold_below_to_flip_stays_for_the_last_end() -> None:
    """q = .9, .6, .2: only the first try at .2 flips more likely than not. The other seven follow the marginals
    .4 .24 .16 .144 .1 .09 .0864."""
    tree, rule = tree_of(2, 8), allocator("trace", hold_below=0.5)
    first, second = spend(tree, rule.start(tree))
    early = rule.on_rollout_end(tree, play(tree, first, rule, 0.9, 0.6, 0.2, outcome=1.0))
    one, two, three = (anchor.node_id for anchor in known_anchors(tree))
    assert granted(early) == {three: 1}
    spend(tree, early)
    tree.fail(second, failure_of(second))
    assert granted(rule.on_rollout_end(tree, second)) == {one: 2, two: 4, three: 1}


@settings(max_examples=60)
@given(ROLLOUTS, st.integers(1, 2))
def test_joint_is_the_best_of_all_ways_to_spend_and_streaming_never_better(
    rollouts: list[tuple[list[int], int]], per_root: int
) -> None:
    rollouts = [(hundredths[:2], outcome) for hundredths, outcome in rollouts]  # 462 ways at most
    joint = grow(rollouts, per_root, mode="joint")
    best = best_value(repeats(joint), joint.budget.continuations)
    assert value(joint) == pytest.approx(best)
    for hold in (0.0, 0.5):
        assert value(grow(rollouts, per_root, hold_below=hold)) <= best + 1e-12


@settings(max_examples=40)
@given(ROLLOUTS, st.integers(1, 3))
def test_holding_everything_is_joint_and_holding_nothing_spends_every_share(
    rollouts: list[tuple[list[int], int]], per_root: int
) -> None:
    assert value(grow(rollouts, per_root, hold_below=1.0)) == pytest.approx(
        value(grow(rollouts, per_root, mode="joint"))
    )
    tree = tree_of(len(rollouts), per_root * len(rollouts))
    rule = allocator("trace", hold_below=0.0)
    for first, (hundredths, outcome) in zip(spend(tree, rule.start(tree)), rollouts, strict=True):
        end = play(tree, first, rule, *[one / 100 for one in hundredths], outcome=float(outcome))
        assert len(spend(tree, rule.on_rollout_end(tree, end))) == per_root


# ---- cost ----------------------------------------------------------------------------------------------------------


def test_costs_are_the_mean_of_the_rollouts_own_suffix_and_of_all_at_that_depth() -> None:
    """Suffixes of the first rollout 9 and 4 tokens, of the second 1: the mean at depth 1 is 5."""
    tree, rule = tree_of(2, 0), allocator("trace")
    first, second = spend(tree, rule.start(tree))
    play(tree, first, rule, 0.5, 0.5, outcome=1.0, tokens=(3, 5, 4))
    play(tree, second, rule, 0.5, outcome=1.0, tokens=(7, 1))
    anchors = known_anchors(tree)
    assert [anchor.suffix_tokens for anchor in anchors] == [9, 4, 1]
    assert suffix_costs(anchors) == [7.0, 4.0, 3.0]


@pytest.mark.parametrize(("cost_aware", "expected"), [(False, {1: 2, 2: 1}), (True, {1: 1, 2: 2})])
def test_cost_aware_divides_a_chance_by_the_tokens_it_is_expected_to_take(
    cost_aware: bool, expected: dict[int, int]
) -> None:
    """q = .5 and .6 with 6 and 4 tokens below them: .5 .25 and .4 .24, or .083 .042 and .1 .06 a token."""
    tree, rule = tree_of(1, 3), allocator("trace", cost_aware=cost_aware)
    (first,) = spend(tree, rule.start(tree))
    end = play(tree, first, rule, 0.5, 0.6, outcome=1.0, tokens=(5, 2, 4))
    assert granted(rule.on_rollout_end(tree, end)) == expected
