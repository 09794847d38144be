"""Small decision problems in which every tree can be enumerated: exact expectations of what a credit rule adds up to.

A world has T turns of two actions, one logit per state, and an outcome of 0 or 1 for each of the 2^T ways through it.
State 0 is the prompt; action a in state s leads to state 2 s + 1 + a. Legend: S states, E rules, K turns of a tree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import Group, GrownBy, NodeState, Score, TreeBudget
from trace_async.methods.credit_parts import CreditRule

Floats: TypeAlias = NDArray[np.float64]
Anchor: TypeAlias = tuple[int, int]  # root rollout, turns played; (0, 0) is the prompt

PROMPT: Anchor = (0, 0)
NAN = math.nan


class Rollout(NamedTuple):
    """One way from a state to an end."""

    chance: float
    states: tuple[int, ...]
    actions: tuple[int, ...]
    outcome: float


class Shape(NamedTuple):
    """All that a credit rule looks at."""

    parent: tuple[int, ...]
    grown_by: tuple[int, ...]
    outcome: tuple[float | None, ...]


class GrownTree(NamedTuple):
    """One possible tree."""

    chance: float
    shape: Shape
    states: tuple[int, ...]  # [K] where each turn was sampled
    actions: tuple[int, ...]  # [K]


class Choice(NamedTuple):
    """How many continuations each anchor gets, and how likely that is."""

    chance: float
    counts: Mapping[Anchor, int]


Branching: TypeAlias = Callable[["World", Sequence[Rollout]], list[Choice]]
"""What an allocator may see: the world (for its predictions) and the root rollouts of the tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A decision problem with a policy of one logit per state."""

    name: str
    logits: tuple[float, ...]  # [S] of action 1
    outcomes: tuple[float, ...]  # [2^T] in the order of the end states
    misjudged: tuple[float, ...]  # [S] success as a bad predictor sees it

    @property
    def turns(self) -> int:
        """T."""
        return int(math.log2(len(self.outcomes)))

    def chances(self) -> Floats:
        """Probability of action 1, [S]."""
        return np.asarray(1.0 / (1.0 + np.exp(-np.array(self.logits, np.float64))))

    def values(self) -> Floats:
        """Probability of success from each state and each end, [2 S + 1]."""
        chances, num_states = self.chances(), len(self.logits)
        values = np.array([*[0.0] * num_states, *self.outcomes])
        for state in reversed(range(num_states)):
            low, high = values[2 * state + 1], values[2 * state + 2]
            values[state] = low + chances[state] * (high - low)
        return values

    def gradient(self, start: int = 0) -> Floats:
        """Exact gradient [S] of the value of `start` with respect to the logits."""
        chances, values, num_states = self.chances(), self.values(), len(self.logits)
        reached = np.zeros(2 * num_states + 1)
        reached[start] = 1.0
        gradient = np.zeros(num_states)
        for state in range(num_states):
            p = chances[state]
            reached[2 * state + 1] += reached[state] * (1.0 - p)
            reached[2 * state + 2] += reached[state] * p
            gradient[state] = reached[state] * p * (1.0 - p) * (values[2 * state + 2] - values[2 * state + 1])
        return gradient

    def rollouts(self, start: int = 0) -> list[Rollout]:
        """Every way from `start` to an end."""
        num_states = len(self.logits)
        if start >= num_states:
            return [Rollout(1.0, (), (), self.outcomes[start - num_states])]
        p = float(self.chances()[start])
        return [
            Rollout(chance * rest.chance, (start, *rest.states), (action, *rest.actions), rest.outcome)
            for action, chance in ((0, 1.0 - p), (1, p))
            for rest in self.rollouts(2 * start + 1 + action)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What E rules add up to over all trees of one world and one way of branching."""

    mean: Floats  # [E, S] expectation of the sum over turns of mass x advantage x grad log p
    square: Floats  # [E] expectation of its squared norm
    turns: float  # expected number of turns of a tree
    trees: int


def measure(world: World, branching: Branching, rules: Mapping[str, CreditRule], *, roots: int) -> Measured:
    """Exact moments of every rule's gradient estimate with `roots` root rollouts."""
    chances, num_states = world.chances(), len(world.logits)
    mean, square = np.zeros((len(rules), num_states)), np.zeros(len(rules))
    turns, trees = 0.0, 0
    known: dict[Shape, Floats] = {}
    for tree in grown_trees(world, branching, roots=roots):
        if tree.shape not in known:
            known[tree.shape] = pulls(tree.shape, rules)
        states = np.array(tree.states)
        scores = np.zeros((len(states), num_states))  # grad log p of each turn
        scores[np.arange(len(states)), states] = np.array(tree.actions) - chances[states]
        estimate = known[tree.shape] @ scores
        mean += tree.chance * estimate
        square += tree.chance * np.einsum("es,es->e", estimate, estimate)
        turns += tree.chance * len(states)
        trees += 1
    return Measured(mean=mean, square=square, turns=turns, trees=trees)


