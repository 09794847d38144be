"""ARPO's branching on real trees: where, when, how often, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.builders import NAN, failure_of, make_turn
from tests.methods.allocator_kit import allocator, granted, spend, tree_of
from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, GrownBy, Score
from trace_async.methods.allocators import Allocator


def sample(
    tree: TurnTree, node: int, rule: Allocator, surprisals: Sequence[float], outcome: float = NAN
) -> list[Grant]:
    """Play a turn whose tokens have these surprisals; what the allocator says to it."""
    logprobs = [-one for one in surprisals]
    tree.record_turn(node, make_turn(action_ids=[11] * len(logprobs), logprobs=logprobs, outcome=outcome))
    if outcome == outcome:
        return rule.on_rollout_end(tree, node)
    tree.record_score(node, Score(success=0.5, predictor_version=0))
    return rule.on_turn(tree, node)


def chain(node: int) -> Grant:
    return Grant(node_id=node, count=1, grown_by=GrownBy.CHAIN)


def branch(node: int) -> Grant:
    return Grant(node_id=node, count=1, grown_by=GrownBy.CONTINUATION)


def test_a_turn_that_is_more_surprising_than_the_first_branches_where_it_was_sampled() -> None:
    """The first turn has a mean surprisal of .5, the second of .75: one more turn is sampled from below the first."""
    tree, rule = tree_of(1, 4), allocator("arpo")
    (first,) = spend(tree, rule.start(tree))
    grants = sample(tree, first, rule, [0.25, 0.75])
    assert grants == [chain(first)], "there was no reply before the first turn"
    (second,) = spend(tree, grants)
    grants = sample(tree, second, rule, [1.0, 0.5])
    assert grants == [chain(second), branch(first)]
    third, _ = spend(tree, grants)
    assert sample(tree, third, rule, [0.4, 0.6]) == [chain(third)], ".5 against .5 has not risen"


def test_alpha_beta_and_tau_decide_how_much_surprise_it_takes() -> None:
    """P = .3 + .4 dH > .5 needs a rise of more than half a nat."""
    for surprisal, branches in ((0.95, False), (1.05, True)):
        tree, rule = tree_of(1, 1), allocator("arpo", alpha=0.3, beta=0.4, tau=0.5)
        (first,) = spend(tree, rule.start(tree))
        (second,) = spend(tree, sample(tree, first, rule, [0.5]))
        assert (branch(first) in sample(tree, second, rule, [surprisal])) == branches


def test_only_the_beginning_of_a_turn_is_measured() -> None:
    tree, rule = tree_of(1, 1), allocator("arpo", tokens=2)
    (first,) = spend(tree, rule.start(tree))
    (second,) = spend(tree, sample(tree, first, rule, [0.5, 0.5, 9.0]))
    assert branch(first) not in sample(tree, second, rule, [0.4, 0.5, 9.0, 9.0])


def test_a_last_turn_branches_too_and_the_rest_becomes_rollouts_from_the_prompt() -> None:
    tree, rule = tree_of(1, 3), allocator("arpo")
    (first,) = spend(tree, rule.start(tree))
    (second,) = spend(tree, sample(tree, first, rule, [0.5]))
    assert granted(sample(tree, second, rule, [2.0], outcome=1.0)) == {ROOT: 2, first: 1}


def test_branches_branch_as_root_rollouts_do_and_one_turn_adds_one_branch() -> None:
    tree, rule = tree_of(2, 6), allocator("arpo")
    first, _ = spend(tree, rule.start(tree))
    (second,) = spend(tree, sample(tree, first, rule, [0.5]))
    third, fresh = spend(tree, sample(tree, second, rule, [1.0]))
    assert tree.nodes[fresh].parent == first
    assert sample(tree, fresh, rule, [3.0]) == [chain(fresh), branch(first)]
    assert sample(tree, third, rule, [3.0]) == [chain(third), branch(second)]


def test_the_rest_waits_for_the_last_root_rollout_and_for_no_branch() -> None:
    tree, rule = tree_of(2, 3), allocator("arpo")
    first, second = spend(tree, rule.start(tree))
    (below,) = spend(tree, sample(tree, first, rule, [0.5]))
    running, _ = spend(tree, sample(tree, below, rule, [1.0]))
    assert sample(tree, running, rule, [0.1], outcome=1.0) == []
    tree.fail(second, failure_of(second))
    assert granted(rule.on_rollout_end(tree, second)) == {ROOT: 2}
    assert tree.num_growing == 1


@pytest.mark.parametrize("continuations", [0, 1])
def test_without_budget_or_without_a_way_back_nothing_branches(continuations: int) -> None:
    tree, rule = tree_of(1, continuations, can_branch=continuations == 0), allocator("arpo")
    (first,) = spend(tree, rule.start(tree))
    (second,) = spend(tree, sample(tree, first, rule, [0.5]))
    assert sample(tree, second, rule, [5.0]) == [chain(second)]
