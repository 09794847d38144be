"""Plans one round: which prompts get how many root rollouts.

Owns the rule that turns beliefs into counts. Invariants: a round's roots sum to `tree.roots_per_step` exactly; the same
seed, round number, cursor and beliefs give the same plan, so a resumed run plans what the stopped one would have.
Never knows actors, leases or permits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from trace_async.config import TreeConfig
from trace_async.core.types import Json, Task
from trace_async.errors import InvariantError
from trace_async.methods.allocation import Counts, allocate_evenly, allocate_roots, root_values_beta
from trace_async.prompts import Candidate, PromptStream

BELIEF_ALLOCATORS = frozenset({"trace"})
"""Allocators that spend by predicted success; the others give every prompt they visit the same."""

_ROUND_DOMAIN = 0x726F756E  # keeps this generator apart from others that start from the run seed


class Belief(Protocol):
    """Beta(alpha, beta) over a prompt's success probability."""

    @property
    def alpha(self) -> float:
        """Prior and seen successes, > 0."""
        ...

    @property
    def beta(self) -> float:
        """Prior and seen failures, > 0."""
        ...


class PromptBeliefs(Protocol):
    """The part of a predictor that looks at whole prompts."""

    def score_prompt(self, prompt_id: str) -> Belief:
        """What is believed about a prompt now."""
        ...


class Draft(NamedTuple):
    """One lease to be: `success` is the mean belief, logged before any outcome of the lease is known."""

    task: Task
    visit: int
    roots: int
    success: float


class RoundPlanner:
    """Draws candidates from the prompt stream and divides a round's roots among them."""

    def __init__(
        self, prompts: PromptStream, beliefs: PromptBeliefs, *, tree: TreeConfig, candidates: int, seed: int
    ) -> None:
        """`candidates`: pool of one round for allocators with beliefs; the others draw as few as can take the roots."""
        self._prompts = prompts
        self._beliefs = beliefs
        self._tree = tree
        self._by_belief = tree.allocator in BELIEF_ALLOCATORS
        self._pool = candidates if self._by_belief else -(-tree.roots_per_step // tree.max_roots_per_prompt)
        self._seed = seed

    def plan(self, round_number: int) -> list[Draft]:
        """The active prompts of a round, in the order of the stream; moves the cursor by one pool.

        Raises: ConfigError when the pool cannot take the round's roots.
        """
        candidates = self._prompts.take(self._pool)
        beliefs = [self._beliefs.score_prompt(candidate.task.task_id) for candidate in candidates]
        counts = self._allocate(beliefs, round_number)
        if int(counts.sum()) != self._tree.roots_per_step:
            raise InvariantError(
                f"round {round_number} allocates {int(counts.sum())} roots over {len(candidates)} prompts, "
                f"not {self._tree.roots_per_step}"
            )
        return [
            _draft(candidate, belief, int(count))
            for candidate, belief, count in zip(candidates, beliefs, counts, strict=True)
            if count
        ]

    def skip(self) -> None:
        """Moves the cursor past a round that was planned before a crash and is known from elsewhere."""
        self._prompts.take(self._pool)

    def state(self) -> Json:
        """The cursor, as JSON."""
        return self._prompts.state()

    def load(self, state: Json) -> None:
        """Continue from what `state` returned."""
        self._prompts.load(state)

    def _allocate(self, beliefs: list[Belief], round_number: int) -> Counts:
        budget, most = self._tree.roots_per_step, self._tree.max_roots_per_prompt
        rng = np.random.default_rng((_ROUND_DOMAIN, self._seed, round_number))
        if not self._by_belief:
            return allocate_evenly(len(beliefs), budget=budget, max_roots=most, rng=rng)
        values = root_values_beta([b.alpha for b in beliefs], [b.beta for b in beliefs], most)
        return allocate_roots(values, budget=budget, max_roots=most, allow_zero=True, rng=rng)


def _draft(candidate: Candidate, belief: Belief, roots: int) -> Draft:
    return Draft(candidate.task, candidate.visit, roots, belief.alpha / (belief.alpha + belief.beta))
