"""Whatever order turns, scores, failures and grants come in, a tree keeps its promises."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.builders import NAN, cut, failure_of, grant, make_lease, make_tree, make_turn
from tests.oracles import tree_paths
from trace_async.core.group import check_group, paths
from trace_async.core.tree import IllegalMove
from trace_async.core.types import ROOT, Grant, GrownBy, NodeState, Score

MAX_TURNS = 4
PICK = st.integers(min_value=0, max_value=10**6)
WAITING = (NodeState.GROWING, NodeState.UNSCORED)


class AnyOrder(RuleBasedStateMachine):
    """Plays any legal move, tries any move at all, and keeps its own books."""

    @initialize(roots=st.integers(1, 4), continuations=st.integers(0, 4), can_branch=st.booleans())
    def begin(self, roots: int, continuations: int, can_branch: bool) -> None:
        self.lease = make_lease(roots=roots, continuations=continuations)
        self.tree = make_tree(self.lease, can_branch=can_branch, max_turns=MAX_TURNS)
        self.spent = dict.fromkeys(GrownBy, 0)
        self.grant_some(ROOT, GrownBy.ROOT, 1)

    def grant_some(self, node_id: int, reason: GrownBy, count: int) -> None:
        assert len(grant(self.tree, node_id, reason, count)) == count
        self.spent[reason] += count

    def in_state(self, *states: NodeState) -> list[int]:
        return [node.node_id for node in self.tree.nodes[1:] if node.state in states]

    @precondition(lambda self: self.tree.roots_left)
    @rule(pick=PICK)
    def grant_roots(self, pick: int) -> None:
        self.grant_some(ROOT, GrownBy.ROOT, 1 + pick % self.tree.roots_left)

    @precondition(lambda self: self.tree.continuations_left)
    @rule(pick=PICK, selected=st.booleans())
    def grant_continuations(self, pick: int, selected: bool) -> None:
        anchors = [ROOT, *self.tree.anchors()]
        reason = GrownBy.SELECTED if selected else GrownBy.CONTINUATION
        self.grant_some(anchors[pick % len(anchors)], reason, 1 + pick % self.tree.continuations_left)

    @precondition(lambda self: self.in_state(NodeState.GROWING))
    @rule(pick=PICK, ends=st.booleans())
    def play(self, pick: int, ends: bool) -> None:
        growing = self.in_state(NodeState.GROWING)
        node = self.tree.nodes[growing[pick % len(growing)]]
        over = ends or node.depth == MAX_TURNS
        state = self.tree.record_turn(node.node_id, make_turn(outcome=float(pick % 2) if over else NAN))
        assert state is (NodeState.LEAF if over else NodeState.UNSCORED)

    @precondition(lambda self: self.in_state(NodeState.UNSCORED))
    @rule(pick=PICK, going_on=st.booleans())
    def score(self, pick: int, going_on: bool) -> None:
        unscored = self.in_state(NodeState.UNSCORED)
        node_id = unscored[pick % len(unscored)]
        self.tree.record_score(node_id, Score(success=0.5, predictor_version=0))
        if going_on:
            self.grant_some(node_id, GrownBy.CHAIN, 1)

    @precondition(lambda self: self.in_state(*WAITING))
    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        waiting = self.in_state(*WAITING)
        node_id = waiting[pick % len(waiting)]
        self.tree.fail(node_id, failure_of(node_id))

    @rule(node_id=st.integers(-1, 12), reason=st.sampled_from(GrownBy), count=st.integers(0, 5))
    def grant_anything(self, node_id: int, reason: GrownBy, count: int) -> None:
        before = (len(self.tree.nodes), len(self.tree.history))
        wish = Grant(node_id=node_id, count=count, grown_by=reason)
        if self.may_grant(wish):
            self.grant_some(node_id, reason, count)
            return
        with pytest.raises(IllegalMove, match=rf"tree {self.tree.tree_id}.* node {node_id}\b"):
            self.tree.grant(wish)
        assert (len(self.tree.nodes), len(self.tree.history)) == before

    def may_grant(self, wish: Grant) -> bool:
        if wish.count < 1 or not 0 <= wish.node_id < len(self.tree.nodes):
            return False
        node, at_prompt = self.tree.nodes[wish.node_id], wish.node_id == ROOT
        if node.state is not NodeState.EXPANDED:
            return False
        if wish.grown_by is GrownBy.ROOT:
            return at_prompt and self.spent[GrownBy.ROOT] + wish.count <= self.lease.budget.roots
        if wish.grown_by is GrownBy.CHAIN:
            chained = [self.tree.nodes[child].grown_by is GrownBy.CHAIN for child in node.children]
            return not at_prompt and wish.count == 1 and not any(chained)
        further = self.spent[GrownBy.CONTINUATION] + self.spent[GrownBy.SELECTED] + wish.count
        return (at_prompt or self.tree.can_branch) and further <= self.lease.budget.continuations

    @invariant()
    def the_tree_agrees_with_its_nodes(self) -> None:
        self.tree.validate()

    @invariant()
    def the_budget_agrees_with_the_books(self) -> None:
        further = self.spent[GrownBy.CONTINUATION] + self.spent[GrownBy.SELECTED]
        assert self.tree.roots_left == self.lease.budget.roots - self.spent[GrownBy.ROOT] >= 0
        assert self.tree.continuations_left == self.lease.budget.continuations - further >= 0
        assert self.tree.num_growing == len(self.in_state(NodeState.GROWING))
        assert self.tree.is_complete == (not self.in_state(*WAITING))

    @invariant()
    def every_place_is_found_by_its_child_numbers(self) -> None:
        places = [self.tree.path(node.node_id) for node in self.tree.nodes]
        assert len(set(places)) == len(places)
        for node, place in zip(self.tree.nodes, places, strict=True):
            found = ROOT
            for number in place:
                found = self.tree.nodes[found].children[number]
            assert found == node.node_id
            assert len(place) == node.depth <= MAX_TURNS

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while waiting := self.in_state(*WAITING):
            self.tree.fail(waiting[0], failure_of(waiting[0])) if len(waiting) % 2 else self.finish(waiting[0])
        for node_id in self.in_state(NodeState.EXPANDED):
            if not self.tree.nodes[node_id].children:
                self.tree.close(node_id)
        group = cut(self.tree, self.lease)
        check_group(group)
        assert {tuple(turn + 1 for turn in path) for path in paths(group)} == tree_paths(self.tree)

    def finish(self, node_id: int) -> None:
        if self.tree.nodes[node_id].state is NodeState.GROWING:
            self.tree.record_turn(node_id, make_turn(outcome=1.0))
        else:
            self.tree.record_score(node_id, Score(success=NAN, predictor_version=0))


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestAnyOrder = AnyOrder.TestCase
