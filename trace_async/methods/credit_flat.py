"""Credit of independent rows: every leaf is one sample of a group, wherever in the tree it was grown.

What a trainer of rows computes. Biased wherever the number of leaves below a place depends on the place, since expanded
places weigh more; the shared part of a path is also pulled towards zero, since a leaf is compared with leaves that
share it. Pure.
"""

from __future__ import annotations

import numpy as np

from trace_async.core.types import Group, TurnCredit
from trace_async.methods.credit_parts import STD_FLOOR, fold_leaves, outcomes_of


def flat_credit(group: Group, *, normalise: bool = False) -> TurnCredit:
    """Leaf advantage = outcome - mean outcome of all leaves.

    `normalise` divides by the (n - 1) standard deviation over leaves, as GRPO (arXiv 2402.03300) does. ARPO (arXiv
    2507.19849) is the same rule on trees: its soft form trains duplicated rows, its hard form gives a shared prefix the
    mean of its branches' advantages, and both fold into one and the same number per turn.
    """
    outcomes = outcomes_of(group)
    leaves = outcomes.centred[outcomes.is_leaf]
    if leaves.size == 0:
        return fold_leaves(group, outcomes, outcomes.centred)
    advantage = outcomes.centred - leaves.mean()
    if normalise and leaves.size >= 2:
        advantage = advantage / (leaves.std(ddof=1) + STD_FLOOR)
    return fold_leaves(group, outcomes, advantage)


def rloo_credit(group: Group) -> TurnCredit:
    """Leaf advantage = outcome - mean outcome of all other leaves (RLOO, arXiv 2402.14740): flat x n / (n - 1).

    Unbiased on chains, where a leaf's baseline does not contain its own outcome. 0 with a single leaf.
    """
    outcomes = outcomes_of(group)
    leaves = outcomes.centred[outcomes.is_leaf]
    if leaves.size < 2:
        return fold_leaves(group, outcomes, np.zeros(group.num_turns))
    return fold_leaves(group, outcomes, (outcomes.centred - leaves.mean()) * (leaves.size / (leaves.size - 1)))
