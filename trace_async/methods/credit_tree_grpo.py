"""Tree-GRPO's credit (arXiv 2509.21240, formula read from its published code): a leaf within its tree, and within all.

Pure. What that paper calls a tree is one root rollout with everything grown from it; here all trees of a prompt are one
`TurnTree`.
"""

from __future__ import annotations

import numpy as np

from trace_async.core.types import Group, GrownBy, TurnCredit
from trace_async.methods.credit_parts import STD_FLOOR, Counts, Floats, fold_leaves, outcomes_of


def tree_grpo_credit(group: Group) -> TurnCredit:
    """Leaf advantage = z-score among the leaves of its tree + z-score among all leaves of the prompt.

    Standard deviations are those of n - 1, plus 1e-6. A set of one leaf has nothing to compare and adds 0; the paper's
    code would add the raw outcome there, which its own trees, always of several leaves, never meet.
    Continuations grown from the prompt belong to a tree in the paper; a group does not record which, and as draws from
    the prompt they fit any: the i-th of them joins the tree of root rollout i modulo their number.
    """
    outcomes = outcomes_of(group)
    is_leaf, tree = outcomes.is_leaf, _trees(group)
    advantage = np.zeros(group.num_turns)
    advantage[is_leaf] = _z_scores(outcomes.centred[is_leaf])
    for members in (is_leaf & (tree == one) for one in np.unique(tree)):
        advantage[members] += _z_scores(outcomes.centred[members])
    return fold_leaves(group, outcomes, advantage)


def _trees(group: Group) -> Counts:
    """Which root rollout's tree each turn belongs to, [K]."""
    num_trees = max(int((group.grown_by == GrownBy.ROOT).sum()), 1)
    tree = np.zeros(group.num_turns, np.int64)
    num_roots = num_others = 0
    for turn, (parent, grown_by) in enumerate(zip(group.parent.tolist(), group.grown_by.tolist(), strict=True)):
        if parent >= 0:
            tree[turn] = tree[parent]
        elif grown_by == GrownBy.ROOT:
            tree[turn] = num_roots
            num_roots += 1
        else:
            tree[turn] = num_others % num_trees
            num_others += 1
    return tree


def _z_scores(outcomes: Floats) -> Floats:
    if outcomes.size < 2:
        return np.zeros_like(outcomes)
    return np.asarray((outcomes - outcomes.mean()) / (outcomes.std(ddof=1) + STD_FLOOR))
