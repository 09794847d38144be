"""Plans one round: which prompts get how many root rollouts.

Owns the order of a round: candidates from the stream, one look at what is believed of all of them, then the root
allocator's counts. Invariants: a round's roots sum to `tree.roots_per_step` exactly; the same seed, round number,
cursor and beliefs give the same plan, so a resumed run plans what the stopped one would have; `skip` moves the cursor
as far as `plan` does. Never knows actors, leases or permits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from trace_async.config import TreeConfig
from trace_async.core.types import Json, Prefix, Task
from trace_async.errors import InvariantError
from trace_async.methods.allocation import Counts
from trace_async.methods.root_allocators import Belief, RootAllocator
from trace_async.prompts import PromptStream

_ROUND_DOMAIN = 0x726F756E  # keeps this generator apart from others that start from the run seed


class PromptBeliefs(Protocol):
    """The part of a predictor that looks at whole prompts."""

    def score_prompts(self, prefixes: Sequence[Prefix]) -> Sequence[Belief]:
        """What is believed now about a root rollout of each prompt, in the order of `prefixes`."""
        ...


class Draft(NamedTuple):
    """One lease to be. The belief is taken before any outcome of the lease is known."""

    task: Task
    visit: int
    roots: int
    success: float  # mean of the belief
    strength: float  # alpha + beta of the belief, in rollouts


class RoundPlanner:
    """Draws candidates from the prompt stream and divides a round's roots among them."""

    def __init__(
        self,
        prompts: PromptStream,
        beliefs: PromptBeliefs,
        allocator: RootAllocator,
        *,
        prefix_of: Callable[[Task], Prefix],
        tree: TreeConfig,
        candidates: int,
        seed: int,
    ) -> None:
        """`prefix_of`: a prompt as `beliefs` looks at it; `candidates`: the pool that `allocator` may ask for."""
        self._prompts = prompts
        self._beliefs = beliefs
        self._allocator = allocator
        self._prefix_of = prefix_of
        self._budget, self._max_roots = tree.roots_per_step, tree.max_roots_per_prompt
        self._pool = allocator.pool_size(candidates, budget=self._budget, max_roots=self._max_roots)
        self._seed = seed

    def plan(self, round_number: int) -> list[Draft]:
        """The active prompts of a round, in the order of the stream; moves the cursor by one pool.

        Raises: ConfigError when the pool cannot take the round's roots.
        """
        candidates = self._prompts.take(self._pool)
        beliefs = self._beliefs.score_prompts([self._prefix_of(candidate.task) for candidate in candidates])
        counts = self._allocate(beliefs, round_number)
        return [
            Draft(candidate.task, candidate.visit, int(count), *_mean_and_strength(belief))
            for candidate, belief, count in zip(candidates, beliefs, counts, strict=True)
            if count
        ]

    def upcoming(self, rounds: int) -> list[Prefix]:
        """The prompts that the next `rounds` rounds will look at; moves no cursor."""
        before = self._prompts.state()
        prefixes = [
            self._prefix_of(candidate.task) for _ in range(rounds) for candidate in self._prompts.take(self._pool)
        ]
        self._prompts.load(before)
        return prefixes

    def skip(self) -> None:
        """Moves the cursor past a round that was planned before a crash and is known from elsewhere."""
        self._prompts.take(self._pool)

    def state(self) -> Json:
        """The cursor, as JSON."""
        return self._prompts.state()

    def load(self, state: Json) -> None:
        """Continue from what `state` returned."""
        self._prompts.load(state)

    def _allocate(self, beliefs: Sequence[Belief], round_number: int) -> Counts:
        rng = np.random.default_rng((_ROUND_DOMAIN, self._seed, round_number))
        counts = self._allocator.allocate(beliefs, budget=self._budget, max_roots=self._max_roots, rng=rng)
        if int(counts.sum()) != self._budget or counts.min() < 0 or counts.max() > self._max_roots:
            raise InvariantError(
                f"round {round_number} allocates {int(counts.sum())} roots, {counts.min()} to {counts.max()} each, "
                f"over {len(beliefs)} prompts; it must be {self._budget}, 0 to {self._max_roots} each"
            )
        return counts


def _mean_and_strength(belief: Belief) -> tuple[float, float]:
    strength = belief.alpha + belief.beta
    return belief.alpha / strength, strength
