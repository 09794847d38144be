"""Plays tasks, one chain each, through the same turn player as training, and says how often they succeed.

Invariants: a task counts once; an infrastructure failure is counted as such and never as a lost episode; the same
seed, tasks and policy give the same numbers on one machine.

Never trains, never branches, never looks at the training pool.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from trace_async.acting.expansion import close_environments
from trace_async.acting.turns import OnPhase
from trace_async.app.eval_recorder import Episode, Recorder
from trace_async.core.outcomes import is_success
from trace_async.core.seeds import env_seed, node_seed
from trace_async.core.types import SUCCESS_ABOVE, IntArray, Task, Turn
from trace_async.environment import Environment, EnvironmentFactory
from trace_async.errors import Recoverable

_LOG = logging.getLogger(__name__)

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


OnEpisode: TypeAlias = Callable[[Episode], None]
"""Told of each episode at its end, failed ones among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Everything an evaluation needs besides the tasks."""

    player: Player
    make_environment: EnvironmentFactory
    seed: int
    max_parallel: int  # episodes at a time
    clock: Callable[[], float] = time.monotonic
    success_above: float = SUCCESS_ABOVE  # an episode whose outcome is above it succeeded

    async def run(self, tasks: Sequence[Task]) -> Evaluation:
        """Plays every task once; what it all came to."""
        counts: list[Counts] = []
        await self.play(enumerate(tasks), on_end=lambda episode: counts.append(count(episode)))
        return summarize(counts, success_above=self.success_above)

    async def play(self, tasks: Iterable[tuple[int, Task]], *, on_end: OnEpisode) -> None:
        """Plays every task once, at most `max_parallel` at a time; the numbers are handed on as the episodes' indices.

        Consumes tasks, produces episodes; waits for its workers, which wait for the player; woken by their end.
        """
        todo = iter(tasks)
        async with asyncio.TaskGroup() as group:
            for _, first in zip(range(self.max_parallel), todo, strict=False):
                group.create_task(self._play_from(itertools.chain([first], todo), on_end))

    async def _play_from(self, todo: Iterator[tuple[int, Task]], on_end: OnEpisode) -> None:
        for index, task in todo:
            started_s = self.clock()
            try:
                episode = await self._play_episode(index, task)
            except Recoverable as error:
                failure = f"{type(error).__name__}: {error}"
                _LOG.warning("task %s could not be played: %s", task.task_id, failure)
                episode = Episode(task=task, index=index, wall_s=self.clock() - started_s, failure=failure)
            on_end(episode)

    async def _play_episode(self, index: int, task: Task) -> Episode:
        environment = self.make_environment()
        env = Recorder(environment)
        started_s = self.clock()
        try:
            start_seed = env_seed(self.seed, task.task_id, 0, (0,))
            prefix_ids = await self.player.open(env, task, seed=start_seed, what=f"task {task.task_id}")
            prompt_tokens = int(prefix_ids.size)
            turns: list[Turn] = []
            reward = 0.0
            while not turns or math.isnan(turns[-1].outcome):
                path = (0,) * (len(turns) + 1)
                turn = await self.player.play(
                    env=env,
                    prefix_ids=prefix_ids,
                    depth=len(turns) + 1,
                    reward_so_far=reward,
                    seed=node_seed(self.seed, task.task_id, 0, path),
                    request_id=f"eval-{task.task_id}-{len(turns)}",
                    on_phase=_ignore_phase,
                )
                turns.append(turn)
                reward += turn.reward
                prefix_ids = np.concatenate([prefix_ids, turn.action_ids, turn.observation_ids])
        finally:
            await close_environments([environment], what=f"task {task.task_id}")
        return Episode(
            task=task,
            index=index,
            wall_s=self.clock() - started_s,
            opening=env.opening,
            prompt_tokens=prompt_tokens,
            turns=tuple(turns),
            steps=tuple(env.steps),
        )


class Counts(NamedTuple):
    """What is counted of one episode."""

    failed: bool
    outcome: float
    num_turns: int
    num_invalid: int
    sampled_tokens: int


def count(episode: Episode) -> Counts:
    """The counts of an episode."""
    num_turns = len(episode.turns)
    return Counts(bool(episode.failure), episode.outcome, num_turns, episode.num_invalid, episode.sampled_tokens)


def summarize(counts: Sequence[Counts], *, success_above: float) -> Evaluation:
    """What episodes came to, in the order in which they are given; those above the threshold succeeded."""
    played = [episode for episode in counts if not episode.failed]
    num_turns = sum(episode.num_turns for episode in played)
    wins = int(is_success([episode.outcome for episode in played], success_above).sum())
    interval = wilson_interval(wins, len(played))
    return Evaluation(
        success=wins / len(played) if played else math.nan,
        success_low=interval.low,
        success_high=interval.high,
        mean_outcome=sum(episode.outcome for episode in played) / len(played) if played else math.nan,
        mean_turns=num_turns / len(played) if played else math.nan,
        invalid_share=sum(episode.num_invalid for episode in played) / num_turns if num_turns else math.nan,
        num_played=len(played),
        num_failed=len(counts) - len(played),
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
