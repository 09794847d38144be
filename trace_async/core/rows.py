"""Which rows of tokens train a group, and which turn is trained in which row.

Owns the ownership rule. A turn is trainable when its verdict allows loss, its mass is positive and it carries the
signal that the objective trains on. A turn is scored, which means its log-probabilities are computed, when it is
trainable, or was played in a tree that an objective wants whole. One row per scored turn with no scored turn below it
("tip"): the path from the prompt to the end of the tip's action. A row owns the scored turns on its path that no
earlier row owns. So every scored turn is owned exactly once, no row owns nothing, no row goes on after its last owned
token, and no smaller number of rows would do. It builds no rows of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import ByteArray, Group, IntArray, TurnCredit, Verdict
from trace_async.errors import InvariantError


class Signal(Enum):
    """Which turns an objective trains, among those that their verdict allows."""

    ADVANTAGE = "advantage"  # the turn's advantage is not 0
    LEAVES = "leaves"  # some leaf below has an advantage that is not 0, even where they cancel
    MASS = "mass"  # an outcome is below and the group is not flat: the objective makes its own comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """One group with the learner's opinion of it; arrays [K]."""

    group: Group
    credit: TurnCredit
    verdicts: ByteArray  # Verdict
    ages: IntArray  # training steps; -1 for a FAILED node
    signal: Signal = Signal.ADVANTAGE
    whole_tree: bool = False  # score every turn that was played, if any is trained


class Row(NamedTuple):
    """One path to train: where it comes from and what it trains."""

    item: int  # index into the items
    path: tuple[int, ...]  # turn indices from the first turn to the tip; the tip's observation is left out
    owned: tuple[int, ...]  # turns of the path that are trained here, in order
    length: int  # tokens: prompt, turns above the tip, the tip's action


def plan_rows(item: PackItem, index: int) -> list[Row]:
    """The rows of `item`, in order of their tips; `index` is its place among the items."""
    parent = item.group.parent.tolist()
    scored = scored_turns(item)
    return _own(item, index, [_path_to(parent, tip) for tip in _tips(parent, scored)], scored)


def plan_rows_depth_first(item: PackItem, index: int) -> list[Row]:
    """The same rows by tips in depth-first order: of several children, the one with the longest path below goes first.

    So rows that share much stand next to each other, and the first one is the longest.
    """
    parent = item.group.parent.tolist()
    scored = scored_turns(item)
    paths = [_path_to(parent, tip) for tip in _tips(parent, scored)]
    longest = np.zeros(len(parent), np.int64)  # of the paths through a turn
    for path in map(list, paths):
        above = item.group.observation_lengths[path[:-1]].sum()
        longest[path] = np.maximum(longest[path], above + item.group.action_lengths[path].sum())
    paths.sort(key=lambda path: [(-longest[turn], turn) for turn in path])
    return _own(item, index, paths, scored)


def _own(item: PackItem, index: int, paths: list[tuple[int, ...]], scored: NDArray[np.bool_]) -> list[Row]:
    group = item.group
    lengths = (group.action_lengths + group.observation_lengths).tolist()
    owned = [False] * group.num_turns
    rows = []
    for path in paths:
        new = tuple(turn for turn in path if scored[turn] and not owned[turn])
        for turn in new:
            owned[turn] = True
        above = sum(lengths[turn] for turn in path[:-1])
        rows.append(Row(index, path, new, group.prompt_ids.size + above + int(group.action_lengths[path[-1]])))
    return rows


def scored_turns(item: PackItem) -> NDArray[np.bool_]:
    """Turns whose log-probabilities are computed, bool [K]; raises as `trainable_turns`."""
    trainable = trainable_turns(item)
    if item.whole_tree and trainable.any():
        return np.asarray(item.group.action_lengths > 0)
    return trainable


def trainable_turns(item: PackItem) -> NDArray[np.bool_]:
    """Turns that carry loss, bool [K]; raises InvariantError where credit is not finite or does not fit the group."""
    group, credit = item.group, item.credit
    for opinion in (credit.advantage, credit.mass, item.verdicts, item.ages):
        if opinion.shape != (group.num_turns,):
            raise InvariantError(
                f"group {group.group_id}: advantage {credit.advantage.shape}, mass {credit.mass.shape}, verdicts "
                f"{item.verdicts.shape} and ages {item.ages.shape} must all have {group.num_turns} entries"
            )
    broken = ~np.isfinite(credit.advantage) | ~np.isfinite(credit.mass) | (credit.mass < 0)
    if broken.any():
        turn = int(np.flatnonzero(broken)[0])
        raise InvariantError(
            f"group {group.group_id} turn {turn}: advantage {credit.advantage[turn]}, mass {credit.mass[turn]}"
        )
    allowed: NDArray[np.bool_] = (item.verdicts != Verdict.CONTEXT) & (credit.mass > 0) & (group.action_lengths > 0)
    return allowed & carries_signal(item)


def carries_signal(item: PackItem) -> NDArray[np.bool_]:
    """Turns that the objective has a reason to train, whatever their age, bool [K]."""
    credit = item.credit
    if item.signal is Signal.ADVANTAGE:
        return np.asarray((credit.advantage != 0) & (credit.mass > 0))
    above, below = leaf_parts(item)
    mixed = (above != 0) | (below != 0)
    if item.signal is Signal.LEAVES:
        return np.asarray(mixed & (credit.mass > 0))
    return np.asarray((credit.mass > 0) & mixed.any())


def leaf_parts(item: PackItem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each turn's mean over the leaves below it of max(A, 0) and of min(A, 0), [K]; weights are the leaves' masses.

    Without leaf advantages the turn's own advantage is all there is, and is split by its sign.
    """
    own, mass = item.credit.leaf_advantage, item.credit.mass.astype(np.float64)
    if own is None:
        advantage = item.credit.advantage.astype(np.float64)
        return np.maximum(advantage, 0.0), np.minimum(advantage, 0.0)
    known = np.where(np.isnan(own), 0.0, own).astype(np.float64) * mass
    sums = np.stack([np.maximum(known, 0.0), np.minimum(known, 0.0)])
    for turn in range(item.group.num_turns - 1, -1, -1):
        if (parent := int(item.group.parent[turn])) >= 0:
            sums[:, parent] += sums[:, turn]
    means = np.divide(sums, mass, out=np.zeros_like(sums), where=mass > 0)
    return means[0], means[1]


def _tips(parent: list[int], trainable: NDArray[np.bool_]) -> list[int]:
    covered = [False] * len(parent)  # a trainable turn lies below
    for turn in range(len(parent) - 1, -1, -1):
        if parent[turn] >= 0 and (trainable[turn] or covered[turn]):
            covered[parent[turn]] = True
    return [turn for turn in np.flatnonzero(trainable).tolist() if not covered[turn]]


def _path_to(parent: list[int], turn: int) -> tuple[int, ...]:
    path = []
    while turn >= 0:
        path.append(turn)
        turn = parent[turn]
    return tuple(reversed(path))
