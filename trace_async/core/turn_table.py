"""All turns of one optimizer update, flat: what an objective reads beside log-probabilities of the trained policy.

Owns the order of turns and of their sampled tokens: groups as given, turns in the group's order, tokens as in
`Group.logprobs`. Every turn of every kept group has a place, trained or not, so trees stay whole and parents come
first. Rows of a forward pass name tokens by their place here, so nothing about a turn is stored twice. Pure; judges
and credits nothing.

Axes: G groups · J turns · N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_async.core.rows import PackItem, leaf_parts, scored_turns, trainable_turns
from trace_async.core.types import ByteArray, FloatArray, Group, GrownBy, IntArray, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTable:
    """Turns of some groups with the learner's opinion of them."""

    behaviour_logprobs: FloatArray  # [N] nats as sampled
    turn: IntArray  # [N] which turn a token belongs to
    group: IntArray  # [J]
    parent: IntArray  # [J] the turn above; -1 for first turns
    tokens: IntArray  # [J] sampled tokens; 0 for a FAILED node
    depth: IntArray  # [J] turns from the prompt; a first turn has 1
    trained: NDArray[np.bool_]  # [J] carries loss
    scored: NDArray[np.bool_]  # [J] its log-probabilities are computed: trained ones, or all that were played
    advantage: FloatArray  # [J]
    positive: FloatArray  # [J] the part of the advantage that comes from leaves (or the turn itself) above zero
    negative: FloatArray  # [J] the part from below zero; positive + negative = advantage
    mass: FloatArray  # [J]
    value: FloatArray  # [J] mean outcome below; NaN where no leaf is below
    leaf_advantage: FloatArray  # [J] of a leaf, where the credit rule has such; NaN elsewhere
    outcome: FloatArray  # [J] of a leaf; NaN elsewhere
    belief: FloatArray  # [J] success predicted for the turn's prefix before anything below was sampled; NaN unknown
    drawn: NDArray[np.bool_]  # [J] sampled i.i.d. from its prefix: not FAILED, not SELECTED
    age: IntArray  # [J] training steps; -1 for a FAILED node
    verdict: ByteArray  # [J] Verdict
    root_belief: FloatArray  # [G] success predicted for the prompt; NaN unknown
    token_start: NDArray[np.int64]  # [J] where the turn's tokens start in [N]

    @property
    def num_turns(self) -> int:
        """J."""
        return int(self.group.size)


def make_table(items: Sequence[PackItem]) -> TurnTable:
    """The table of these items, all of their turns."""
    groups = [item.group for item in items]
    first_turn = np.cumsum([0, *(group.num_turns for group in groups)])
    lengths = _join([group.action_lengths for group in groups], np.int32)
    parents = [
        np.where(group.parent >= 0, group.parent + first, -1)
        for group, first in zip(groups, first_turn[:-1], strict=True)
    ]
    advantage = _join([item.credit.advantage for item in items], np.float32)
    parts = [leaf_parts(item) for item in items]
    return TurnTable(
        behaviour_logprobs=_join([group.logprobs for group in groups], np.float32),
        turn=np.repeat(np.arange(lengths.size, dtype=np.int32), lengths),
        group=np.repeat(np.arange(len(groups), dtype=np.int32), [group.num_turns for group in groups]),
        parent=_join(parents, np.int32),
        tokens=lengths,
        depth=_join([_depths(group) for group in groups], np.int32),
        trained=_join([trainable_turns(item) for item in items], np.bool_),
        scored=_join([scored_turns(item) for item in items], np.bool_),
        advantage=advantage,
        positive=_join([above for above, _ in parts], np.float32),
        negative=_join([below for _, below in parts], np.float32),
        mass=_join([item.credit.mass for item in items], np.float32),
        value=_join([item.credit.value for item in items], np.float32),
        leaf_advantage=_join([_leaf_advantage(item) for item in items], np.float32),
        outcome=_join([group.outcome for group in groups], np.float32),
        belief=_join([group.score for group in groups], np.float32),
        drawn=_join(
            [(group.state != NodeState.FAILED) & (group.grown_by != GrownBy.SELECTED) for group in groups], np.bool_
        ),
        age=_join([item.ages for item in items], np.int32),
        verdict=_join([item.verdicts for item in items], np.uint8),
        root_belief=np.array([group.root_score.success for group in groups], np.float32),
        token_start=np.cumsum(lengths, dtype=np.int64) - lengths,
    )


def _leaf_advantage(item: PackItem) -> FloatArray:
    own = item.credit.leaf_advantage
    return np.full(item.group.num_turns, np.nan, np.float32) if own is None else own


def _depths(group: Group) -> IntArray:
    depths: list[int] = []
    for parent in group.parent.tolist():
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return np.array(depths, np.int32)


def _join(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
