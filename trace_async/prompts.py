"""The seeded, resumable stream of training prompts.

Owns the data cursor. Invariants: within one epoch of the pool every prompt is handed out exactly once, in an order
that depends on the seed and the epoch alone; one `take` never holds a prompt twice, also where it runs over the end of
an epoch; `load(state())` continues as if nothing had happened. Never decides which prompts are trained on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import Json, Task
from trace_async.environment import TaskSource
from trace_async.errors import ConfigError

_ORDER_DOMAIN = 0x70726F6D  # keeps this generator apart from others that start from the run seed


class Candidate(NamedTuple):
    """A prompt that may be leased; `visit` is the number of epochs in which it was handed out before."""

    task: Task
    visit: int


class PromptStream:
    """Hands out candidates of the "train" split."""

    def __init__(self, tasks: TaskSource, *, num_train: int, seed: int) -> None:
        """`num_train`: use the first so many tasks; 0 = all of them, without end when the source has no end.

        Raises: ConfigError when the source has fewer tasks than that.
        """
        available = tasks.size("train")
        if available is not None and num_train > available:
            raise ConfigError(
                f"prompts.num_train is {num_train}, but the environment has {available} training tasks; "
                f"set it to {available} or less"
            )
        self._tasks = tasks
        self._seed = seed
        self._size = num_train or available  # None: no end
        self._epoch = 0
        self._position = 0
        # The last prompts of the epoch before, and how many of this epoch's first prompts share a `take` with them.
        self._tail: tuple[int, ...] = ()
        self._head = 0
        self._order = self._make_order()

    @property
    def size(self) -> int | None:
        """Prompts per epoch; None when the source has no end (then the only epoch is 0)."""
        return self._size

    def take(self, count: int) -> tuple[Candidate, ...]:
        """The next `count` candidates, all different; fewer only when the whole pool is smaller."""
        if self._size is None:
            first, self._position = self._position, self._position + count
            return tuple(self._candidate(index, 0) for index in range(first, self._position))
        count = min(count, self._size)
        taken = [(int(index), self._epoch) for index in self._order[self._position : self._position + count]]
        self._position += len(taken)
        if missing := count - len(taken):
            self._epoch += 1
            self._tail, self._head = tuple(index for index, _ in taken), missing
            self._order = self._make_order()
            self._position = missing
            taken += [(int(index), self._epoch) for index in self._order[:missing]]
        return tuple(self._candidate(index, epoch) for index, epoch in taken)

    def state(self) -> Json:
        """The cursor, as JSON."""
        return {
            "size": self._size,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "tail": list(self._tail),
            "head": self._head,
        }

    def load(self, state: Json) -> None:
        """Continue from what `state` returned. Raises: ConfigError when pool or seed are not the same."""
        if (state["size"], state["seed"]) != (self._size, self._seed):
            raise ConfigError(
                f"the saved prompt cursor is of {state['size']} prompts and seed {state['seed']}, this run has "
                f"{self._size} and {self._seed}; restore prompts.num_train and run.seed, or start a new run folder"
            )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._tail = tuple(int(index) for index in state["tail"])
        self._head = int(state["head"])
        self._order = self._make_order()

    def _candidate(self, index: int, epoch: int) -> Candidate:
        return Candidate(self._tasks.task("train", index), epoch)

    def _make_order(self) -> NDArray[np.int64]:
        """This epoch's permutation, in which the first `_head` prompts are none of `_tail`.

        Offenders swap places with the first later prompts that are not in the tail; which prompt comes first stays
        random, because the permutation is.
        """
        if self._size is None:
            return np.empty(0, np.int64)
        rng = np.random.default_rng((_ORDER_DOMAIN, self._seed, self._epoch))
        order = rng.permutation(self._size)
        in_tail = np.isin(order, self._tail)
        offenders = np.flatnonzero(in_tail[: self._head])
        others = self._head + np.flatnonzero(~in_tail[self._head :])[: offenders.size]
        order[offenders], order[others] = order[others], order[offenders]
        return order
