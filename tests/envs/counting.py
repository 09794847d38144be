"""A user's own environment in one small file, and a fake for tests: count to a target.

Name it in a configuration as "tests.envs.counting:make_replaying" or "tests.envs.counting:make_rootbound". Each
action adds a digit; hitting the target gives reward 1, overshooting or running out of turns gives 0.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from envs.options import read_options
from trace_async.core.types import Message, Task
from trace_async.environment import Branching, Environment, EnvironmentKit, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingOptions:
    """What `[environment.options]` may say."""

    max_turns: int = 6
    unsteady: bool = False  # replies also name the episode, so that no replay gives the same words


class Counting:
    """One episode; a fresh one replays recorded actions when a tree branches."""

    name: ClassVar[str] = "counting"
    branching: ClassVar[Branching] = Branching.REPLAY

    def __init__(self, options: CountingOptions, episode: int) -> None:
        self._options = options
        self._episode = episode
        self._target = 0
        self._total = 0
        self._turns = 0
        self.closed = False

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        self._target, self._total, self._turns = int(task.data["target"]), 0, 0
        return (Message("user", f"count to {self._target}"),)

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        word = action.strip()
        valid = len(word) == 1 and word in "123456789"
        self._total += int(word) if valid else 0
        terminated = self._total >= self._target
        tail = f" episode {self._episode}" if self._options.unsteady else ""
        return StepResult(
            messages=() if terminated else (Message("user", f"{self._total}{tail}"),),
            reward=1.0 if self._total == self._target else 0.0,
            terminated=terminated,
            truncated=not terminated and self._turns >= self._options.max_turns,
            valid=valid,
        )

    async def fork(self, *, seed: int) -> Environment:
        raise NotImplementedError(f"{self.name} branches by {self.branching.value}, not by fork")

    def snapshot(self) -> bytes:
        return json.dumps([self._target, self._total, self._turns]).encode()

    def restore(self, state: bytes) -> None:
        self._target, self._total, self._turns = json.loads(state)

    async def close(self) -> None:
        self.closed = True


class RootboundCounting(Counting):
    """The same episode where nothing but a whole new rollout is possible."""

    branching: ClassVar[Branching] = Branching.NONE


class CountingTasks:
    """Targets 5..12: even ones to train on, odd ones held out."""

    def size(self, split: str) -> int | None:
        return 4

    def task(self, split: str, index: int) -> Task:
        if not 0 <= index < 4:
            raise IndexError(f"counting has 4 {split} tasks, got index {index}")
        return Task(f"counting/{split}/{index}", {"target": 2 * index + (6 if split == "train" else 5)})


def make_replaying(options: Mapping[str, Any]) -> EnvironmentKit:
    """A kit that branches by replay."""
    return _kit(Counting, options)


def make_rootbound(options: Mapping[str, Any]) -> EnvironmentKit:
    """A kit that cannot branch below the prompt."""
    return _kit(RootboundCounting, options)


def _kit(kind: type[Counting], options: Mapping[str, Any]) -> EnvironmentKit:
    read = read_options(CountingOptions, options, owner=kind.name)
    episodes: Iterator[int] = itertools.count()
    return EnvironmentKit(lambda: kind(read, next(episodes)), CountingTasks())
