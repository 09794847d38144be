"""What trees teach: leaf means by hand and against an oracle, prefixes as they were, nothing of the future."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.builders import chain_group, group_from_spec, make_lease, random_group, random_tree, spec
from trace_async.core.group import cut_group, paths
from trace_async.core.types import Group, NodeState
from trace_async.predictors.hashed import HashedRows
from trace_async.predictors.targets import Target, tree_targets


def test_targets_of_a_small_tree_by_hand() -> None:
    group = group_from_spec([spec(spec(outcome=1.0), spec(outcome=0.0), spec(outcome=0.2)), spec(outcome=0.9), spec()])
    told = [(target.prefix.turn_index, round(target.value, 6), target.leaves) for target in tree_targets(group)]
    # below the prompt .9 and 1 are successes, 0 and .2 are not; the last turn was closed and has no leaf
    assert told == [(0, 0.5, 4), (1, 0.333333, 3)]


@pytest.mark.parametrize(
    ("above", "prompt", "first"), [(0.5, 0.5, 0.333333), (0.1, 0.75, 0.666667), (0.9, 0.25, 0.333333), (-0.5, 1.0, 1.0)]
)
def test_graded_leaves_are_successes_above_the_groups_threshold(above: float, prompt: float, first: float) -> None:
    group = group_from_spec([spec(spec(outcome=1.0), spec(outcome=0.0), spec(outcome=0.2)), spec(outcome=0.9)])
    told = [round(target.value, 6) for target in tree_targets(replace(group, success_above=above))]
    assert told == [prompt, first]


def leaves_below(group: Group, turn: int) -> list[float]:
    """Outcomes as 0 or 1 of the leaves below a turn (-1: the prompt), by walking every path."""
    ends = {path[-1] for path in paths(group) if turn in (-1, *path[:-1])}
    return [float(group.outcome[end] > 0.5) for end in sorted(ends) if group.state[end] == NodeState.LEAF]


def test_the_leaf_count_recursion_is_the_plain_mean_of_the_leaves_below() -> None:
    for seed in range(60):
        group = random_group(np.random.default_rng(seed), roots=4, continuations=6)
        oracle = [leaves_below(group, turn) for turn in range(-1, group.num_turns)]
        expected = [(float(np.mean(below)), len(below)) for below in oracle if below]
        told = [(target.value, target.leaves) for target in tree_targets(group)]
        assert [n for _, n in told] == [n for _, n in expected]
        assert [v for v, _ in told] == pytest.approx([v for v, _ in expected])


def test_a_prefix_is_the_tokens_that_the_actor_scored() -> None:
    lease = make_lease(roots=3, continuations=4)
    for seed in range(20):
        tree = random_tree(np.random.default_rng(seed), lease)
        group = cut_group(tree, lease=lease, actor_id="a", environment="toy", epoch=1)
        known = {(node.depth, tuple(tree.prefix_ids(node.node_id).tolist())) for node in tree.nodes if node.turn}
        known.add((0, tuple(tree.prompt_ids.tolist())))
        for target in tree_targets(group):
            assert (target.prefix.turn_index, tuple(target.prefix.token_ids.tolist())) in known


def with_another_future(group: Group, turn: int, rng: np.random.Generator) -> Group:
    """The same up to and including `turn`; everything else has other tokens, and every end another outcome."""
    past, above = [], turn
    while above >= 0:
        past.append(above)
        above = int(group.parent[above])
    lengths = group.action_lengths + group.observation_lengths
    owner = np.repeat(np.arange(group.num_turns), lengths)
    tokens = np.where(np.isin(owner, past), group.token_ids, rng.integers(3, 90, owner.size)).astype(np.int32)
    return replace(group, token_ids=tokens, outcome=np.where(np.isnan(group.outcome), np.nan, 1 - group.outcome))


def prefix_of(group: Group, turn: int) -> Target:
    """The lesson of a turn that has leaves below it."""
    places = [-1, *(t for t in range(group.num_turns) if group.state[t] != NodeState.LEAF)]
    taught = [place for place in places if leaves_below(group, place)]
    return tree_targets(group)[taught.index(turn)]


def test_what_is_seen_of_a_prefix_does_not_change_with_its_continuation() -> None:
    rows = HashedRows(buckets=64, dims=2)
    rng = np.random.default_rng(0)
    changed = 0
    for seed in range(30):
        group = random_group(np.random.default_rng(seed), roots=3, continuations=5)
        for turn in range(-1, group.num_turns):
            if not leaves_below(group, turn) or (turn >= 0 and group.state[turn] == NodeState.LEAF):
                continue
            before = prefix_of(group, turn)
            after = prefix_of(with_another_future(group, turn, rng), turn)
            changed += before.value != after.value
            assert before.prefix.turn_index == after.prefix.turn_index
            first, second = (rows.layer.read(rows.make([target.prefix])) for target in (before, after))
            for one, other in zip(first, second, strict=True):
                np.testing.assert_array_equal(one.buckets, other.buckets)
    assert changed > 50  # the futures were others


def test_a_tree_without_a_leaf_teaches_nothing() -> None:
    assert tree_targets(group_from_spec([spec(failed=True), spec(spec())])) == []
    assert [target.leaves for target in tree_targets(chain_group((1.0,), turns=1))] == [1]
