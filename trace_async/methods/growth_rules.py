"""What tree allocators share: the three moments at which one speaks, root rollouts that run to their end, and shares.

Pure. Invariant of the shares: when e of m root rollouts have ended, floor(e/m of the budget) may have been granted, so
all of it with the last, in whatever order and with whatever failures they end. Owns no method; each has its own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trace_async.core.nodes import Node
from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, GrownBy

OPTIONS_KEY = "tree.options"
"""Where the configuration keeps an allocator's options."""


class Allocator(Protocol):
    """Decides which nodes get children. Pure and synchronous: its grants are spent before anything else happens."""

    def start(self, tree: TurnTree) -> list[Grant]:
        """The first grants of a tree that has only its prompt."""
        ...

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """Grants when `node_id` has just been scored and its episode goes on; without one it is closed there."""
        ...

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """Grants when a rollout has just ended at `node_id`, as LEAF or FAILED."""
        ...


class RootRollouts:
    """What all allocators here share: every root at once, and a rollout runs to its end."""

    def start(self, tree: TurnTree) -> list[Grant]:
        """All roots."""
        return [Grant(node_id=ROOT, count=tree.budget.roots, grown_by=GrownBy.ROOT)]

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """The rollout goes on."""
        return [Grant(node_id=node_id, count=1, grown_by=GrownBy.CHAIN)]


def root_rollouts(tree: TurnTree) -> list[int]:
    """First nodes of the root rollouts granted so far, in the order of their granting."""
    nodes = tree.nodes
    return [child for child in nodes[ROOT].children if nodes[child].grown_by is GrownBy.ROOT]


def bare_rollout(tree: TurnTree, first: int) -> list[Node]:
    """The nodes that the rollout beginning at node `first` has so far, without what continues it elsewhere."""
    node = tree.nodes[first]
    chain = [node]
    while node.chain_child is not None:
        node = tree.nodes[node.chain_child]
        chain.append(node)
    return chain


def num_roots_ended(tree: TurnTree, node_id: int) -> int:
    """How many root rollouts have ended, now that a rollout has at `node_id`; 0 unless that was one of them."""
    if tree.nodes[tree.nodes[node_id].rollout].grown_by is not GrownBy.ROOT:
        return 0
    return sum(tree.chain_end(first) is not None for first in root_rollouts(tree))


def continuations_due(tree: TurnTree, node_id: int) -> int:
    """Continuations that may be granted now that a rollout has ended at `node_id`; 0 unless it was a root rollout.

    About N for each end; what was held back at earlier ends is in it.
    """
    num_ended = num_roots_ended(tree, node_id)
    spent = tree.budget.continuations - tree.continuations_left
    return max(0, tree.budget.continuations * num_ended // tree.budget.roots - spent)


def continuations(counts: Mapping[int, int]) -> list[Grant]:
    """Grants of `counts` continuations by node id, in node order; none for a count of 0."""
    return [
        Grant(node_id=node_id, count=count, grown_by=GrownBy.CONTINUATION)
        for node_id, count in sorted(counts.items())
        if count > 0
    ]
