"""Credit of each turn of a finished tree: its value, its advantage, and the share of the signal it carries.

    sibling          leave-one-out among siblings, weights that split at each fork: unbiased under adaptive branching
    sibling_shrunk   the same with less noise: the parent's baseline counts as two more siblings
    split            root rollouts against root rollouts, continuations against their anchor: for K decided by outcomes
    flat             every leaf is one row of a group: what a trainer of independent rows computes (GRPO without std)
    flat_normalised  divided by the standard deviation: GRPO, and ARPO's soft form
    rloo             every leaf against all other leaves
    treepo           a leaf against each subtree it belongs to, by size (TreePO)
    treepo_mean      the same with equal weights, as TreePO's launch script
    tree_grpo        a leaf within its tree and within all trees of the prompt (Tree-GRPO)

Owns the table. docs/credit.md compares the rules: bias by exact enumeration, noise, and which to take. Pure; a rule
reads facts of the group only, never a policy version. What the loss sums is mass x advantage x grad log p over turns.

Invariants of every rule: equal outcomes give advantages of exactly 0; masses of turns at the prompt sum to 1 and masses
of children to their parent's, over the turns that have an outcome below (the first three leave SELECTED turns out); a
turn without one (FAILED and CLOSED ends, and whatever has only such ends below) has value NaN, advantage 0 and mass 0.
Arithmetic is float64, results are float32.
"""

from __future__ import annotations

from functools import partial

from trace_async.methods.credit_flat import flat_credit, rloo_credit
from trace_async.methods.credit_parts import CreditRule
from trace_async.methods.credit_sibling import PRIOR_SIBLINGS, sibling_credit
from trace_async.methods.credit_split import split_credit
from trace_async.methods.credit_tree_grpo import tree_grpo_credit
from trace_async.methods.credit_treepo import treepo_credit
from trace_async.methods.registry import pick

__all__ = ["CREDITS", "LEAF_RULES", "CreditRule", "credit_rule", "flat_credit", "sibling_credit"]

CREDITS: dict[str, CreditRule] = {
    "sibling": sibling_credit,
    "sibling_shrunk": partial(sibling_credit, prior_siblings=PRIOR_SIBLINGS),
    "split": split_credit,
    "flat": flat_credit,
    "flat_normalised": partial(flat_credit, normalise=True),
    "rloo": rloo_credit,
    "treepo": treepo_credit,
    "treepo_mean": partial(treepo_credit, by_size=False),
    "tree_grpo": tree_grpo_credit,
}

LEAF_RULES = frozenset({"flat", "flat_normalised", "rloo", "treepo", "treepo_mean", "tree_grpo"})
"""Rules that give every leaf an advantage of its own, of which a turn's is the mean."""


def credit_rule(name: str) -> CreditRule:
    """The rule that `learner.credit` names; raises ConfigError for an unknown name."""
    return pick(CREDITS, name, where="learner.credit")
