"""A group is its tree: same links, same tokens, same facts, each once."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import (
    chain_group,
    cut,
    failure_of,
    grant,
    group_from_spec,
    make_lease,
    make_tree,
    make_turn,
    random_tree,
    spec,
)
from tests.oracles import context_of, tree_paths, turn_tokens
from trace_async.core.group import check_group, paths, turn_spans
from trace_async.core.types import ROOT, SUCCESS_ABOVE, GrownBy, NodeState, Score, TreeBudget
from trace_async.errors import InvariantError

SEEDS = st.integers(min_value=0, max_value=2**32)


@given(SEEDS)
def test_a_group_holds_every_fact_of_its_tree_once(seed: int) -> None:
    lease = make_lease(roots=3, continuations=4)
    tree = random_tree(np.random.default_rng(seed), lease)
    group = cut(tree, lease)
    check_group(group)
    assert group.num_turns == len(tree.nodes) - 1
    assert {tuple(turn + 1 for turn in path) for path in paths(group)} == tree_paths(tree)
    for node in tree.nodes[1:]:
        turn = node.node_id - 1
        tokens = turn_tokens(group, turn)
        assert (group.parent[turn], group.state[turn], group.grown_by[turn]) == (
            node.parent - 1,
            node.state,
            node.grown_by,
        )
        assert context_of(group, turn) == tuple(tree.prefix_ids(node.parent).tolist())
        if node.turn is None:
            assert node.state is NodeState.FAILED
            assert tokens == ((), (), ())
            assert math.isnan(group.reward[turn])
            continue
        assert tokens.action == tuple(node.turn.action_ids.tolist())
        assert tokens.observation == tuple(node.turn.observation_ids.tolist())
        assert tokens.logprobs == tuple(node.turn.action_logprobs.tolist())
        assert (group.version_min[turn], group.version_max[turn]) == (node.turn.version_min, node.turn.version_max)
        assert np.array_equal(group.outcome[turn], np.float32(node.turn.outcome), equal_nan=True)
        if node.score is not None:
            assert group.score[turn] == np.float32(node.score.success)
            assert group.score_version[turn] == node.score.predictor_version
    assert group.num_sampled_tokens == sum(node.turn.action_ids.size for node in tree.nodes if node.turn)
    assert [failure.node_id for failure in group.failures] == [n.node_id for n in tree.nodes if n.failure]


def test_a_group_keeps_what_counted_as_a_success_in_its_tree() -> None:
    lease = make_lease(roots=1)
    tree = make_tree(lease, success_above=-0.25)
    (node,) = grant(tree, ROOT, GrownBy.ROOT)
    tree.record_turn(node, make_turn(outcome=0.0))
    assert cut(tree, lease).success_above == -0.25
    assert chain_group().success_above == SUCCESS_ABOVE == 0.5


@given(SEEDS)
def test_spans_tile_the_tokens_and_the_log_probabilities(seed: int) -> None:
    lease = make_lease(roots=3, continuations=4)
    group = cut(random_tree(np.random.default_rng(seed), lease), lease)
    spans = turn_spans(group)
    for turn in range(group.num_turns):
        tokens = turn_tokens(group, turn)
        start, action_end, end, first = (int(column[turn]) for column in spans)
        assert tuple(group.token_ids[start:action_end].tolist()) == tokens.action
        assert tuple(group.token_ids[action_end:end].tolist()) == tokens.observation
        assert tuple(group.logprobs[first : first + action_end - start].tolist()) == tokens.logprobs


def test_a_worked_tree_has_the_paths_written_down_for_it() -> None:
    group = group_from_spec([spec(spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(failed=True)), spec())])
    assert paths(group) == [(0, 1, 2), (0, 1, 3), (0, 4, 5), (0, 6)]
    assert [NodeState(state).name for state in group.state] == [
        "EXPANDED",
        "EXPANDED",
        "LEAF",
        "LEAF",
        "EXPANDED",
        "FAILED",
        "CLOSED",
    ]
    assert group.action_lengths.tolist() == [2, 2, 2, 2, 2, 0, 2]
    assert group.observation_lengths.tolist() == [1, 1, 0, 0, 1, 0, 1]
    assert group.failures == (failure_of(6),)


def test_a_chain_group_is_independent_chains() -> None:
    group = chain_group((1.0, 0.0, 0.5), turns=3)
    assert paths(group) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert group.budget == TreeBudget(roots=3, continuations=0)


def test_the_arrays_of_a_group_are_read_only() -> None:
    group = chain_group()
    arrays = [getattr(group, field.name) for field in dataclasses.fields(group)]
    assert not any(array.flags.writeable for array in arrays if isinstance(array, np.ndarray))


def test_a_tree_that_still_grows_is_not_cut() -> None:
    lease = make_lease(roots=2)
    tree = make_tree(lease)
    with pytest.raises(InvariantError, match=r"lease-0: nodes \[\] of 0"):
        cut(tree, lease)
    grant(tree, ROOT, GrownBy.ROOT, 2)
    tree.record_turn(1, make_turn(outcome=1.0))
    tree.record_turn(2, make_turn())
    with pytest.raises(InvariantError, match=r"nodes \[2\] of 2 are not finished"):
        cut(tree, lease)
    tree.record_score(2, Score(success=0.5, predictor_version=0))
    with pytest.raises(InvariantError, match=r"nodes \[2\] of 2 are not finished.*close"):
        cut(tree, lease)
    tree.close(2)
    assert cut(tree, lease).num_turns == 2


def test_a_tree_is_not_cut_for_another_lease() -> None:
    tree = make_tree(make_lease(prompt_id="prompt-1"))
    with pytest.raises(InvariantError, match=r"prompt-1 .* is not of lease lease-7: prompt prompt-2"):
        cut(tree, make_lease(lease_id="lease-7", prompt_id="prompt-2"))
