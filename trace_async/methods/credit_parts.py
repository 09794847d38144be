"""What every credit rule is made of: outcomes, sums over subtrees, masses, and how a result becomes a `TurnCredit`.

Owns the two ways to spread a prompt's signal over a tree. Leaf rows: the flattened tree, every leaf one row of equal
weight (`fold_leaves`). Hierarchy: every fork shares its parent's mass equally among its children (`hierarchy`). Both
keep the invariants of `credit.py`. Pure, and with no opinion about baselines. Legend: K turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import Group, GrownBy, NodeState, TurnCredit

CreditRule: TypeAlias = Callable[[Group], TurnCredit]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]

PROMPT = -1
"""The parent of first turns. Arrays with K + 1 entries keep the prompt's own in the last place, which -1 names too."""

ROUNDING = 1e-9
"""Advantages below this share of a group's largest are rounding of equal means, and become exactly 0."""

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing, as in the code of GRPO and Tree-GRPO."""


class Outcomes(NamedTuple):
    """Outcomes less their minimum, so that means of equal outcomes are means of exact zeros."""

    centred: Floats  # [K] NaN where a turn is no LEAF
    low: float  # that minimum; 0 without any leaf
    spread: float  # largest minus smallest; 0 without any leaf

    @property
    def is_leaf(self) -> Bools:
        """Turns with an outcome, [K]."""
        return ~np.isnan(self.centred)


class Hierarchy(NamedTuple):
    """A tree whose forks share equally. A draw is a turn sampled from its parent's prefix: any but SELECTED ones."""

    value: Floats  # [K] centred outcome of a leaf, else the mean of the children that count; NaN with no leaf below
    sums: Floats  # [K + 1] summed value of the children that count: draws with a value
    num_children: Counts  # [K + 1] how many those are
    mass: Floats  # [K] product of 1/children along the path; 0 for SELECTED turns and what lies below them


def outcomes_of(group: Group) -> Outcomes:
    """The group's outcomes, centred."""
    is_leaf = group.state == NodeState.LEAF
    outcome = np.where(is_leaf, group.outcome.astype(np.float64), np.nan)
    if not is_leaf.any():
        return Outcomes(outcome, 0.0, 0.0)
    low = float(outcome[is_leaf].min())
    return Outcomes(outcome - low, low, float(outcome[is_leaf].max()) - low)


def hierarchy(group: Group, outcomes: Outcomes) -> Hierarchy:
    """Values from the leaves up, masses from the prompt down."""
    is_draw = group.grown_by != GrownBy.SELECTED
    parents = group.parent.tolist()
    value = outcomes.centred.copy()
    sums, num_children = np.zeros(group.num_turns + 1), np.zeros(group.num_turns + 1, np.int64)
    for turn in reversed(range(group.num_turns)):
        if num_children[turn] > 0:
            value[turn] = sums[turn] / num_children[turn]
        if is_draw[turn] and not np.isnan(value[turn]):
            sums[parents[turn]] += value[turn]
            num_children[parents[turn]] += 1
    mass = np.zeros(group.num_turns + 1)
    mass[PROMPT] = 1.0
    for turn, parent in enumerate(parents):
        if is_draw[turn] and not np.isnan(value[turn]):
            mass[turn] = mass[parent] / num_children[parent]
    return Hierarchy(value, sums, num_children, mass[:PROMPT])


def fold_leaves(group: Group, outcomes: Outcomes, leaf_advantage: Floats) -> TurnCredit:
    """Credit of the flattened tree: one row per leaf, equal weights, `leaf_advantage` [K] read at the leaves.

    A turn stands in the row of every leaf below it. By linearity it trains once, with the mean of their advantages and
    their summed weight: advantage = mean over leaves below, mass = share of the leaves, value = mean outcome of them.
    """
    is_leaf = outcomes.is_leaf
    num_below = sum_below(group, is_leaf.astype(np.float64))[:PROMPT]
    own = np.where(is_leaf, leaf_advantage, 0.0)
    total = np.where(is_leaf, outcomes.centred, 0.0)
    some = num_below > 0
    value = np.divide(sum_below(group, total)[:PROMPT], num_below, out=np.full(group.num_turns, np.nan), where=some)
    advantage = np.divide(sum_below(group, own)[:PROMPT], num_below, out=np.zeros(group.num_turns), where=some)
    scale = float(np.abs(own).max(initial=0.0))
    credit = turn_credit(value + outcomes.low, exact_zeros(advantage, scale), num_below / max(int(is_leaf.sum()), 1))
    own_or_nan = np.where(is_leaf, exact_zeros(leaf_advantage, scale), np.nan).astype(np.float32)
    return replace(credit, leaf_advantage=own_or_nan)


def sum_below(group: Group, own: Floats) -> Floats:
    """Sum of `own` [K] over each turn and everything below it, and over all turns, [K + 1]."""
    total = np.append(own, 0.0)
    for turn in reversed(range(group.num_turns)):
        total[group.parent[turn]] += total[turn]
    return total


def exact_zeros(advantage: Floats, scale: float) -> Floats:
    """`advantage` with what is only rounding, next to numbers of size `scale`, set to 0."""
    return np.where(np.abs(advantage) <= ROUNDING * scale, 0.0, advantage)


def turn_credit(value: Floats, advantage: Floats, mass: Floats) -> TurnCredit:
    """The record, in float32."""
    return TurnCredit(
        value=value.astype(np.float32), advantage=advantage.astype(np.float32), mass=mass.astype(np.float32)
    )