def pulls(shape: Shape, rules: Mapping[str, CreditRule]) -> Floats:
    """Mass x advantage of every turn under every rule, [E, K]."""
    credits = [rule(group_of(shape)) for rule in rules.values()]
    return np.array([credit.mass.astype(np.float64) * credit.advantage for credit in credits])


def grown_trees(world: World, branching: Branching, *, roots: int) -> Iterator[GrownTree]:
    """Every tree that can be grown; chances sum to 1. Continuations of one anchor come in one order only."""
    every = world.rollouts()
    for bare in product(every, repeat=roots):
        for choice in branching(world, bare):
            chance = choice.chance * math.prod(rollout.chance for rollout in bare)
            anchors = sorted(anchor for anchor, count in choice.counts.items() if count)
            below = [world.rollouts(bare[root].states[turn]) for root, turn in anchors]
            options = [
                list(_multisets(ways, choice.counts[anchor])) for ways, anchor in zip(below, anchors, strict=True)
            ]
            for drawn in product(*options):
                likely = chance * math.prod(part[0] for part in drawn)
                yield _assemble(likely, bare, {a: part[1] for a, part in zip(anchors, drawn, strict=True)})


def group_of(shape: Shape) -> Group:
    """A group with that shape, one token per turn."""
    num_turns = len(shape.parent)
    ones, zeros = np.ones(num_turns, np.int32), np.zeros(num_turns, np.float32)
    is_leaf = np.array([outcome is not None for outcome in shape.outcome])
    return Group(
        group_id="enumerated",
        lease_id="enumerated",
        actor_id="",
        epoch=1,
        prompt_id="prompt",
        environment="world",
        budget=TreeBudget(roots=shape.grown_by.count(GrownBy.ROOT), continuations=0),
        root_score=Score(success=NAN, predictor_version=0),
        prompt_ids=ones[:1],
        parent=np.array(shape.parent, np.int32),
        action_lengths=ones,
        observation_lengths=ones - 1,
        token_ids=ones,
        logprobs=zeros,
        version_min=ones,
        version_max=ones,
        kv_version_min=ones,
        score=zeros,
        score_version=ones,
        reward=zeros,
        outcome=np.array([NAN if outcome is None else outcome for outcome in shape.outcome], np.float32),
        process_score=zeros,
        state=np.where(is_leaf, NodeState.LEAF, NodeState.EXPANDED).astype(np.uint8),
        grown_by=np.array(shape.grown_by, np.uint8),
        stop=np.zeros(num_turns, np.uint8),
        valid=np.ones(num_turns, np.uint8),
        generate_s=zeros,
        environment_s=zeros,
    )


def _multisets(ways: Sequence[Rollout], count: int) -> Iterator[tuple[float, tuple[Rollout, ...]]]:
    """Every unordered draw of `count` of the ways, with its chance: no rule tells continuations of an anchor apart."""
    for picks in combinations_with_replacement(range(len(ways)), count):
        chance = float(math.factorial(count))
        for way, times in Counter(picks).items():
            chance *= ways[way].chance ** times / math.factorial(times)
        yield chance, tuple(ways[way] for way in picks)


def _assemble(chance: float, bare: Sequence[Rollout], drawn: Mapping[Anchor, Sequence[Rollout]]) -> GrownTree:
    parent: list[int] = []
    grown_by: list[int] = []
    outcome: list[float | None] = []
    states: list[int] = []
    actions: list[int] = []

    def add(rollout: Rollout, below: int, reason: GrownBy) -> int:
        first = len(parent)
        length = len(rollout.states)
        parent.extend([below, *range(first, first + length - 1)])
        grown_by.extend([reason, *[GrownBy.CHAIN] * (length - 1)])
        outcome.extend([*[None] * (length - 1), rollout.outcome])
        states.extend(rollout.states)
        actions.extend(rollout.actions)
        return first

    firsts = [add(rollout, -1, GrownBy.ROOT) for rollout in bare]
    for (root, turn), continuations in drawn.items():
        for rollout in continuations:
            add(rollout, firsts[root] + turn - 1 if turn else -1, GrownBy.CONTINUATION)
    return GrownTree(chance, Shape(tuple(parent), tuple(grown_by), tuple(outcome)), tuple(states), tuple(actions))
