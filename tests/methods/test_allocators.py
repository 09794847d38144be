"""Allocators on real trees: budgets spent to the last, streaming TRACE by hand, random re-expansion by frequency."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import NAN, failure_of, make_lease, make_tree, make_turn
from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, GrownBy, NodeState, Score
from trace_async.errors import ConfigError
from trace_async.methods.allocators import Allocator, TraceOptions, continuations_due, make_allocator

NAMES = st.sampled_from(["random", "trace"])


def allocator(name: str, seed: int = 0) -> Allocator:
    return make_allocator(name, {}, np.random.default_rng(seed))


def tree_of(roots: int, continuations: int, *, can_branch: bool = True, max_turns: int = 8) -> TurnTree:
    return make_tree(make_lease(roots=roots, continuations=continuations), can_branch=can_branch, max_turns=max_turns)


def spend(tree: TurnTree, grants: list[Grant]) -> list[int]:
    return [node for grant in grants for node in tree.grant(grant)]


def play(tree: TurnTree, node: int, rule: Allocator, *successes: float, outcome: float) -> int:
    """Play a rollout from GROWING `node`: one scored turn for each of `successes`, then the last. Returns it."""
    for success in successes:
        tree.record_turn(node, make_turn())
        tree.record_score(node, Score(success=success, predictor_version=0))
        (node,) = spend(tree, rule.on_turn(tree, node))
    tree.record_turn(node, make_turn(outcome=outcome))
    return node


def granted(grants: list[Grant]) -> dict[int, int]:
    assert all(grant.grown_by is GrownBy.CONTINUATION for grant in grants)
    return {grant.node_id: grant.count for grant in grants}


def test_every_allocator_starts_with_all_roots_and_lets_a_rollout_go_on() -> None:
    for name in ("uniform", "random", "trace"):
        tree, rule = tree_of(3, 0), allocator(name)
        assert rule.start(tree) == [Grant(node_id=ROOT, count=3, grown_by=GrownBy.ROOT)]
        first, *_ = spend(tree, rule.start(tree))
        tree.record_turn(first, make_turn())
        tree.record_score(first, Score(success=0.5, predictor_version=0))
        assert rule.on_turn(tree, first) == [Grant(node_id=first, count=1, grown_by=GrownBy.CHAIN)]


def test_uniform_grows_nothing_at_an_end_and_refuses_continuations() -> None:
    tree, rule = tree_of(2, 0), allocator("uniform")
    first, _ = spend(tree, rule.start(tree))
    assert rule.on_rollout_end(tree, play(tree, first, rule, 0.5, outcome=1.0)) == []
    with pytest.raises(ConfigError, match=r"4 continuations; set tree.continuations_per_root = 0"):
        rule.start(tree_of(2, 4))


def test_trace_spends_a_rollouts_share_where_the_prediction_contradicts_its_outcome() -> None:
    """A success through predictions .9, .6, .2 repeats with q = .9, .6, .2: the known optimum of 4 is 0, 2, 2."""
    tree, rule = tree_of(1, 4), allocator("trace")
    (first,) = spend(tree, rule.start(tree))
    end = play(tree, first, rule, 0.9, 0.6, 0.2, outcome=1.0)
    assert granted(rule.on_rollout_end(tree, end)) == {2: 2, 3: 2}


def test_trace_turns_the_prediction_around_after_a_failure() -> None:
    tree, rule = tree_of(1, 4), allocator("trace")
    (first,) = spend(tree, rule.start(tree))
    end = play(tree, first, rule, 0.9, 0.6, 0.2, outcome=0.0)
    assert granted(rule.on_rollout_end(tree, end)) == {1: 1, 2: 2, 3: 1}


def test_trace_counts_what_an_anchor_already_has() -> None:
    """Two equal rollouts; with the second, the anchors of both compete and the first's has had its best one."""
    for seed in range(8):
        tree, rule = tree_of(2, 2), allocator("trace", seed)
        first, second = spend(tree, rule.start(tree))
        spend(tree, rule.on_rollout_end(tree, play(tree, first, rule, 0.4, outcome=1.0)))
        end = play(tree, second, rule, 0.4, outcome=1.0)
        assert granted(rule.on_rollout_end(tree, end)) == {second: 1}


def test_trace_looks_only_at_anchors_whose_outcome_is_known() -> None:
    """The second rollout runs through a far better anchor, but nobody knows yet how it ends."""
    tree, rule = tree_of(2, 2), allocator("trace")
    first, second = spend(tree, rule.start(tree))
    tree.record_turn(second, make_turn())
    tree.record_score(second, Score(success=0.02, predictor_version=0))
    (running,) = spend(tree, rule.on_turn(tree, second))
    assert granted(rule.on_rollout_end(tree, play(tree, first, rule, 0.9, outcome=1.0))) == {first: 1}
    tree.fail(running, failure_of(running))
    assert granted(rule.on_rollout_end(tree, running)) == {first: 2}


def test_trace_never_branches_below_a_continuation_or_when_one_ends() -> None:
    tree, rule = tree_of(2, 4), allocator("trace")
    first, second = spend(tree, rule.start(tree))
    further = spend(tree, rule.on_rollout_end(tree, play(tree, first, rule, 0.5, outcome=1.0)))
    for node in further:
        assert rule.on_rollout_end(tree, play(tree, node, rule, 0.1, 0.1, outcome=1.0)) == []
    grants = granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.5, outcome=1.0)))
    assert set(grants) <= {first, second}


