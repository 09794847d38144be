"""TreePO's credit (arXiv 2508.17445, formula read from its published code): a leaf against each subtree it belongs to.

Pure. Left out: the whitening over all tokens of a batch that follows in that code, because a rule sees one group and
scales by no other.
"""

from __future__ import annotations

import numpy as np

from trace_async.core.types import Group, TurnCredit
from trace_async.methods.credit_parts import PROMPT, fold_leaves, outcomes_of, sum_below


def treepo_credit(group: Group, *, by_size: bool = True) -> TurnCredit:
    """Leaf advantage = weighted mean, over the leaf's ancestors d, of (outcome - mean outcome of the leaves below d).

    Ancestors are the prompt and every turn above the leaf's own with more than one leaf below. Weights are their
    numbers of leaves, or all 1 when not `by_size`, which is the form of TreePO's own launch script. Each mean contains
    the leaf itself, so the advantage shrinks where groups are small; deep contrasts are mixed with shallow ones, so a
    shared prefix gets less than it earned.
    """
    outcomes = outcomes_of(group)
    is_leaf = outcomes.is_leaf
    num_below = sum_below(group, is_leaf.astype(np.float64))
    totals = sum_below(group, np.where(is_leaf, outcomes.centred, 0.0))
    compares = num_below > 1  # [K + 1]
    weight = np.where(compares, num_below if by_size else 1.0, 0.0)
    means = np.divide(totals, num_below, out=np.zeros_like(totals), where=num_below > 0)
    weights, weighted = np.zeros(group.num_turns + 1), np.zeros(group.num_turns + 1)  # summed over turns above and self
    weights[PROMPT], weighted[PROMPT] = weight[PROMPT], weight[PROMPT] * means[PROMPT]
    for turn, parent in enumerate(group.parent.tolist()):
        weights[turn] = weights[parent] + weight[turn]  # a leaf's own weight is 0: one leaf stands below it
        weighted[turn] = weighted[parent] + weight[turn] * means[turn]
    above, expected = weights[:PROMPT], weighted[:PROMPT]
    baseline = np.divide(expected, above, out=np.full(group.num_turns, np.nan), where=above > 0)
    return fold_leaves(group, outcomes, np.nan_to_num(outcomes.centred - baseline, nan=0.0))
