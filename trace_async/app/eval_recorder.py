"""One played episode as evaluation keeps it, and the environment wrapper that hears what was said in it.

Invariants: what is recorded is what the environment got and gave, unchanged; an episode that could not be played has a
failure and no turns. Never plays, never judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from trace_async.core.types import Message, Task, Turn
from trace_async.environment import Branching, Environment, StepResult


class Step(NamedTuple):
    """What an environment heard and how it replied."""

    action: str
    result: StepResult


class Recorder:
    """An episode of any environment that keeps what was said; the Environment protocol, passed through."""

    name: ClassVar[str] = "recorder"
    branching: ClassVar[Branching] = Branching.NONE  # evaluation plays chains

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.opening: tuple[Message, ...] = ()
        self.steps: list[Step] = []

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        """As the environment's; forgets what was said before."""
        self.opening, self.steps = await self._environment.reset(task, seed=seed), []
        return self.opening

    async def step(self, action: str) -> StepResult:
        """As the environment's; TypeError or ValueError when a metric is not a number."""
        result = await self._environment.step(action)
        metrics = {str(name): float(value) for name, value in result.metrics.items()}
        self.steps.append(Step(action, replace(result, metrics=metrics)))
        return result

    async def fork(self, *, seed: int) -> Environment:
        """An unrecorded copy of the environment."""
        return await self._environment.fork(seed=seed)

    def snapshot(self) -> bytes:
        """The environment's."""
        return self._environment.snapshot()

    def restore(self, state: bytes) -> None:
        """The environment's; what was said stays."""
        self._environment.restore(state)

    async def close(self) -> None:
        """The environment's."""
        await self._environment.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One task, played once or failed; `turns` and `steps` have equal lengths."""

    task: Task
    index: int  # place among the tasks that were given
    wall_s: float
    opening: tuple[Message, ...] = ()
    prompt_tokens: int = 0  # of the opening
    turns: tuple[Turn, ...] = ()
    steps: tuple[Step, ...] = ()
    failure: str = ""  # why it could not be played; "" when it was

    @property
    def outcome(self) -> float:
        """Sum of rewards; NaN when it failed."""
        return self.turns[-1].outcome if self.turns else math.nan

    @property
    def num_invalid(self) -> int:
        """Turns whose action could not be read."""
        return sum(not turn.valid for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(int(turn.action_ids.size) for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Prompt, turns and replies together."""
        return self.prompt_tokens + sum(int(turn.action_ids.size + turn.observation_ids.size) for turn in self.turns)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the environment measured, as of its last reply."""
        return self.steps[-1].result.metrics if self.steps else {}

    @property
    def end(self) -> str:
        """What ended it: terminated, truncated (both the environment's word), turn_limit, context; or failed."""
        if not self.turns:
            return "failed"
        result = self.steps[-1].result
        if result.terminated or result.truncated:
            return "terminated" if result.terminated else "truncated"
        return self.turns[-1].stop.name.lower()
