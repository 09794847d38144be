"""What an environment is to this system: a Protocol, its records, and how its state may branch.

An environment object is one episode. The system asks a factory for a fresh one, resets it with a task, and steps it
with the text of each turn. Trees need more than a chain does: `fork` gives an independent episode in the same state.
Environments may raise plain Python errors for broken infrastructure; a wrong or unreadable action is never an error
but an observation (`valid=False`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from trace_async.core.types import Message, Task


class Branching(Enum):
    """How a second child of a turn gets its environment state."""

    FORK = "fork"  # `fork` copies the state
    REPLAY = "replay"  # a fresh episode replays the recorded actions; every observation is compared
    STATELESS = "stateless"  # nothing to copy: the state is the conversation (`fork` is still called)
    NONE = "none"  # cannot branch below the prompt: only root rollouts are grown


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The environment's reply to one action."""

    messages: tuple[Message, ...]  # what the policy sees next; empty at an end is fine
    reward: float
    terminated: bool  # the task itself ended (goal, failure, answer given)
    truncated: bool = False  # the environment's own turn limit
    valid: bool = True  # the action could be read
    process_score: float = float("nan")  # judgement of this turn, when the environment has one
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named measures of the episode so far, as if it ended here: those of its last turn are the episode's. Evaluation
    averages them; training does not see them."""


class Environment(Protocol):
    """One episode.

    `seed` fixes all randomness from that call on: `reset` and `fork` with equal seeds and equal actions give equal
    replies. `snapshot`/`restore` carry the whole state, random generator included, as bytes without pickle.
    """

    name: ClassVar[str]
    branching: ClassVar[Branching]

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        """Start the task; returns the opening messages (system, user)."""
        ...

    async def step(self, action: str) -> StepResult:
        """Play one turn's text."""
        ...

    async def fork(self, *, seed: int) -> Environment:
        """An independent episode in the same state whose randomness starts from `seed`."""
        ...

    def snapshot(self) -> bytes:
        """The whole state."""
        ...

    def restore(self, state: bytes) -> None:
        """Take over a state that `snapshot` of the same class returned."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds; may be called twice."""
        ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]


class TaskSource(Protocol):
    """Where prompts come from: an indexable, deterministic family of tasks per split."""

    def size(self, split: str) -> int | None:
        """Number of tasks of a split; None when unlimited. ConfigError for a split that there is not.

        Every source has "train" and "heldout"; others are for evaluation alone.
        """
        ...

    def task(self, split: str, index: int) -> Task:
        """The task at `index`; the same for ever. No task of one split equals a task of the other."""
        ...


class Demonstration(NamedTuple):
    """One scripted episode, for a supervised warm start."""

    opening: tuple[Message, ...]
    turns: Sequence[tuple[str, str]]  # (action text, reply text); the last reply is not used
    reward: float  # sum over the turns


Demonstrate: TypeAlias = Callable[[Task, np.random.Generator, float], Awaitable[Demonstration]]
"""Plays a task by script, with mistakes at this rate per turn (0: as well as the script can)."""

CutText: TypeAlias = Callable[[str, int], str]
"""The longest beginning of a text that is at most so many tokens of the policy's tokenizer."""


class EnvironmentKit(NamedTuple):
    """What a name in the configuration stands for: how to make episodes, and which tasks there are."""

    make_environment: EnvironmentFactory
    tasks: TaskSource
    opening: Callable[[Task], tuple[Message, ...]] | None = None
    """What `reset` returns for a task, without starting an episode: pure and cheap. Lets prompts never visited be
    scored by their text; without it they are scored as any unseen prompt."""
    labels: Callable[[Task], Mapping[str, str]] | None = None
    """What kind of task it is, by name of the criterion (such as "hops"): evaluation tells results by each."""
    demonstrate: Demonstrate | None = None
    """Scripted play, where the environment has a script."""
    bind: Callable[[CutText], EnvironmentKit] | None = None
    """The same kit for one policy's tokenizer, where the environment counts what it shows in tokens."""
    prepare: Callable[[str], Awaitable[None]] | None = None
    """Makes what the first episode of a split would have to wait for, such as an index, before any deadline runs."""
    close: Callable[[], Awaitable[None]] | None = None
    """Gives back what all episodes share (connections), after the last one was closed; may be called twice."""