@pytest.mark.parametrize("can_branch", [True, False])
def test_without_anchors_continuations_become_rollouts_from_the_prompt(can_branch: bool) -> None:
    tree, rule = tree_of(2, 5, can_branch=can_branch), allocator("trace")
    first, second = spend(tree, rule.start(tree))
    turns = () if can_branch else (0.5,)  # one-turn rollouts have no anchors, nor has a tree that cannot branch
    assert granted(rule.on_rollout_end(tree, play(tree, first, rule, *turns, outcome=1.0))) == {ROOT: 2}
    spend(tree, [Grant(node_id=ROOT, count=2, grown_by=GrownBy.CONTINUATION)])
    tree.fail(second, failure_of(second))
    assert granted(rule.on_rollout_end(tree, second)) == {ROOT: 3}


def test_trace_has_no_opinion_where_there_is_no_score() -> None:
    tree, rule = tree_of(1, 2), allocator("trace")
    (first,) = spend(tree, rule.start(tree))
    end = play(tree, first, rule, NAN, 0.9, outcome=1.0)
    assert granted(rule.on_rollout_end(tree, end)) == {first: 2}  # q = .5 twice is worth .75; .9 is worth .1


def test_predictions_are_clipped_so_that_a_sure_one_can_still_be_tried() -> None:
    tree, rule = tree_of(1, 1), make_allocator("trace", {"clip": 0.4}, np.random.default_rng(0))
    (first,) = spend(tree, rule.start(tree))
    end = play(tree, first, rule, 1.0, 0.55, outcome=1.0)
    assert granted(rule.on_rollout_end(tree, end)) == {2: 1}
    chosen = Counter[int]()
    for seed in range(200):  # clipped to .6 and .6: a tie
        tree, rule = tree_of(1, 1), make_allocator("trace", {"clip": 0.4}, np.random.default_rng(seed))
        (first,) = spend(tree, rule.start(tree))
        chosen.update(granted(rule.on_rollout_end(tree, play(tree, first, rule, 1.0, 0.8, outcome=1.0))))
    assert min(chosen[1], chosen[2]) > 70


def test_random_draws_with_replacement_from_the_prompt_and_the_ended_rollouts_own_turns() -> None:
    places = Counter[int]()
    for seed in range(300):
        tree, rule = tree_of(2, 12), allocator("random", seed)
        first, second = spend(tree, rule.start(tree))
        play(tree, first, rule, 0.5, 0.5, outcome=1.0)
        grants = granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.5, 0.5, outcome=1.0)))
        assert sum(grants.values()) == 12
        places.update(grants)
    own = [ROOT, second, tree.nodes[second].children[0]]
    assert sorted(places) == sorted(own)
    assert all(abs(places[place] - 1200) < 150 for place in own)  # 5 standard deviations


def test_shares_of_a_budget_that_does_not_divide_add_up_to_it() -> None:
    tree, rule = tree_of(3, 5), allocator("trace")
    shares = []
    for node in spend(tree, rule.start(tree)):
        end = play(tree, node, rule, 0.5, outcome=1.0)
        shares.append(continuations_due(tree, end))
        spend(tree, rule.on_rollout_end(tree, end))
    assert shares == [1, 2, 2]


@settings(max_examples=60)
@given(NAMES, st.integers(1, 4), st.integers(0, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_in_any_order_and_with_any_failures_every_continuation_is_spent(
    name: str, roots: int, continuations: int, can_branch: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tree, rule = tree_of(roots, continuations, can_branch=can_branch, max_turns=5), allocator(name, seed)
    growing = spend(tree, rule.start(tree))
    while growing:
        node = growing.pop(int(rng.integers(len(growing))))
        if rng.random() < 0.2:
            tree.fail(node, failure_of(node))
        else:
            at_end = tree.nodes[node].depth == 5 or rng.random() < 0.3
            tree.record_turn(node, make_turn(outcome=float(rng.integers(2)) if at_end else NAN))
        if tree.nodes[node].state is NodeState.UNSCORED:
            tree.record_score(node, Score(success=float(rng.random()), predictor_version=0))
            growing += spend(tree, rule.on_turn(tree, node))
        else:
            growing += spend(tree, rule.on_rollout_end(tree, node))
    tree.validate()
    assert (tree.roots_left, tree.continuations_left) == (0, 0)


def test_equal_seeds_give_equal_grants() -> None:
    def run(seed: int) -> list[Grant]:
        tree, rule = tree_of(1, 6), allocator("trace", seed)
        (first,) = spend(tree, rule.start(tree))
        return rule.on_rollout_end(tree, play(tree, first, rule, *[0.5] * 5, outcome=1.0))

    assert run(3) == run(3)
    assert any(run(seed) != run(3) for seed in range(10))


def test_names_and_options_are_read_strictly() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"tree.allocator = 'tracee' is not known; did you mean 'trace'"):
        make_allocator("tracee", {}, rng)
    with pytest.raises(ConfigError, match=r"tree.options.clip is no option here; it takes none"):
        make_allocator("uniform", {"clip": 0.1}, rng)
    with pytest.raises(ConfigError, match=r"tree.options.clipp is no option here; did you mean 'clip'"):
        make_allocator("trace", {"clipp": 0.1}, rng)
    with pytest.raises(ConfigError, match=r"between 0 and 0.5, got 0.5"):
        TraceOptions(clip=0.5)
