"""Credit that holds when the number of continuations was decided by an outcome, as TRACE decides it.

Pure. Derived here; docs/credit.md has the derivation and the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trace_async.core.types import Group, GrownBy, TurnCredit
from trace_async.methods.credit_parts import PROMPT, Counts, Floats, exact_zeros, hierarchy, outcomes_of, turn_credit
from trace_async.methods.credit_sibling import PRIOR_SIBLINGS


class _Rollouts(NamedTuple):
    """Chains of turns, each named by its first turn."""

    of: Counts  # [K] the rollout that a turn belongs to
    outcome: Floats  # [K] centred outcome of the rollout that starts here; NaN where none starts or it has none


def split_credit(group: Group) -> TurnCredit:
    """A root rollout is compared with root rollouts only, a continuation with what was known at its anchor.

    Every turn gets the outcome of its own rollout (not a mean over branches) minus that rollout's baseline:

        root rollout    mean outcome of the other root rollouts
        continuation    mean over the other continuations at its anchor and the rollout through it, in which that
                        rollout's own baseline counts as PRIOR_SIBLINGS more

    weighted by 1/(number of root rollouts), the same whatever was grown from them, and for a continuation by the mass
    that an equal share at every fork gives it. So the outcome that decided K is baselined at the root only: the root
    part is an unbiased policy gradient whatever K looked at, since no continuation enters it. Given all root rollouts
    and K, continuations are i.i.d., so their part adds, at every anchor, a positive multiple of the gradient of that
    anchor's value: the whole ascends success from the prompt plus success from the anchors, as they were visited.

    Masses are those of `sibling`, so denominators agree; an advantage is the weight over the mass times the difference
    above. Without an outcome of its own rollout a turn has advantage 0; SELECTED turns carry no mass.
    """
    outcomes = outcomes_of(group)
    tree = hierarchy(group, outcomes)
    rollouts = _rollouts(group, outcomes.centred)
    is_root = (group.grown_by == GrownBy.ROOT) & ~np.isnan(rollouts.outcome)
    weight = np.where(is_root, 1.0 / max(int(is_root.sum()), 1), tree.mass)
    difference = exact_zeros(_less_baseline(group, rollouts, tree.mass), outcomes.spread)
    pull = (weight * difference)[rollouts.of]
    advantage = np.divide(pull, tree.mass, out=np.zeros(group.num_turns), where=tree.mass > 0)
    return turn_credit(tree.value + outcomes.low, advantage, tree.mass)


def _rollouts(group: Group, centred: Floats) -> _Rollouts:
    of, outcome = np.arange(group.num_turns), np.full(group.num_turns, np.nan)
    for turn, (parent, grown_by) in enumerate(zip(group.parent.tolist(), group.grown_by.tolist(), strict=True)):
        if grown_by == GrownBy.CHAIN:
            of[turn] = of[parent]
        if not np.isnan(centred[turn]):
            outcome[of[turn]] = centred[turn]
    return _Rollouts(of, outcome)


def _less_baseline(group: Group, rollouts: _Rollouts, mass: Floats) -> Floats:
    """Outcome minus baseline of each rollout [K], at its first turn; 0 where one of the two is unknown."""
    known = ~np.isnan(rollouts.outcome) & (mass > 0)  # first turns only
    is_root = group.grown_by == GrownBy.ROOT
    baseline = np.full(group.num_turns + 1, np.nan)  # the last place is the prompt's, which has none
    for first in np.flatnonzero(known).tolist():
        anchor = int(group.parent[first])
        peers = known & (group.parent == anchor) & (is_root if is_root[first] else True)
        peers[first] = False
        total, count = float(rollouts.outcome[peers].sum()), float(peers.sum())
        through = PROMPT if anchor == PROMPT else int(rollouts.of[anchor])
        if through != PROMPT and known[through]:
            total, count = total + float(rollouts.outcome[through]), count + 1.0
        if not np.isnan(baseline[through]):
            total, count = total + PRIOR_SIBLINGS * float(baseline[through]), count + PRIOR_SIBLINGS
        if count > 0:
            baseline[first] = total / count
    return np.asarray(np.nan_to_num(rollouts.outcome - baseline[:PROMPT], nan=0.0))
