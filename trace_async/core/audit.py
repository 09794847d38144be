"""Re-derives a tree's counts and links from its nodes.

Owns the second opinion: it trusts nothing that a door has kept and computes every number again. It changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trace_async.core.nodes import Node
from trace_async.core.types import ROOT, GrownBy, NodeState
from trace_async.errors import InvariantError

_HAS = {
    NodeState.GROWING: (False, False, False),
    NodeState.UNSCORED: (True, False, False),
    NodeState.EXPANDED: (True, True, False),
    NodeState.CLOSED: (True, True, False),
    NodeState.LEAF: (True, False, False),
    NodeState.FAILED: (False, False, True),
}
"""Whether a node of a state has a turn, a score, a failure."""


def audit_nodes(
    tree_id: str,
    nodes: Sequence[Node],
    *,
    max_turns: int,
    roots_spent: int,
    continuations_spent: int,
    num_growing: int,
    num_unscored: int,
) -> None:
    """Raise InvariantError with the ids where the ledger or a node disagrees with what the nodes say."""
    grown = nodes[1:]
    derived = {
        "roots spent": (roots_spent, sum(node.grown_by is GrownBy.ROOT for node in grown)),
        "continuations spent": (
            continuations_spent,
            sum(node.grown_by in (GrownBy.CONTINUATION, GrownBy.SELECTED) for node in grown),
        ),
        "growing": (num_growing, sum(node.state is NodeState.GROWING for node in grown)),
        "unscored": (num_unscored, sum(node.state is NodeState.UNSCORED for node in grown)),
    }
    for name, (kept, counted) in derived.items():
        if kept != counted:
            raise InvariantError(f"tree {tree_id}: the ledger says {kept} {name}, the nodes say {counted}")
    below: list[list[int]] = [[] for _ in nodes]
    for node in grown:
        if not 0 <= node.parent < node.node_id <= len(grown):
            raise InvariantError(f"tree {tree_id} node {node.node_id}: parent {node.parent} does not come before it")
        below[node.parent].append(node.node_id)
    for node_id, node in enumerate(nodes):
        fault = (
            _link_fault(nodes, node, node_id, below[node_id])
            or (_place_fault(nodes[node.parent], node, max_turns) if node_id != ROOT else None)
            or _content_fault(node)
        )
        if fault:
            raise InvariantError(f"tree {tree_id} node {node_id} ({node.state.name}): {fault}")


def _link_fault(nodes: Sequence[Node], node: Node, node_id: int, below: list[int]) -> str | None:
    if node.node_id != node_id:
        return f"calls itself {node.node_id}"
    if node.children != below:
        return f"children {node.children}, but {below} call it parent"
    chained = [child for child in node.children if nodes[child].grown_by is GrownBy.CHAIN]
    if chained != ([] if node.chain_child is None else [node.chain_child]):
        return f"chain child {node.chain_child} but chained nodes {chained}"
    if node_id == ROOT:
        is_prompt = (node.parent, node.depth, node.rollout, node.state) == (-1, 0, ROOT, NodeState.EXPANDED)
        return None if is_prompt and not chained else "is not a prompt"
    return None


def _place_fault(parent: Node, node: Node, max_turns: int) -> str | None:
    if node.depth != parent.depth + 1 or node.depth > max_turns:
        return f"depth {node.depth} below depth {parent.depth} with max_turns {max_turns}"
    if parent.children[node.child_number] != node.node_id:
        return f"is not child {node.child_number} of node {parent.node_id}"
    if parent.state is not NodeState.EXPANDED:
        return f"parent {parent.node_id} is {parent.state.name}"
    if (node.grown_by is GrownBy.ROOT) and parent.node_id != ROOT:
        return f"a root rollout starts at node {parent.node_id}"
    rollout = parent.rollout if node.grown_by is GrownBy.CHAIN else node.node_id
    return None if node.rollout == rollout else f"belongs to rollout {node.rollout}, not {rollout}"


def _content_fault(node: Node) -> str | None:
    if node.node_id == ROOT:
        return "the prompt has a turn" if node.turn or node.failure else None
    has = (node.turn is not None, node.score is not None, node.failure is not None)
    wanted = _HAS[node.state]
    if has != wanted:
        return f"(turn, score, failure) present {has}, should be {wanted}"
    if node.turn is not None and (node.state is NodeState.LEAF) == math.isnan(node.turn.outcome):
        return f"outcome {node.turn.outcome}"
    return None
