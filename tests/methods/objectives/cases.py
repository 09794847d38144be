"""Trees made at random with three policies on them: the sampler, the proximal policy and the trained one.

Every prefix has its own softmax over the possible next tokens, so gradients can be taken with respect to logits, by
autograd or by finite differences, and siblings share what they share.

Legend: N tokens · S prefixes · V possible tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.methods.objectives.kit import Turn, table_of
from trace_async.core.turn_table import TurnTable
from trace_async.methods.objectives.turns import TurnTensors, to_tensors

VOCABULARY = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A few trees whose tokens were drawn from softmaxes, one for every prefix."""

    turns: tuple[Turn, ...]
    root_belief: tuple[float, ...]
    state: NDArray[np.int64]  # [N] the prefix a token was drawn at
    token: NDArray[np.int64]  # [N] what was drawn
    logits: NDArray[np.float64]  # [S, V] of the trained policy
    proximal: NDArray[np.float64]  # [N] log-probabilities under the proximal policy
    table: TurnTable = field(init=False)
    logprobs: NDArray[np.float64] = field(init=False)  # [N] under the trained policy

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", table_of(*self.turns, root_belief=self.root_belief))
        object.__setattr__(self, "logprobs", self.logprobs_of(torch.from_numpy(self.logits)).numpy())

    def logprobs_of(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the tokens under some logits [S, V], [N]; differentiable."""
        return torch.log_softmax(logits, -1)[torch.from_numpy(self.state), torch.from_numpy(self.token)]

    def tensors(self, tokens: NDArray[np.int64] | None = None) -> TurnTensors:
        """As an objective sees it, with all tokens at hand or some."""
        at = np.arange(self.token.size) if tokens is None else tokens
        proximal = torch.tensor(self.proximal[at], dtype=torch.float32)
        return to_tensors(self.table, tokens=at, proximal_logprobs=proximal)

    def policy(self, tokens: NDArray[np.int64] | None = None) -> Tensor:
        """Log-probabilities of the trained policy as an objective gets them, f32."""
        at = np.arange(self.token.size) if tokens is None else tokens
        return torch.tensor(self.logprobs[at], dtype=torch.float32, requires_grad=True)

    def tokens_of(self, turn: int) -> slice:
        """Where a turn's tokens are."""
        first = int(self.table.token_start[turn])
        return slice(first, first + int(self.table.tokens[turn]))

    def path_to(self, turn: int) -> list[int]:
        """The turns from the prompt to `turn`."""
        return [] if turn < 0 else [*self.path_to(int(self.table.parent[turn])), turn]

    @property
    def leaves(self) -> list[int]:
        """Turns without children."""
        return [turn for turn in range(self.table.num_turns) if turn not in self.table.parent]


def random_case(
    rng: np.random.Generator, *, by_leaves: bool, spread: float = 0.5, groups: int = 2, branching: bool = True
) -> Case:
    """Trees of up to three levels with random outcomes, advantages, masses, ages and verdicts.

    `by_leaves`: advantages belong to leaves and turns have their means; otherwise every turn has its own. `spread`: how
    far the three policies are from each other, nats.
    """
    grower = _Grower(rng, by_leaves=by_leaves, branching=branching)
    for group in range(groups):
        for weight in rng.dirichlet([2.0, 2.0]) if branching else (0.5, 0.5):
            grower.grow(group, -1, (group,), float(weight))
    mu = np.array(list(grower.softmax.values()))
    proximal = mu + rng.normal(0, spread, mu.shape)
    state, token = np.array(grower.state), np.array(grower.token)
    return Case(
        turns=tuple(grower.turns),
        root_belief=tuple(rng.random(groups).tolist()),
        state=state,
        token=token,
        logits=proximal + rng.normal(0, spread, mu.shape),
        proximal=torch.log_softmax(torch.from_numpy(proximal), -1).numpy()[state, token],
    )


def with_turns(case: Case, turns: Sequence[Turn]) -> Case:
    """The same tokens with something else known about the turns."""
    return changed(case, turns=tuple(turns))


def changed(case: Case, **changes: object) -> Case:
    """`dataclasses.replace` for cases."""
    return replace(case, **changes)  # type: ignore[arg-type]


class _Grower:
    """Grows turns depth-first and remembers a softmax for every prefix."""

    def __init__(self, rng: np.random.Generator, *, by_leaves: bool, branching: bool) -> None:
        self._rng = rng
        self._by_leaves = by_leaves
        self._branching = branching
        self.turns: list[Turn] = []
        self.softmax: dict[tuple[int, ...], NDArray[np.float64]] = {}
        self.state: list[int] = []
        self.token: list[int] = []

    def grow(self, group: int, parent: int, prefix: tuple[int, ...], mass: float, depth: int = 1) -> None:
        """One turn and what is below it."""
        rng = self._rng
        prefix, mu = self._draw(prefix, int(rng.integers(1, 4)))
        children = 0 if depth == 3 else int(rng.integers(0, 4) if self._branching else rng.integers(0, 2))
        is_leaf = children == 0
        self.turns.append(
            Turn(
                mu=mu,
                parent=parent,
                group=group,
                advantage=None if self._by_leaves else float(rng.normal()),
                leaf_advantage=float(rng.normal()) if is_leaf and self._by_leaves else math.nan,
                mass=mass if is_leaf else None,
                age=int(rng.integers(0, 4)),
                tight=bool(rng.random() < 0.15),
                trained=bool(rng.random() < 0.85),
                drawn=True,
                outcome=float(rng.choice([0.0, 0.25, 1.0])) if is_leaf else math.nan,
                belief=float(rng.random()),
            )
        )
        me = len(self.turns) - 1
        for weight in rng.dirichlet([2.0] * children) if children else ():
            self.grow(group, me, prefix, mass * float(weight), depth + 1)

    def _draw(self, prefix: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        probabilities = []
        for _ in range(tokens):
            logits = self.softmax.setdefault(prefix, self._rng.normal(0, 1.0, VOCABULARY))
            chances = np.exp(logits) / np.exp(logits).sum()
            token = int(self._rng.choice(VOCABULARY, p=chances))
            self.state.append(list(self.softmax).index(prefix))
            self.token.append(token)
            probabilities.append(float(chances[token]))
            prefix = (*prefix, token)
        return prefix, tuple(probabilities)
