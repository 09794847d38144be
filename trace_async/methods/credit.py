"""Credit of each turn of a finished tree: its value, its advantage, and the share of the signal it carries.

    sibling   leave-one-out among siblings, weights that split at each fork: unbiased under adaptive branching
    flat      every leaf is one sample of a group: what a trainer of independent rows computes (GRPO)

Pure; reads facts of the group only, never a policy version. Invariants of every rule: equal outcomes give advantages of
exactly 0; masses of turns at the prompt sum to 1 and masses of children to their parent's, over the turns that have an
outcome below; a turn without one (FAILED and CLOSED ends, and whatever has only such ends below) has value NaN,
advantage 0 and mass 0. Arithmetic is float64, results are float32. Legend: K turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import Group, GrownBy, NodeState, TurnCredit
from trace_async.methods.registry import pick

CreditRule: TypeAlias = Callable[[Group], TurnCredit]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]

PROMPT = -1
"""The parent of first turns. Arrays with K + 1 entries keep the prompt's own in the last place, which -1 names too."""

ROUNDING = 1e-9
"""Advantages below this share of the spread of a group's outcomes are rounding of equal means, and become exactly 0."""

STD_FLOOR = 1e-6
"""Added to the standard deviation, as in the GRPO code."""


def sibling_credit(group: Group) -> TurnCredit:
    """Advantage = value minus the mean value of the siblings; mass = product of 1/children along the path.

    value V(n) = outcome at a leaf, else the mean of V over children. A turn with at least one sibling is compared with
    its siblings' mean (leave-one-out). A turn without any takes the baseline of its nearest ancestor that has one; its
    value equals that ancestor's, so the whole stretch shares one advantage. Without such an ancestor the advantage is
    0: nothing independent of the turn's own outcome is known.

    The mass makes the sum over turns of mass x advantage x grad log p an unbiased policy gradient for every branching
    rule that looks only at what is known before the children are sampled, since children are i.i.d. given their prefix
    and each is one draw, however many leaves lie below it. TRACE looks at one thing more, the outcome of the bare
    rollout through an anchor, when it counts that anchor's continuations; that pulls the anchor's value towards the
    outcome that earned it fewer of them, a bias of size, in trials on a two-turn problem never one of sign.
    SELECTED children are no draws at all: they stay out of their parent's mean and carry no mass.
    """
    outcome, low, spread = _centred_outcomes(group)
    is_draw = group.grown_by != GrownBy.SELECTED
    value, sums, num_children = _child_means(group, outcome, is_draw)
    baseline = np.full(group.num_turns + 1, np.nan)
    mass = np.zeros(group.num_turns + 1)
    mass[PROMPT] = 1.0
    for turn, parent in enumerate(group.parent.tolist()):
        if not is_draw[turn] or np.isnan(value[turn]):
            continue
        siblings = num_children[parent]  # the turn itself included
        mass[turn] = mass[parent] / siblings
        if siblings >= 2:
            baseline[turn] = (sums[parent] - value[turn]) / (siblings - 1)
        else:
            baseline[turn] = baseline[parent]
    advantage = np.nan_to_num(value - baseline[:PROMPT], nan=0.0)  # no baseline, or nothing below: no opinion
    return _credit(value + low, _exact_zeros(advantage, spread), mass[:PROMPT])


def flat_credit(group: Group, *, normalise: bool = False) -> TurnCredit:
    """Advantage = mean over leaves below of (outcome - mean outcome of all leaves); mass = share of leaves below.

    The flattened tree: each leaf is a row with equal weight and a shared turn stands in every row that passes through
    it; by linearity it trains once with the mean advantage and the summed weight. `normalise` divides by the (n - 1)
    standard deviation over leaves, as GRPO (arXiv 2402.03300) does. Biased where branching depends on the prefix:
    expanded places weigh more.
    """
    outcome, low, spread = _centred_outcomes(group)
    is_leaf = ~np.isnan(outcome)
    if not is_leaf.any():
        nothing = np.zeros(group.num_turns)
        return _credit(nothing + np.nan, nothing, nothing)
    num_below = _sum_below(group, is_leaf.astype(np.float64))
    total = _sum_below(group, np.where(is_leaf, outcome, 0.0))
    value = np.divide(total, num_below, out=np.full(group.num_turns, np.nan), where=num_below > 0)
    advantage = _exact_zeros(np.where(num_below > 0, value - outcome[is_leaf].mean(), 0.0), spread)
    if normalise and is_leaf.sum() >= 2:
        advantage = advantage / (outcome[is_leaf].std(ddof=1) + STD_FLOOR)
    return _credit(value + low, advantage, num_below / is_leaf.sum())


CREDITS: dict[str, CreditRule] = {
    "sibling": sibling_credit,
    "flat": flat_credit,
    "flat_normalised": partial(flat_credit, normalise=True),
}


def credit_rule(name: str) -> CreditRule:
    """The rule that `learner.credit` names; raises ConfigError for an unknown name."""
    return pick(CREDITS, name, where="learner.credit")


def _centred_outcomes(group: Group) -> tuple[Floats, float, float]:
    """Outcomes less their minimum (NaN where there is none), that minimum, and their spread.

    Means of equal outcomes are then means of exact zeros.
    """
    is_leaf = group.state == NodeState.LEAF
    outcome = np.where(is_leaf, group.outcome.astype(np.float64), np.nan)
    if not is_leaf.any():
        return outcome, 0.0, 0.0
    low = float(outcome[is_leaf].min())
    return outcome - low, low, float(outcome[is_leaf].max()) - low


def _child_means(group: Group, outcome: Floats, is_draw: Bools) -> tuple[Floats, Floats, Counts]:
    """Value [K] of each turn; and, for each turn and the prompt [K + 1], sum and number of the children that count."""
    value = outcome.copy()
    sums, num_children = np.zeros(group.num_turns + 1), np.zeros(group.num_turns + 1, np.int64)
    for turn in reversed(range(group.num_turns)):
        if num_children[turn] > 0:
            value[turn] = sums[turn] / num_children[turn]
        if is_draw[turn] and not np.isnan(value[turn]):
            sums[group.parent[turn]] += value[turn]
            num_children[group.parent[turn]] += 1
    return value, sums, num_children


def _sum_below(group: Group, own: Floats) -> Floats:
    """Sum of `own` over each turn and everything below it, [K]."""
    total = np.append(own, 0.0)
    for turn in reversed(range(group.num_turns)):
        total[group.parent[turn]] += total[turn]
    return total[:PROMPT]


def _exact_zeros(advantage: Floats, spread: float) -> Floats:
    return np.where(np.abs(advantage) <= ROUNDING * spread, 0.0, advantage)


def _credit(value: Floats, advantage: Floats, mass: Floats) -> TurnCredit:
    return TurnCredit(
        value=value.astype(np.float32), advantage=advantage.astype(np.float32), mass=mass.astype(np.float32)
    )
