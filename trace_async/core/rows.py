"""Which rows of tokens train a group, and which turn is trained in which row.

Owns the ownership rule. A turn is trainable when its verdict allows loss, its advantage is not 0 and its mass is
positive. One row per trainable turn with no trainable turn below it ("tip"): the path from the prompt to the end of
the tip's action. A row owns the trainable turns on its path that no earlier row owns. So every trainable turn is owned
exactly once, no row owns nothing, no row goes on after its last owned token, and no smaller number of rows would do.
It builds no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import ByteArray, Group, IntArray, TurnCredit, Verdict
from trace_async.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """One group with the learner's opinion of it; arrays [K]."""

    group: Group
    credit: TurnCredit
    verdicts: ByteArray  # Verdict
    ages: IntArray  # optimizer steps; -1 for a FAILED node


class Row(NamedTuple):
    """One path to train: where it comes from and what it trains."""

    item: int  # index into the items
    path: tuple[int, ...]  # turn indices from the first turn to the tip; the tip's observation is left out
    owned: tuple[int, ...]  # turns of the path that are trained here, in order
    length: int  # tokens: prompt, turns above the tip, the tip's action


def plan_rows(item: PackItem, index: int) -> list[Row]:
    """The rows of `item`, in order of their tips; `index` is its place among the items."""
    group = item.group
    trainable = trainable_turns(item)
    parent = group.parent.tolist()
    lengths = (group.action_lengths + group.observation_lengths).tolist()
    owned = [False] * group.num_turns
    rows = []
    for tip in _tips(parent, trainable):
        path = _path_to(parent, tip)
        new = tuple(turn for turn in path if trainable[turn] and not owned[turn])
        for turn in new:
            owned[turn] = True
        above = sum(lengths[turn] for turn in path[:-1])
        rows.append(Row(index, path, new, group.prompt_ids.size + above + int(group.action_lengths[tip])))
    return rows


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
    trainable: NDArray[np.bool_] = (credit.advantage != 0) & (credit.mass > 0) & (group.action_lengths > 0)
    trainable &= item.verdicts != Verdict.CONTEXT
    return trainable


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
