"""Requests as trees ask for them: root rollouts of several turns, then continuations from places along them.

Every engine answers the same trees. A turn's prefix is its parent's prefix, the tokens the engine itself sampled there,
and the environment's reply; so contents differ between engines and lengths never do. With `shared=False` every request
has a prefix of its own of the same length, and the order in which requests come is still the trees'.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from trace_async.core.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a workload is made from."""

    trees: int
    roots: int  # root rollouts of each tree
    continuations: int  # of each tree, after its root rollouts
    shared: bool
    vocabulary: int
    seed: int
    prompt: tuple[int, int] = (80, 240)  # tokens, least and most
    new: tuple[int, int] = (4, 36)  # sampled tokens of one turn
    reply: tuple[int, int] = (8, 40)
    turns: int = 3  # of the longest rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request, before its prefix is known."""

    index: int
    tree: int
    parent: int  # the turn before it; -1: it follows the prompt
    depth: int
    max_tokens: int
    is_root: bool
    reply: IntArray  # what the environment says to its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: sample exactly `max_tokens` behind `prefix`."""

    index: int
    prefix: IntArray
    max_tokens: int
    seed: int


class Growth:
    """Which requests can be asked now, given the answers so far."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        rng = np.random.default_rng(spec.seed)
        self._prompts = [self._words(rng, spec.prompt) for _ in range(spec.trees)]
        self.turns: list[Turn] = []
        for tree in range(spec.trees):
            self._plan(tree, rng)
        self.answers: dict[int, IntArray] = {}
        self._prefixes: dict[int, IntArray] = {}
        self._roots_left = [sum(t.is_root for t in self.turns if t.tree == tree) for tree in range(spec.trees)]
        self._waiting = list(self.turns)
        self._ready: deque[Turn] = deque()
        self._wake()

    @property
    def num_ready(self) -> int:
        """Requests that wait for nothing."""
        return len(self._ready)

    @property
    def finished(self) -> bool:
        """Whether every request was answered."""
        return len(self.answers) == len(self.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens to sample in all."""
        return sum(turn.max_tokens for turn in self.turns)

    def take(self) -> Job:
        """The request that has been ready for longest."""
        turn = self._ready.popleft()
        prefix = self._prefix(turn)
        self._prefixes[turn.index] = prefix
        if not self._spec.shared:
            rng = np.random.default_rng((self._spec.seed, turn.index))
            prefix = self._words(rng, (len(prefix), len(prefix)))
        return Job(index=turn.index, prefix=prefix, max_tokens=turn.max_tokens, seed=self._spec.seed + turn.index)

    def answer(self, index: int, tokens: IntArray) -> None:
        """What the engine sampled; makes its children ready, and a tree's continuations with its last root turn."""
        turn = self.turns[index]
        assert len(tokens) == turn.max_tokens, f"{len(tokens)} tokens were sampled, {turn.max_tokens} were asked for"
        self.answers[index] = tokens
        self._roots_left[turn.tree] -= turn.is_root
        self._wake()

    def _wake(self) -> None:
        ready = [turn for turn in self._waiting if self._may_start(turn)]
        self._waiting = [turn for turn in self._waiting if not self._may_start(turn)]
        self._ready.extend(ready)

    def _may_start(self, turn: Turn) -> bool:
        its_turn = turn.is_root or not self._roots_left[turn.tree]
        return its_turn and (turn.parent < 0 or turn.parent in self.answers)

    def _prefix(self, turn: Turn) -> IntArray:
        if turn.parent < 0:
            return self._prompts[turn.tree]
        parent = self.turns[turn.parent]
        return np.concatenate((self._prefixes[parent.index], self.answers[parent.index], parent.reply))

    def _plan(self, tree: int, rng: np.random.Generator) -> None:
        spec = self._spec
        first = len(self.turns)
        for _ in range(spec.roots):
            self._chain(tree, rng, parent=-1, is_root=True)
        places = [-1, *(t.index for t in self.turns[first:] if t.depth < spec.turns)]
        for _ in range(spec.continuations):
            self._chain(tree, rng, parent=int(rng.choice(places)), is_root=False)

    def _chain(self, tree: int, rng: np.random.Generator, *, parent: int, is_root: bool) -> None:
        depth = 1 if parent < 0 else self.turns[parent].depth + 1
        for _ in range(int(rng.integers(1, self._spec.turns - depth + 1, endpoint=True))):
            low, high = self._spec.new
            turn = Turn(
                index=len(self.turns),
                tree=tree,
                parent=parent,
                depth=depth,
                max_tokens=int(rng.integers(low, high, endpoint=True)),
                is_root=is_root,
                reply=self._words(rng, self._spec.reply),
            )
            self.turns.append(turn)
            parent, depth = turn.index, depth + 1

    def _words(self, rng: np.random.Generator, length: tuple[int, int]) -> IntArray:
        size = int(rng.integers(*length, endpoint=True))
        return rng.integers(0, self._spec.vocabulary, size, dtype=np.int32)
