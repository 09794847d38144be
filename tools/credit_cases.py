"""The worlds, the ways of branching and the estimators that the credit study compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod

import numpy as np

from tools.credit_world import PROMPT, Anchor, Branching, Choice, Rollout, World
from trace_async.core.types import Group, GrownBy, TurnCredit
from trace_async.methods.allocation import allocate_prefixes, repeat_probability
from trace_async.methods.credit import CREDITS
from trace_async.methods.credit_parts import Counts, CreditRule, turn_credit
from trace_async.methods.credit_split import split_credit

CLIP = 0.02
"""Predictions are kept this far from 0 and 1, as the `trace` allocator keeps them."""

TIE = 1e-9
"""Equal anchors are told apart by this much times their number, so that the older one is served first."""

WORLDS = (
    World(
        name="even",
        logits=(0.3, -0.4, 0.6, 0.2, -0.7, 0.9, -0.2),
        outcomes=(0, 1, 1, 0, 1, 0, 1, 1),
        misjudged=(0.5, 0.9, 0.4, 0.2, 0.9, 0.6, 0.7),
    ),
    World(
        name="hard",
        logits=(-0.8, 0.5, -0.6, -0.7, -0.9, -1.1, 0.4),
        outcomes=(0, 0, 0, 1, 0, 1, 0, 0),
        misjudged=(0.5, 0.1, 0.6, 0.3, 0.1, 0.7, 0.5),
    ),
    World(name="close", logits=(0.0, 0.0, 0.405), outcomes=(1, 0, 0, 1), misjudged=(0.5, 0.95, 0.5)),
)
"""even: success .68 from the prompt; hard: .17; close: two second states worth .5 and .6, the first one overrated."""


def chains(world: World, bare: Sequence[Rollout]) -> list[Choice]:
    """No continuation."""
    return [Choice(1.0, {})]


def one_each(world: World, bare: Sequence[Rollout]) -> list[Choice]:
    """One continuation at every anchor."""
    return [Choice(1.0, dict.fromkeys(_anchors(bare), 1))]


def by_state(world: World, bare: Sequence[Rollout]) -> list[Choice]:
    """Two continuations wherever the turn above was action 0: adaptive, by the prefix alone."""
    return [Choice(1.0, {(root, turn): 2 for root, turn in _anchors(bare) if bare[root].actions[turn - 1] == 0})]


def at_random(world: World, bare: Sequence[Rollout]) -> list[Choice]:
    """Tree-GRPO: for each root rollout one place, drawn from the prompt and the rollout's non-leaf turns."""
    places = [[PROMPT, *(anchor for anchor in _anchors(bare) if anchor[0] == root)] for root in range(len(bare))]
    chance = 1.0 / prod(len(own) for own in places)
    return [Choice(chance, Counter(combination)) for combination in product(*places)]


def by_outcome(world: World, bare: Sequence[Rollout], *, joint: bool, right: bool, each: int = 2) -> list[Choice]:
    """TRACE: `each` continuations per root rollout to the anchors most likely to flip the outcome seen through them.

    `joint`: when all root rollouts have ended; else each share the moment its root rollout ends, in their order.
    `right`: predictions are the true values.
    """
    predicted = np.clip(world.values() if right else np.array(world.misjudged), CLIP, 1.0 - CLIP)
    counts: Counter[Anchor] = Counter()
    for ended in (len(bare),) if joint else range(1, len(bare) + 1):
        anchors = _anchors(bare[:ended])
        repeat = [
            float(repeat_probability(predicted[bare[root].states[turn]], bare[root].outcome > 0.5)) - TIE * number
            for number, (root, turn) in enumerate(anchors)
        ]
        granted = allocate_prefixes(
            repeat,
            budget=each * (len(bare) if joint else 1),
            rng=np.random.default_rng(0),  # nothing is left for it to decide
            granted=[counts[anchor] for anchor in anchors],
        )
        for anchor, count in zip(anchors, granted.tolist(), strict=True):
            counts[anchor] += count
    return [Choice(1.0, counts)]


def _anchors(bare: Sequence[Rollout]) -> list[Anchor]:
    return [(root, turn) for root, rollout in enumerate(bare) for turn in range(1, len(rollout.states))]


BRANCHINGS: dict[str, tuple[Branching, int]] = {
    "chains": (chains, 4),
    "one each": (one_each, 2),
    "by state": (by_state, 2),
    "Tree-GRPO": (at_random, 2),
    "TRACE joint": (partial(by_outcome, joint=True, right=True), 2),
    "TRACE streaming": (partial(by_outcome, joint=False, right=True), 2),
    "TRACE misled": (partial(by_outcome, joint=True, right=False), 2),
}
"""Name -> how continuations are granted, and how many root rollouts there are."""


def roots_only(group: Group) -> TurnCredit:
    """`split` without its continuations: what is left when only the exactly unbiased part is trained."""
    credit = split_credit(group)
    of_root = group.grown_by[_rollouts(group)] == GrownBy.ROOT
    return TurnCredit(value=credit.value, advantage=np.where(of_root, credit.advantage, 0.0), mass=credit.mass)


def corrected(group: Group) -> TurnCredit:
    """`split`, less an estimate of what its continuations add: unbiased when K looks at its own anchor's outcome only.

    Of continuations with total weight g at an anchor whose bare rollout had outcome r, turns of that rollout below the
    anchor pay g x (share of them that repeat r) x (2 r - 1). For outcomes 0 and 1.
    """
    credit = split_credit(group)
    rollouts, mass = _rollouts(group), credit.mass.astype(np.float64)
    ends = np.flatnonzero(~np.isnan(group.outcome))
    outcome = dict(zip(rollouts[ends].tolist(), group.outcome[ends].tolist(), strict=True))
    owed = np.zeros(group.num_turns)
    further = group.grown_by == GrownBy.CONTINUATION
    for anchor in np.unique(group.parent[further & (group.parent >= 0)]).tolist():
        continuations = np.flatnonzero(further & (group.parent == anchor)).tolist()
        bare = outcome[int(rollouts[anchor])]
        same = np.mean([outcome[first] == bare for first in continuations])
        below = (rollouts == rollouts[anchor]) & (np.arange(group.num_turns) > anchor)
        owed[below] += mass[continuations].sum() * same * (2.0 * bare - 1.0)
    return turn_credit(credit.value.astype(np.float64), credit.advantage - owed / mass, mass)


def _rollouts(group: Group) -> Counts:
    """First turn of the rollout that each turn belongs to, [K]."""
    of = np.arange(group.num_turns)
    for turn, parent in enumerate(group.parent.tolist()):
        if group.grown_by[turn] == GrownBy.CHAIN:
            of[turn] = of[parent]
    return of


ESTIMATORS: dict[str, CreditRule] = {**CREDITS, "roots only": roots_only, "corrected split": corrected}
"""The rules that `learner.credit` can name, and two that it cannot: what `split` was weighed against."""
