"""Records of a turn tree, and what makes a turn acceptable to it.

Owns `Node`, `Move` and the judgement of one turn's facts. The rules between nodes are `tree.py`'s, the re-derivation of
its counts is `audit.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from trace_async.core.types import ROOT, Failure, GrownBy, NodeState, Score, StopReason, Turn
from trace_async.errors import InvariantError

LOGPROB_SLACK = 1e-4
"""How far above 0 a log-probability may lie, in nats: float32 log-softmax of a sure token rounds to a few 1e-6."""

EPISODE_STOPS = (StopReason.CONTEXT, StopReason.TURN_LIMIT)
"""Stop reasons that belong to an end of the episode only."""


class IllegalMove(InvariantError):
    """A door of a tree was used when it is shut."""


class MoveKind(IntEnum):
    """Which door was used."""

    GRANT = 0
    TURN = 1
    SCORE = 2
    CLOSE = 3
    FAIL = 4


class Move(NamedTuple):
    """One entry of a tree's history."""

    kind: MoveKind
    node_id: int
    detail: str  # what came of it: the budget that paid, the outcome, the predicted success, the error


@dataclass(slots=True, kw_only=True)
class Node:
    """A place in a tree. Readable by everyone, written by its tree only."""

    node_id: int
    parent: int  # node id; -1 for the prompt
    child_number: int  # position among the parent's children
    depth: int  # turns from the prompt; the prompt has 0
    state: NodeState
    grown_by: GrownBy
    rollout: int  # node id of the first turn of the rollout that this node belongs to
    turn: Turn | None = None
    score: Score | None = None
    failure: Failure | None = None
    children: list[int] = field(default_factory=list)
    chain_child: int | None = None  # the child that continues this node's own rollout


def prompt_node() -> Node:
    """The node that every tree starts with."""
    return Node(
        node_id=ROOT,
        parent=-1,
        child_number=0,
        depth=0,
        state=NodeState.EXPANDED,
        grown_by=GrownBy.ROOT,
        rollout=ROOT,
    )


def turn_fault(turn: Turn, *, is_last: bool) -> str | None:
    """What is wrong with a turn's facts, or None. `is_last`: the tree has no room for a turn below it."""
    tokens = turn.action_ids.size
    if tokens == 0 or turn.action_logprobs.size != tokens:
        return f"{tokens} sampled tokens with {turn.action_logprobs.size} log-probabilities"
    # Two reductions see everything: a NaN passes through both and compares false.
    if not (turn.action_logprobs.max() <= LOGPROB_SLACK and turn.action_logprobs.min() > -math.inf):
        return "log-probabilities must be finite and at most 0"
    if not 0 <= turn.kv_version_min <= turn.version_min <= turn.version_max:
        return f"versions kv {turn.kv_version_min} <= min {turn.version_min} <= max {turn.version_max} do not hold"
    if math.isnan(turn.outcome):
        return _going_on_fault(turn, is_last)
    if not math.isfinite(turn.outcome) or not math.isfinite(turn.reward):
        return f"outcome {turn.outcome} and reward {turn.reward} must be finite"
    return f"{turn.observation_ids.size} observation tokens after an end" if turn.observation_ids.size else None


def _going_on_fault(turn: Turn, is_last: bool) -> str | None:
    if turn.stop in EPISODE_STOPS:
        return f"stop {turn.stop.name} ends the episode, so the turn needs an outcome"
    if not math.isfinite(turn.reward):
        return f"reward {turn.reward} must be finite"
    return "it is at the turn limit, so it needs an outcome" if is_last else None
