"""Driving allocators by hand: trees of a given budget, rollouts played to their end, grants spent at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.builders import NAN, failure_of, make_lease, make_tree, make_turn
from trace_async.core.tree import TurnTree
from trace_async.core.types import SUCCESS_ABOVE, Grant, GrownBy, NodeState, Score
from trace_async.methods.allocators import Allocator, make_allocator


def allocator(name: str, seed: int = 0, **options: Any) -> Allocator:
    return make_allocator(name, options, np.random.default_rng(seed))


def tree_of(
    roots: int,
    continuations: int,
    *,
    can_branch: bool = True,
    max_turns: int = 8,
    success_above: float = SUCCESS_ABOVE,
) -> TurnTree:
    lease = make_lease(roots=roots, continuations=continuations)
    return make_tree(lease, can_branch=can_branch, max_turns=max_turns, success_above=success_above)


def spend(tree: TurnTree, grants: list[Grant]) -> list[int]:
    return [node for grant in grants for node in tree.grant(grant)]


def play(
    tree: TurnTree, node: int, rule: Allocator, *successes: float, outcome: float, tokens: Sequence[int] = ()
) -> int:
    """Play a rollout from GROWING `node`: one scored turn for each of `successes`, then the last. Returns it.

    `tokens`: sampled tokens of each turn, two when not told. Grants of anything but the next turn are dropped.
    """
    lengths = list(tokens) or [2] * (len(successes) + 1)
    for success, length in zip(successes, lengths, strict=False):
        tree.record_turn(node, make_turn(action_ids=[11] * length))
        tree.record_score(node, Score(success=success, predictor_version=0))
        (node,) = spend(tree, [grant for grant in rule.on_turn(tree, node) if grant.grown_by is GrownBy.CHAIN])
    tree.record_turn(node, make_turn(action_ids=[11] * lengths[len(successes)], outcome=outcome))
    return node


def granted(grants: list[Grant]) -> dict[int, int]:
    """Continuations by node."""
    assert all(grant.grown_by is GrownBy.CONTINUATION for grant in grants)
    return {grant.node_id: grant.count for grant in grants}


def grow_at_random(tree: TurnTree, rule: Allocator, seed: int, *, failures: float = 0.2) -> list[int]:
    """Turns of random surprisal end in a random order. Returns the continuations left after each root rollout's end."""
    rng = np.random.default_rng(seed)
    growing, left = spend(tree, rule.start(tree)), []
    while growing:
        node = growing.pop(int(rng.integers(len(growing))))
        if rng.random() < failures:
            tree.fail(node, failure_of(node))
        else:
            at_end = tree.nodes[node].depth == tree.max_turns or rng.random() < 0.3
            logprobs = (-rng.exponential(1.0, 2)).tolist()
            tree.record_turn(node, make_turn(logprobs=logprobs, outcome=float(rng.integers(2)) if at_end else NAN))
        if tree.nodes[node].state is NodeState.UNSCORED:
            tree.record_score(node, Score(success=float(rng.random()), predictor_version=0))
            growing += spend(tree, rule.on_turn(tree, node))
        else:
            growing += spend(tree, rule.on_rollout_end(tree, node))
            if tree.nodes[tree.nodes[node].rollout].grown_by is GrownBy.ROOT:
                left.append(tree.continuations_left)
    return left
