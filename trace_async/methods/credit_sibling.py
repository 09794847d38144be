"""Credit by comparison with siblings: every fork is a group of its own, and shares its parent's mass.

Pure. Derived here: the leave-one-out baseline of RLOO (arXiv 2402.14740), applied at every fork of a tree.
"""

from __future__ import annotations

import numpy as np

from trace_async.core.types import Group, TurnCredit
from trace_async.methods.credit_parts import exact_zeros, hierarchy, outcomes_of, turn_credit

PRIOR_SIBLINGS = 2.0
"""As how many siblings the parent's baseline counts in `sibling_shrunk`. Measured (docs/credit.md): noise is nearly the
same from 1 to 4, and 19 to 28 % below that of 0 where anchors have one continuation each."""


def sibling_credit(group: Group, *, prior_siblings: float = 0.0) -> TurnCredit:
    """Advantage = value minus a baseline from the siblings; mass = product of 1/children along the path.

    value V(n) = outcome at a leaf, else the mean of V over children. The baseline of a turn is the mean value of its
    siblings (leave-one-out), in which the baseline of its parent counts as `prior_siblings` more of them: a single
    sibling's outcome is a noisy guess of what their common prefix is worth, and what the turns above were compared with
    is a steadier one. A turn without siblings takes its parent's baseline as it is; its value equals its parent's, so
    the whole stretch shares one advantage. With nothing to compare at all the advantage is 0.

    The mass makes the sum over turns of mass x advantage x grad log p an unbiased policy gradient for every branching
    rule that looks only at what is known before the children are sampled: children are i.i.d. given their prefix, each
    is one draw however many leaves lie below it, and no baseline contains anything sampled below the turn. TRACE looks
    at more, the outcome of the bare rollout through an anchor, when it counts that anchor's continuations; that moves
    the values of anchors and with them the credit of the turns above (docs/credit.md has the sizes; `split` is safe
    there). SELECTED children are no draws: they stay out of their parent's mean and carry no mass.
    """
    outcomes = outcomes_of(group)
    tree = hierarchy(group, outcomes)
    baseline = np.full(group.num_turns + 1, np.nan)  # of the prompt: none
    for turn, parent in enumerate(group.parent.tolist()):
        if tree.mass[turn] == 0:
            continue
        others = tree.num_children[parent] - 1
        prior = 0.0 if np.isnan(baseline[parent]) else prior_siblings
        if others + prior > 0:
            known = tree.sums[parent] - tree.value[turn] + (prior * baseline[parent] if prior else 0.0)
            baseline[turn] = known / (others + prior)
        else:
            baseline[turn] = baseline[parent]
    advantage = np.nan_to_num(tree.value - baseline[:-1], nan=0.0)  # no baseline, or nothing below: no opinion
    return turn_credit(tree.value + outcomes.low, exact_zeros(advantage, outcomes.spread), tree.mass)
