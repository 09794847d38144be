"""One prompt's turn tree: which moves are legal, what they cost, and what has happened.

Owns the nodes, the budget ledger and the history. Five doors change a tree and nothing else does: `grant`,
`record_turn`, `record_score`, `close`, `fail`. Each either makes a legal move as a whole or raises `IllegalMove` and
leaves the tree as it was.

    from       to         by            when
    -          GROWING    grant         the allocator granted a child
    GROWING    LEAF       record_turn   the turn ended the episode
    GROWING    UNSCORED   record_turn   the episode goes on
    UNSCORED   EXPANDED   record_score  the predictor answered
    EXPANDED   CLOSED     close         the allocator lets the node end here, without children
    GROWING    FAILED     fail          the turn could not be played
    UNSCORED   FAILED     fail          no score could be had; the turn is dropped

Invariants, re-derived by `validate`: the ledger equals the budget minus what the nodes paid; parents come before their
children; only the prompt and EXPANDED nodes have children; no node is deeper than `max_turns`; the history has at most
four entries per node. A tree never plays, scores, decides or reads a clock, and it has no `await`, so a grant reads and
spends the budget in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trace_async.core.audit import audit_nodes
from trace_async.core.nodes import IllegalMove, Move, MoveKind, Node, prompt_node, turn_fault
from trace_async.core.types import ROOT, Failure, Grant, GrownBy, IntArray, NodeState, Score, TreeBudget, Turn
from trace_async.errors import InvariantError

__all__ = ["IllegalMove", "Move", "MoveKind", "Node", "TurnTree"]


class TurnTree:
    """The tree of one lease.

    `can_branch` says whether children other than the running rollout's own may be grown below the prompt; an outcome
    above `success_above` counts as a success.
    """

    def __init__(
        self,
        *,
        tree_id: str,
        prompt_id: str,
        prompt_ids: IntArray,
        budget: TreeBudget,
        can_branch: bool,
        max_turns: int,
        success_above: float,
    ) -> None:
        if budget.roots < 0 or budget.continuations < 0 or max_turns < 1:
            raise InvariantError(f"tree {tree_id}: {budget} with max_turns {max_turns} cannot be grown")
        if prompt_ids.size == 0:
            raise InvariantError(f"tree {tree_id}: prompt {prompt_id} has no tokens")
        self.tree_id = tree_id
        self.prompt_id = prompt_id
        self.prompt_ids = prompt_ids
        self.budget = budget
        self.can_branch = can_branch
        self.max_turns = max_turns
        self.success_above = success_above
        self._roots_left = budget.roots
        self._continuations_left = budget.continuations
        self._num_growing = 0
        self._num_unscored = 0
        self._history: list[Move] = []
        self._nodes = [prompt_node()]

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes by node id; the prompt is node 0."""
        return self._nodes

    @property
    def roots_left(self) -> int:
        """Root rollouts that may still be granted."""
        return self._roots_left

    @property
    def continuations_left(self) -> int:
        """Continuations that may still be granted."""
        return self._continuations_left

    @property
    def num_growing(self) -> int:
        """Nodes whose turn is being played."""
        return self._num_growing

    @property
    def is_complete(self) -> bool:
        """No node waits for a turn or a score; a further grant may still reopen the tree."""
        return self._num_growing == 0 and self._num_unscored == 0

    @property
    def history(self) -> tuple[Move, ...]:
        """Every move so far, oldest first; at most four per node."""
        return tuple(self._history)

    def anchors(self) -> list[int]:
        """EXPANDED nodes on the root rollouts' own chains, in node order; none where the tree cannot branch."""
        if not self.can_branch:
            return []
        nodes = self._nodes
        return [
            node.node_id
            for node in nodes[1:]
            if node.state is NodeState.EXPANDED and nodes[node.rollout].grown_by is GrownBy.ROOT
        ]

    def chain_end(self, node_id: int) -> int | None:
        """The node where the bare rollout through `node_id` ends (LEAF, CLOSED or FAILED); None while it runs."""
        if node_id == ROOT:
            raise InvariantError(f"tree {self.tree_id}: no single rollout goes through the prompt (node {ROOT})")
        node = self._node(node_id)
        while node.state is NodeState.EXPANDED:
            if node.chain_child is None:
                return None
            node = self._nodes[node.chain_child]
        return node.node_id if node.state not in (NodeState.GROWING, NodeState.UNSCORED) else None

    def ancestors(self, node_id: int) -> list[int]:
        """Node ids above `node_id`, nearest first, the prompt last."""
        found = []
        parent = self._node(node_id).parent
        while parent >= 0:
            found.append(parent)
            parent = self._nodes[parent].parent
        return found

    def path(self, node_id: int) -> tuple[int, ...]:
        """Child numbers from the prompt to `node_id`; empty for the prompt."""
        numbers = []
        node = self._node(node_id)
        while node.parent >= 0:
            numbers.append(node.child_number)
            node = self._nodes[node.parent]
        return tuple(reversed(numbers))

    def prefix_ids(self, node_id: int) -> IntArray:
        """Tokens int32 [L] from the prompt to the end of `node_id`'s turn.

        A node without a turn adds nothing: for a GROWING node this is what its turn is sampled from.
        """
        turns = [self._nodes[above].turn for above in reversed(self.ancestors(node_id))]
        turns.append(self._nodes[node_id].turn)
        parts = [self.prompt_ids]
        for turn in turns:
            if turn is not None:
                parts += (turn.action_ids, turn.observation_ids)
        return np.concatenate(parts).astype(np.int32, copy=False)

    def grant(self, grant: Grant) -> tuple[int, ...]:
        """Grow `grant.count` children at `grant.node_id`; pays the budget and returns the new node ids.

        Raises IllegalMove when the node may not have such children or the budget does not cover all of them.
        """
        node, reason, count = self._node(grant.node_id), grant.grown_by, grant.count
        self._check_grant(node, reason, count)
        if reason is GrownBy.ROOT:
            self._roots_left -= count
        elif reason is not GrownBy.CHAIN:
            self._continuations_left -= count
        return tuple(self._grow(node, reason) for _ in range(count))

    def record_turn(self, node_id: int, turn: Turn) -> NodeState:
        """A turn was played: GROWING becomes LEAF when it has an outcome, UNSCORED otherwise. Returns the new state."""
        node = self._move(node_id, "record a turn", NodeState.GROWING)
        fault = turn_fault(turn, is_last=node.depth == self.max_turns)
        if fault:
            raise IllegalMove(f"tree {self.tree_id} node {node_id} (depth {node.depth}): {fault}")
        node.turn = turn
        self._num_growing -= 1
        if math.isnan(turn.outcome):
            node.state = NodeState.UNSCORED
            self._num_unscored += 1
        else:
            node.state = NodeState.LEAF
        self._history.append(Move(MoveKind.TURN, node_id, f"{node.state.name} outcome {turn.outcome:g}"))
        return node.state

    def record_score(self, node_id: int, score: Score) -> None:
        """The predictor answered: UNSCORED becomes EXPANDED."""
        node = self._move(node_id, "record a score", NodeState.UNSCORED)
        if not (math.isnan(score.success) or 0.0 <= score.success <= 1.0):
            raise IllegalMove(f"tree {self.tree_id} node {node_id}: predicted success {score.success} not in [0, 1]")
        node.score = score
        node.state = NodeState.EXPANDED
        self._num_unscored -= 1
        self._history.append(Move(MoveKind.SCORE, node_id, f"{score.success:.3f}"))

    def close(self, node_id: int) -> None:
        """Let a node end here: EXPANDED without children becomes CLOSED."""
        node = self._move(node_id, "close", NodeState.EXPANDED)
        if node_id == ROOT or node.children:
            what = "the prompt" if node_id == ROOT else f"a node with children {node.children}"
            raise IllegalMove(f"tree {self.tree_id} node {node_id}: cannot close {what}")
        node.state = NodeState.CLOSED
        self._history.append(Move(MoveKind.CLOSE, node_id, ""))

    def fail(self, node_id: int, failure: Failure) -> None:
        """The node could not be played or scored: GROWING or UNSCORED becomes FAILED; its budget stays spent."""
        node = self._move(node_id, "fail", NodeState.GROWING, NodeState.UNSCORED)
        if failure.node_id != node_id:
            raise IllegalMove(f"tree {self.tree_id} node {node_id}: the failure is of node {failure.node_id}")
        if node.state is NodeState.GROWING:
            self._num_growing -= 1
        else:
            self._num_unscored -= 1
        dropped = 0 if node.turn is None else node.turn.action_ids.size
        node.turn = None
        node.failure = failure
        node.state = NodeState.FAILED
        self._history.append(
            Move(MoveKind.FAIL, node_id, f"{failure.kind}: {failure.message} ({dropped} sampled tokens dropped)")
        )

    def validate(self) -> None:
        """Re-derive every count and link from the nodes; raises InvariantError with the ids that disagree."""
        audit_nodes(
            self.tree_id,
            self._nodes,
            max_turns=self.max_turns,
            roots_spent=self.budget.roots - self._roots_left,
            continuations_spent=self.budget.continuations - self._continuations_left,
            num_growing=self._num_growing,
            num_unscored=self._num_unscored,
        )
        if min(self._roots_left, self._continuations_left) < 0 or len(self._history) > 4 * len(self._nodes):
            raise InvariantError(
                f"tree {self.tree_id}: {self._roots_left} roots and {self._continuations_left} continuations left, "
                f"{len(self._history)} moves for {len(self._nodes)} nodes"
            )

    def _node(self, node_id: int) -> Node:
        if not 0 <= node_id < len(self._nodes):
            raise IllegalMove(f"tree {self.tree_id}: no node {node_id}, it has nodes 0 to {len(self._nodes) - 1}")
        return self._nodes[node_id]

    def _move(self, node_id: int, what: str, *legal: NodeState) -> Node:
        node = self._node(node_id)
        if node.state not in legal:
            names = " or ".join(state.name for state in legal)
            raise IllegalMove(
                f"tree {self.tree_id} node {node_id}: cannot {what}, it is {node.state.name}, not {names}"
            )
        return node

    def _grow(self, parent: Node, reason: GrownBy) -> int:
        node_id = len(self._nodes)
        chained = reason is GrownBy.CHAIN
        self._nodes.append(
            Node(
                node_id=node_id,
                parent=parent.node_id,
                child_number=len(parent.children),
                depth=parent.depth + 1,
                state=NodeState.GROWING,
                grown_by=reason,
                rollout=parent.rollout if chained else node_id,
            )
        )
        parent.children.append(node_id)
        if chained:
            parent.chain_child = node_id
        self._num_growing += 1
        self._history.append(Move(MoveKind.GRANT, node_id, f"{reason.name} at node {parent.node_id}"))
        return node_id

    def _check_grant(self, node: Node, reason: GrownBy, count: int) -> None:
        fault = self._grant_fault(node, reason, count)
        if fault:
            raise IllegalMove(
                f"tree {self.tree_id} node {node.node_id} ({node.state.name}, depth {node.depth}): "
                f"cannot grant {count} {reason.name}: {fault}"
            )

    def _grant_fault(self, node: Node, reason: GrownBy, count: int) -> str | None:
        at_prompt = node.node_id == ROOT
        if count < 1:
            return "a grant is for at least one child"
        if node.state is not NodeState.EXPANDED:
            return "only the prompt and EXPANDED nodes may get children"
        if reason is GrownBy.ROOT:
            if not at_prompt:
                return "root rollouts start at the prompt"
            return None if count <= self._roots_left else f"{self._roots_left} roots left"
        if reason is GrownBy.CHAIN:
            if at_prompt or count > 1:
                return "a rollout goes on with one turn below another turn"
            return None if node.chain_child is None else f"its rollout already goes on with node {node.chain_child}"
        if not at_prompt and not self.can_branch:
            return "this environment cannot branch below the prompt"
        return None if count <= self._continuations_left else f"{self._continuations_left} continuations left"
