"""Plays held-out tasks, one chain each, through the same turn player as training, and says how often they succeed.

Invariants: a task counts once; an infrastructure failure is counted as such and never as a lost episode; the same
seed, tasks and policy give the same numbers on one machine.

Never trains, never branches, never looks at the training pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from trace_async.acting.expansion import close_environments
from trace_async.acting.turns import OnPhase
from trace_async.core.seeds import env_seed, node_seed
from trace_async.core.types import IntArray, Task, Turn
from trace_async.environment import Environment, EnvironmentFactory
from trace_async.errors import Recoverable

_LOG = logging.getLogger(__name__)

SUCCESS_OUTCOME = 0.5
"""An episode succeeded when its outcome is above this; environments reward success with 1 and failure with 0."""

_Z95 = 1.959963984540054
"""0.975 quantile of the standard normal distribution."""


class Player(Protocol):
    """The part of `turns.TurnPlayer` that is used here."""

    async def open(self, env: Environment, task: Task, *, seed: int, what: str) -> IntArray:
        """Resets `env`; the prompt's tokens int32[P]."""
        ...

    async def play(
        self,
        *,
        env: Environment,
        prefix_ids: IntArray,
        depth: int,
        reward_so_far: float,
        seed: int,
        request_id: str,
        on_phase: OnPhase,
    ) -> Turn:
        """One turn; its outcome is not NaN when the episode ended."""
        ...


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one pass over the tasks gave; shares are of the tasks that could be played, NaN when none could."""

    success: float  # share of episodes that succeeded
    success_low: float  # 95 % Wilson interval of `success`
    success_high: float
    mean_outcome: float
    mean_turns: float
    invalid_share: float  # share of turns whose action could not be read
    num_played: int
    num_failed: int  # tasks that could not be played
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class _Episode:
    outcome: float
    num_turns: int
    num_invalid: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Everything an evaluation needs besides the tasks."""

    player: Player
    make_environment: EnvironmentFactory
    seed: int
    max_parallel: int  # episodes at a time

    async def run(self, tasks: Sequence[Task]) -> Evaluation:
        """Plays every task once, at most `max_parallel` at a time.

        Consumes tasks, produces one Evaluation; waits for its workers, which wait for the player; woken by their end.
        """
        episodes: list[_Episode | None] = []
        todo = iter(tasks)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.max_parallel, len(tasks))):
                group.create_task(self._play_from(todo, episodes))
        return summarize(episodes)

    async def _play_from(self, todo: Iterator[Task], episodes: list[_Episode | None]) -> None:
        for task in todo:
            try:
                episodes.append(await self._play_episode(task))
            except Recoverable as error:
                _LOG.warning("held-out task %s could not be played: %s: %s", task.task_id, type(error).__name__, error)
                episodes.append(None)

    async def _play_episode(self, task: Task) -> _Episode:
        env = self.make_environment()
        try:
            start_seed = env_seed(self.seed, task.task_id, 0, (0,))
            prefix_ids = await self.player.open(env, task, seed=start_seed, what=f"held-out task {task.task_id}")
            reward, outcome = 0.0, math.nan
            num_turns = num_invalid = sampled_tokens = 0
            while math.isnan(outcome):
                path = (0,) * (num_turns + 1)
                turn = await self.player.play(
                    env=env,
                    prefix_ids=prefix_ids,
                    depth=num_turns + 1,
                    reward_so_far=reward,
                    seed=node_seed(self.seed, task.task_id, 0, path),
                    request_id=f"eval-{task.task_id}-{num_turns}",
                    on_phase=_ignore_phase,
                )
                num_turns += 1
                num_invalid += not turn.valid
                sampled_tokens += int(turn.action_ids.shape[0])
                reward, outcome = reward + turn.reward, turn.outcome
                prefix_ids = np.concatenate([prefix_ids, turn.action_ids, turn.observation_ids])
            return _Episode(outcome, num_turns, num_invalid, sampled_tokens)
        finally:
            await close_environments([env], what=f"held-out task {task.task_id}")


def summarize(episodes: Sequence[_Episode | None]) -> Evaluation:
    """Reduces episodes; None stands for a task that could not be played."""
    played = [episode for episode in episodes if episode is not None]
    num_turns = sum(episode.num_turns for episode in played)
    wins = sum(episode.outcome > SUCCESS_OUTCOME for episode in played)
    interval = wilson_interval(wins, len(played))
    return Evaluation(
        success=wins / len(played) if played else math.nan,
        success_low=interval.low,
        success_high=interval.high,
        mean_outcome=sum(episode.outcome for episode in played) / len(played) if played else math.nan,
        mean_turns=num_turns / len(played) if played else math.nan,
        invalid_share=sum(episode.num_invalid for episode in played) / num_turns if num_turns else math.nan,
        num_played=len(played),
        num_failed=len(episodes) - len(played),
        sampled_tokens=sum(episode.sampled_tokens for episode in played),
    )


def wilson_interval(wins: int, trials: int) -> Interval:
    """95 % score interval of a binomial proportion: E. B. Wilson, JASA 22 (1927), p. 209. NaN without trials."""
    if trials == 0:
        return Interval(math.nan, math.nan)
    share = wins / trials
    spread = _Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def _ignore_phase(phase: str) -> None:
    """Evaluation reports no phases."""
