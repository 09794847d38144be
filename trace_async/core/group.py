"""A finished tree as a `Group`, and how to read one.

Owns the cut from tree to group and the two views that everyone needs: root-to-end paths and token spans. A group holds
facts only, each turn's tokens once. What a group must satisfy is judged at the door by `check_group`. Nothing here
assigns credit, judges ages or changes a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.door import check_group
from trace_async.core.nodes import Node
from trace_async.core.tree import TurnTree
from trace_async.core.types import (
    ByteArray,
    FloatArray,
    Group,
    IntArray,
    Lease,
    NodeState,
    Score,
    StopReason,
    Turn,
)
from trace_async.errors import InvariantError

__all__ = ["TurnSpans", "check_group", "cut_group", "paths", "turn_spans"]

_NAN = float("nan")
_NO_TOKENS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)
_NO_TURN = Turn(
    action_ids=_NO_TOKENS,
    action_logprobs=_NO_LOGPROBS,
    observation_ids=_NO_TOKENS,
    version_min=-1,
    version_max=-1,
    kv_version_min=-1,
    stop=StopReason.ABORT,
    valid=False,
    reward=_NAN,
    outcome=_NAN,
)
"""What a FAILED node puts in its place: no tokens, no versions, no reward (which is not a reward of zero)."""
_NO_SCORE = Score(success=_NAN, predictor_version=-1)


class TurnSpans(NamedTuple):
    """Where each turn's tokens lie; arrays int64 [K]. Actions are `token_ids[start:action_end]`."""

    start: NDArray[np.int64]
    action_end: NDArray[np.int64]
    end: NDArray[np.int64]
    logprob_start: NDArray[np.int64]  # actions' log-probabilities start here, as many as action tokens


def cut_group(tree: TurnTree, *, lease: Lease, actor_id: str, environment: str, epoch: int) -> Group:
    """The group of a complete tree; its id is the lease's. Turn k is node k+1.

    Raises InvariantError when the tree still grows, has an EXPANDED node without children, or is not the lease's.
    """
    _check_cuttable(tree, lease)
    nodes = tree.nodes[1:]
    turns = [node.turn or _NO_TURN for node in nodes]
    scores = [node.score or _NO_SCORE for node in nodes]
    tokens = [ids for turn in turns for ids in (turn.action_ids, turn.observation_ids)]
    return Group(
        group_id=lease.lease_id,
        lease_id=lease.lease_id,
        actor_id=actor_id,
        epoch=epoch,
        prompt_id=tree.prompt_id,
        environment=environment,
        budget=tree.budget,
        root_score=lease.root_score,
        success_above=tree.success_above,
        prompt_ids=_ints(tree.prompt_ids),
        parent=_ints(node.parent - 1 for node in nodes),
        action_lengths=_ints(turn.action_ids.size for turn in turns),
        observation_lengths=_ints(turn.observation_ids.size for turn in turns),
        token_ids=_ints(np.concatenate(tokens)),
        logprobs=_floats(np.concatenate([turn.action_logprobs for turn in turns])),
        version_min=_ints(turn.version_min for turn in turns),
        version_max=_ints(turn.version_max for turn in turns),
        kv_version_min=_ints(turn.kv_version_min for turn in turns),
        score=_floats(score.success for score in scores),
        score_version=_ints(score.predictor_version for score in scores),
        reward=_floats(turn.reward for turn in turns),
        outcome=_floats(turn.outcome for turn in turns),
        process_score=_floats(turn.process_score for turn in turns),
        state=_bytes(node.state for node in nodes),
        grown_by=_bytes(node.grown_by for node in nodes),
        stop=_bytes(turn.stop for turn in turns),
        valid=_bytes(turn.valid for turn in turns),
        generate_s=_floats(turn.generate_s for turn in turns),
        environment_s=_floats(turn.environment_s for turn in turns),
        failures=tuple(node.failure for node in nodes if node.failure is not None),
    )


def paths(group: Group) -> list[tuple[int, ...]]:
    """Turn indices of every path from a first turn to an end (LEAF, CLOSED or FAILED), in order of the ends."""
    above: list[tuple[int, ...]] = []
    for turn, parent in enumerate(group.parent.tolist()):
        above.append((*(above[parent] if parent >= 0 else ()), turn))
    return [path for path, state in zip(above, group.state.tolist(), strict=True) if state != NodeState.EXPANDED]


def turn_spans(group: Group) -> TurnSpans:
    """Spans of every turn in `token_ids` and `logprobs`."""
    actions = group.action_lengths.astype(np.int64)
    lengths = actions + group.observation_lengths
    end = np.cumsum(lengths)
    start = end - lengths
    return TurnSpans(start, start + actions, end, np.cumsum(actions) - actions)


def _check_cuttable(tree: TurnTree, lease: Lease) -> None:
    if (tree.prompt_id, tree.budget) != (lease.prompt_id, lease.budget):
        raise InvariantError(
            f"tree {tree.tree_id} of prompt {tree.prompt_id} with {tree.budget} is not of lease {lease.lease_id}: "
            f"prompt {lease.prompt_id} with {lease.budget}"
        )
    tree.validate()
    unfinished = [node.node_id for node in tree.nodes[1:] if _is_unfinished(node)]
    if unfinished or len(tree.nodes) == 1:
        raise InvariantError(
            f"tree {tree.tree_id}: nodes {unfinished} of {len(tree.nodes) - 1} are not finished; "
            "record, score or fail what grows, and close EXPANDED nodes that get no children"
        )


def _is_unfinished(node: Node) -> bool:
    if node.state is NodeState.EXPANDED:
        return not node.children
    return node.state in (NodeState.GROWING, NodeState.UNSCORED)


def _ints(values: Iterable[int]) -> IntArray:
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)
    array.setflags(write=False)
    return array


def _floats(values: Iterable[float]) -> FloatArray:
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)
    array.setflags(write=False)
    return array


def _bytes(values: Iterable[int]) -> ByteArray:
    array = np.array(list(values), dtype=np.uint8)
    array.setflags(write=False)
    return array
