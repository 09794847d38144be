"""Each legal move does what it says, each illegal one is refused with its ids and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.builders import NAN, PROMPT_IDS, failure_of, grant, make_lease, make_tree, make_turn
from trace_async.core.tree import IllegalMove, Move, MoveKind, TurnTree
from trace_async.core.types import ROOT, GrownBy, NodeState, Score, StopReason, TreeBudget
from trace_async.errors import InvariantError

SCORE = Score(success=0.25, predictor_version=3)


def new_tree(*, roots: int = 2, continuations: int = 2, can_branch: bool = True, max_turns: int = 3) -> TurnTree:
    lease = make_lease(roots=roots, continuations=continuations)
    return make_tree(lease, can_branch=can_branch, max_turns=max_turns)


def expanded_tree() -> TurnTree:
    """Node 1 is EXPANDED, node 2 GROWING below it, node 3 GROWING at the prompt."""
    tree = new_tree()
    grant(tree, ROOT, GrownBy.ROOT)
    tree.record_turn(1, make_turn())
    tree.record_score(1, SCORE)
    grant(tree, 1, GrownBy.CHAIN)
    grant(tree, ROOT, GrownBy.ROOT)
    return tree


def snapshot(tree: TurnTree) -> str:
    return repr((tree.nodes, tree.history, tree.roots_left, tree.continuations_left, tree.num_growing))


def test_the_prompt_is_born_expanded_and_a_new_tree_is_complete() -> None:
    tree = new_tree()
    assert [node.state for node in tree.nodes] == [NodeState.EXPANDED]
    assert tree.is_complete
    assert tree.path(ROOT) == ()
    assert tree.ancestors(ROOT) == []


def test_roots_pay_roots_continuations_pay_continuations_and_chains_are_free() -> None:
    tree = new_tree(roots=3, continuations=3)
    assert grant(tree, ROOT, GrownBy.ROOT, 2) == (1, 2)
    assert (tree.roots_left, tree.continuations_left, tree.num_growing) == (1, 3, 2)
    tree.record_turn(1, make_turn())
    tree.record_score(1, SCORE)
    assert grant(tree, 1, GrownBy.CHAIN) == (3,)
    assert (tree.roots_left, tree.continuations_left) == (1, 3)
    assert grant(tree, 1, GrownBy.CONTINUATION, 1) == (4,)
    assert grant(tree, ROOT, GrownBy.SELECTED, 2) == (5, 6)
    assert (tree.roots_left, tree.continuations_left) == (1, 0)
    assert tree.nodes[1].children == [3, 4]
    assert tree.nodes[4].child_number == 1
    tree.validate()


def test_a_turn_with_an_outcome_is_a_leaf_and_one_without_waits_for_its_score() -> None:
    tree = new_tree()
    grant(tree, ROOT, GrownBy.ROOT, 2)
    assert tree.record_turn(1, make_turn(outcome=0.0)) is NodeState.LEAF
    assert tree.record_turn(2, make_turn()) is NodeState.UNSCORED
    assert not tree.is_complete
    tree.record_score(2, SCORE)
    assert [node.state for node in tree.nodes] == [NodeState.EXPANDED, NodeState.LEAF, NodeState.EXPANDED]
    tree.close(2)
    assert [node.state for node in tree.nodes] == [NodeState.EXPANDED, NodeState.LEAF, NodeState.CLOSED]
    assert tree.is_complete


def test_a_failure_keeps_its_budget_spent_and_drops_an_unscored_turn() -> None:
    tree = new_tree()
    grant(tree, ROOT, GrownBy.ROOT, 2)
    tree.fail(1, failure_of(1))
    tree.record_turn(2, make_turn(action_ids=(1, 2, 3)))
    tree.fail(2, failure_of(2, "PredictorError"))
    assert tree.roots_left == 0
    assert tree.nodes[2].turn is None
    assert tree.history[-1] == Move(
        MoveKind.FAIL, 2, "PredictorError: node 2 missed its deadline (3 sampled tokens dropped)"
    )
    tree.validate()


def test_the_history_tells_every_move_in_order() -> None:
    tree = expanded_tree()
    assert [(move.kind.name, move.node_id) for move in tree.history] == [
        ("GRANT", 1),
        ("TURN", 1),
        ("SCORE", 1),
        ("GRANT", 2),
        ("GRANT", 3),
    ]


def test_paths_ancestors_and_prefixes_follow_the_parents() -> None:
    tree = expanded_tree()
    assert tree.path(2) == (0, 0)
    assert tree.path(3) == (1,)
    assert tree.ancestors(2) == [1, ROOT]
    assert tree.prefix_ids(1).tolist() == [*PROMPT_IDS.tolist(), 11, 12, 21]
    assert tree.prefix_ids(2).tolist() == tree.prefix_ids(1).tolist()  # growing: what its turn is sampled from
    assert tree.prefix_ids(ROOT).dtype == np.int32


def test_only_root_rollouts_own_chains_are_anchors() -> None:
    tree = expanded_tree()
    tree.record_turn(2, make_turn())
    tree.record_score(2, SCORE)
    (further,) = grant(tree, 1, GrownBy.CONTINUATION)
    tree.record_turn(further, make_turn())
    tree.record_score(further, SCORE)
    assert tree.anchors() == [1, 2]


def test_a_tree_that_cannot_branch_has_no_anchors() -> None:
    tree = new_tree(can_branch=False)
    grant(tree, ROOT, GrownBy.ROOT)
    tree.record_turn(1, make_turn())
    tree.record_score(1, SCORE)
    assert tree.anchors() == []
    with pytest.raises(IllegalMove, match="cannot branch below the prompt"):
        grant(tree, 1, GrownBy.CONTINUATION)
    assert grant(tree, ROOT, GrownBy.CONTINUATION) == (2,)


def test_the_end_of_the_bare_rollout_ignores_continuations_and_is_none_while_it_runs() -> None:
    tree = expanded_tree()
    assert tree.chain_end(1) is None
    (further,) = grant(tree, 1, GrownBy.CONTINUATION)
    tree.record_turn(further, make_turn(outcome=1.0))
    assert tree.chain_end(1) is None
    assert tree.chain_end(further) == further
    tree.record_turn(2, make_turn())
    assert tree.chain_end(1) is None
    tree.fail(2, failure_of(2))
    assert tree.chain_end(1) == 2
    with pytest.raises(InvariantError, match="through the prompt"):
        tree.chain_end(ROOT)


ILLEGAL: dict[str, tuple[Callable[[TurnTree], object], str]] = {
    "unknown node": (lambda tree: tree.record_turn(9, make_turn()), "no node 9"),
    "negative node": (lambda tree: tree.record_score(-1, SCORE), "no node -1"),
    "turn of the prompt": (lambda tree: tree.record_turn(ROOT, make_turn()), "node 0: .* EXPANDED, not GROWING"),
    "turn twice": (lambda tree: tree.record_turn(1, make_turn()), "node 1: .* EXPANDED, not GROWING"),
    "score before its turn": (lambda tree: tree.record_score(2, SCORE), "node 2: .* GROWING, not UNSCORED"),
    "score twice": (lambda tree: tree.record_score(1, SCORE), "node 1: .* EXPANDED, not UNSCORED"),
    "close with children": (lambda tree: tree.close(1), r"node 1: .*children \[2\]"),
    "close while growing": (lambda tree: tree.close(2), "node 2: .* GROWING, not EXPANDED"),
    "close the prompt": (lambda tree: tree.close(ROOT), "the prompt"),
    "fail what is done": (lambda tree: tree.fail(1, failure_of(1)), "node 1: .* EXPANDED, not GROWING or UNSCORED"),
    "fail with another node's failure": (lambda tree: tree.fail(2, failure_of(1)), "node 2: .* of node 1"),
    "too many roots": (lambda tree: grant(tree, ROOT, GrownBy.ROOT), "0 roots left"),
    "roots below the prompt": (lambda tree: grant(tree, 1, GrownBy.ROOT), "node 1 .*start at the prompt"),
    "too many continuations": (lambda tree: grant(tree, 1, GrownBy.CONTINUATION, 3), "2 continuations left"),
    "too many selections": (lambda tree: grant(tree, 1, GrownBy.SELECTED, 3), "2 continuations left"),
    "two turns going on": (lambda tree: grant(tree, 1, GrownBy.CHAIN), "already goes on with node 2"),
    "a chain at the prompt": (lambda tree: grant(tree, ROOT, GrownBy.CHAIN), "one turn below another"),
    "a wide chain": (lambda tree: grant(tree, 1, GrownBy.CHAIN, 2), "one turn below another"),
    "children of a growing node": (lambda tree: grant(tree, 2, GrownBy.CHAIN), "node 2 .GROWING"),
    "an empty grant": (lambda tree: grant(tree, 1, GrownBy.CONTINUATION, 0), "at least one child"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_move_is_refused_with_its_ids_and_changes_nothing(name: str) -> None:
    move, message = ILLEGAL[name]
    tree = expanded_tree()
    before = snapshot(tree)
    with pytest.raises(IllegalMove, match=f"tree lease-0.*{message}"):
        move(tree)
    assert snapshot(tree) == before
    tree.validate()


@pytest.mark.parametrize("success", [1.5, -0.1, np.inf])
def test_a_predicted_success_outside_the_unit_interval_is_refused(success: float) -> None:
    tree = expanded_tree()
    tree.record_turn(2, make_turn())
    with pytest.raises(IllegalMove, match=f"node 2: predicted success {success}"):
        tree.record_score(2, Score(success=success, predictor_version=0))


@pytest.mark.parametrize("success", [0.0, 1.0, NAN])
def test_a_sure_or_an_unknown_success_is_a_score_too(success: float) -> None:
    tree = expanded_tree()
    tree.record_turn(2, make_turn())
    tree.record_score(2, Score(success=success, predictor_version=0))
    assert tree.is_complete is False  # node 3 still grows
    tree.validate()


BAD_TURNS = {
    "no tokens": (make_turn(action_ids=()), "0 sampled tokens"),
    "a log-probability too few": (make_turn(logprobs=(-1.0,)), "2 sampled tokens with 1 log-prob"),
    "a positive log-probability": (make_turn(logprobs=(-1.0, 0.01)), "finite and at most 0"),
    "a log-probability of nan": (make_turn(logprobs=(-1.0, NAN)), "finite and at most 0"),
    "a log-probability of minus infinity": (make_turn(logprobs=(-1.0, -np.inf)), "finite and at most 0"),
    "versions out of order": (make_turn(version_min=4, version_max=3), "min 4 <= max 3"),
    "no version": (make_turn(version_min=-1), "versions kv -1"),
    "key/values newer than the weights": (replace(make_turn(), kv_version_min=1), "kv 1 <= min 0"),
    "an infinite outcome": (make_turn(outcome=np.inf), "must be finite"),
    "an unknown reward": (replace(make_turn(), reward=NAN), "reward nan must be finite"),
    "an observation after the end": (replace(make_turn(), outcome=1.0), "1 observation tokens after an end"),
    "an episode stop without an outcome": (replace(make_turn(), stop=StopReason.CONTEXT), "needs an outcome"),
}


@pytest.mark.parametrize("name", BAD_TURNS)
def test_a_turn_that_cannot_be_true_is_refused_at_once(name: str) -> None:
    turn, message = BAD_TURNS[name]
    tree = expanded_tree()
    before = snapshot(tree)
    with pytest.raises(IllegalMove, match=f"tree lease-0 node 2 .*{message}"):
        tree.record_turn(2, turn)
    assert snapshot(tree) == before


def test_a_turn_at_the_limit_must_end_the_episode() -> None:
    tree = new_tree(max_turns=1)
    grant(tree, ROOT, GrownBy.ROOT)
    with pytest.raises(IllegalMove, match=r"depth 1.*turn limit"):
        tree.record_turn(1, make_turn())
    assert tree.record_turn(1, make_turn(outcome=0.0)) is NodeState.LEAF


@pytest.mark.parametrize(("roots", "continuations", "max_turns"), [(-1, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_an_impossible_budget_is_refused(roots: int, continuations: int, max_turns: int) -> None:
    with pytest.raises(InvariantError, match="cannot be grown"):
        new_tree(roots=roots, continuations=continuations, max_turns=max_turns)


def start_a_root_rollout_at(tree: TurnTree, node_id: int) -> None:
    tree.nodes[node_id].grown_by = GrownBy.ROOT
    tree.nodes[tree.nodes[node_id].parent].chain_child = None
    tree.budget = TreeBudget(roots=tree.budget.roots + 1, continuations=tree.budget.continuations)


DAMAGE: dict[str, tuple[Callable[[TurnTree], object], str]] = {
    "a root that nobody paid": (lambda tree: setattr(tree.nodes[3], "grown_by", GrownBy.SELECTED), "2 roots spent.*1"),
    "a count of growing nodes": (lambda tree: setattr(tree.nodes[3], "state", NodeState.UNSCORED), "growing"),
    "a lost child": (lambda tree: tree.nodes[1].children.pop(), "node 1 .*call it parent"),
    "a parent that comes later": (lambda tree: setattr(tree.nodes[2], "parent", 3), "node 2: parent 3"),
    "a depth": (lambda tree: setattr(tree.nodes[2], "depth", 1), "node 2 .*depth 1 below depth 1"),
    "a child number": (lambda tree: setattr(tree.nodes[3], "child_number", 0), "node 3 .*not child 0"),
    "a chain": (lambda tree: setattr(tree.nodes[1], "chain_child", None), "node 1 .*chain child None"),
    "a rollout": (lambda tree: setattr(tree.nodes[2], "rollout", 2), "node 2 .*rollout 2, not 1"),
    "a parent that was closed": (lambda tree: setattr(tree.nodes[1], "state", NodeState.CLOSED), "node 2 .*is CLOSED"),
    "a turn that vanished": (lambda tree: setattr(tree.nodes[1], "turn", None), "node 1 .*turn, score, failure"),
    "an outcome on the way": (
        lambda tree: setattr(tree.nodes[1], "turn", make_turn(outcome=1.0)),
        "node 1 .*outcome 1",
    ),
    "a node id": (lambda tree: setattr(tree.nodes[0], "node_id", 1), "node 0 .*calls itself 1"),
    "a prompt below something": (lambda tree: setattr(tree.nodes[0], "depth", 1), "node 0 .*is not a prompt"),
    "a root rollout below a turn": (lambda tree: start_a_root_rollout_at(tree, 2), "node 2 .*starts at node 1"),
    "a prompt with a turn": (lambda tree: setattr(tree.nodes[0], "turn", make_turn()), "prompt has a turn"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_validate_finds_what_no_door_could_have_done(name: str) -> None:
    damage, message = DAMAGE[name]
    tree = expanded_tree()
    damage(tree)
    with pytest.raises(InvariantError, match=f"tree lease-0.*{message}"):
        tree.validate()


def test_a_prompt_without_tokens_is_refused() -> None:
    budget = TreeBudget(roots=1, continuations=0)
    nothing = np.zeros(0, np.int32)
    with pytest.raises(InvariantError, match="prompt p has no tokens"):
        TurnTree(
            tree_id="t",
            prompt_id="p",
            prompt_ids=nothing,
            budget=budget,
            can_branch=True,
            max_turns=1,
            success_above=0.5,
        )


def test_a_rollout_whose_next_turn_is_not_granted_yet_still_runs() -> None:
    tree = expanded_tree()
    tree.record_turn(2, make_turn())
    tree.record_score(2, SCORE)
    assert tree.chain_end(1) is None
    tree.close(2)
    assert tree.chain_end(1) == 2


def test_validate_finds_an_overspent_budget() -> None:
    tree = expanded_tree()
    tree.budget = TreeBudget(roots=1, continuations=2)
    with pytest.raises(InvariantError, match="1 roots spent, the nodes say 2"):
        tree.validate()
    tree._roots_left = -1
    with pytest.raises(InvariantError, match="-1 roots"):
        tree.validate()
