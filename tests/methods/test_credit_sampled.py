"""Credit through the whole way: real trees, real allocators, real groups, sampled; within three standard errors."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest

from tests.builders import cut, make_lease, make_tree, make_turn
from tools.credit_cases import WORLDS
from tools.credit_world import Floats, World
from trace_async.config import LearnerConfig
from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, Group, GrownBy, NodeState, Score
from trace_async.methods.allocators import Allocator, make_allocator
from trace_async.methods.credit import CreditRule, credit_rule

CLOSE = WORLDS[-1]
TREES = 1000
ROOTS = 2
DEFAULT = LearnerConfig().credit


class ByPrefix:
    """Two continuations wherever a root rollout's turn was action 0: decided before anything is sampled below."""

    def start(self, tree: TurnTree) -> list[Grant]:
        return [Grant(node_id=ROOT, count=tree.budget.roots, grown_by=GrownBy.ROOT)]

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        goes_on = Grant(node_id=node_id, count=1, grown_by=GrownBy.CHAIN)
        turn = tree.nodes[node_id].turn
        assert turn is not None
        if node_id not in tree.anchors() or turn.action_ids[0] == 1:
            return [goes_on]
        return [goes_on, Grant(node_id=node_id, count=2, grown_by=GrownBy.CONTINUATION)]

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        return []


def state_of(world: World, tree: TurnTree, node_id: int) -> int:
    """State after the turn of `node_id`; the prompt's is 0."""
    turns = [tree.nodes[above].turn for above in reversed([node_id, *tree.ancestors(node_id)])]
    state = 0
    for turn in turns:
        if turn is not None:
            state = 2 * state + 1 + int(turn.action_ids[0])
    return state


def grow(world: World, allocator: Allocator, rng: np.random.Generator, *, continuations: int) -> Group:
    """One tree, its nodes played in a random order."""
    lease = make_lease(roots=ROOTS, continuations=continuations)
    tree = make_tree(lease, max_turns=world.turns)
    values, chances = world.values(), world.chances()
    waiting: deque[int] = deque()

    def spend(grants: list[Grant]) -> None:
        for grant in grants:
            waiting.extend(tree.grant(grant))

    spend(allocator.start(tree))
    while waiting:
        waiting.rotate(int(rng.integers(len(waiting))))
        node_id = waiting.popleft()
        state = state_of(world, tree, tree.nodes[node_id].parent)
        action = int(rng.random() < chances[state])
        reached = 2 * state + 1 + action
        end = reached - len(world.logits)
        outcome = float(world.outcomes[end]) if end >= 0 else math.nan
        if tree.record_turn(node_id, make_turn(action_ids=[action], outcome=outcome)) is NodeState.LEAF:
            spend(allocator.on_rollout_end(tree, node_id))
        else:
            tree.record_score(node_id, Score(success=float(values[reached]), predictor_version=0))
            spend(allocator.on_turn(tree, node_id))
    return cut(tree, lease)


def estimate(world: World, group: Group, rule: CreditRule) -> Floats:
    """Sum over turns of mass x advantage x grad log p, [S]."""
    credit, chances = rule(group), world.chances()
    reached = np.zeros(group.num_turns + 1, np.int64)  # the prompt's state 0 in the last place
    total = np.zeros(len(world.logits))
    for turn, parent in enumerate(group.parent.tolist()):
        state = reached[parent]
        action = int(group.token_ids[turn_start(group, turn)])
        total[state] += float(credit.mass[turn]) * float(credit.advantage[turn]) * (action - chances[state])
        reached[turn] = 2 * state + 1 + action
    return total


def turn_start(group: Group, turn: int) -> int:
    return int((group.action_lengths + group.observation_lengths)[:turn].sum())


def grown(allocator: Allocator, *, continuations: int, seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [grow(CLOSE, allocator, rng, continuations=continuations) for _ in range(TREES)]


@pytest.fixture(scope="module")
def by_prefix() -> list[Group]:
    return grown(ByPrefix(), continuations=2 * ROOTS, seed=1)


def standard_errors_off(groups: list[Group], credit: str) -> Floats:
    """How far the mean of the estimates lies from the true gradient, in standard errors, [S]."""
    estimates = np.array([estimate(CLOSE, group, credit_rule(credit)) for group in groups])
    error = estimates.std(axis=0, ddof=1) / np.sqrt(len(estimates))
    return np.asarray((estimates.mean(axis=0) - CLOSE.gradient()) / error)


@pytest.mark.parametrize("credit", sorted({DEFAULT, "sibling", "sibling_shrunk"}))
def test_credit_is_unbiased_on_real_trees_that_branch_by_the_prefix(credit: str, by_prefix: list[Group]) -> None:
    assert (np.abs(standard_errors_off(by_prefix, credit)) < 3).all()


def test_leaves_as_rows_are_biased_on_the_same_trees_and_the_samples_tell(by_prefix: list[Group]) -> None:
    assert (np.abs(standard_errors_off(by_prefix, "flat")) > 5).any()


def test_the_default_is_unbiased_on_real_trees_of_the_random_allocator() -> None:
    allocator = make_allocator("random", {}, np.random.default_rng(5))
    groups = grown(allocator, continuations=ROOTS, seed=2)
    assert (np.abs(standard_errors_off(groups, DEFAULT)) < 3).all()


def test_split_pulls_the_first_turn_without_bias_on_real_trees_of_the_trace_allocator() -> None:
    """No anchor lies above the first turn, so all of its credit comes from the root rollouts; later turns get more."""
    allocator = make_allocator("trace", {}, np.random.default_rng(5))
    first, *later = standard_errors_off(grown(allocator, continuations=2 * ROOTS, seed=3), "split")
    assert abs(first) < 3
    assert (np.sign(later) == np.sign(CLOSE.gradient()[1:])).all()
