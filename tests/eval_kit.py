"""An evaluation of coin tossing with metrics and labels, in virtual time, with no model."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.fakes import CoinEnvironment, ScriptedEngine, WordRenderer, World, loop_clock
from tests.virtual_time import run
from trace_async.acting.turns import TurnPlayer
from trace_async.app.eval_command import Session, open_session, play_mode
from trace_async.app.eval_plan import Plan, Request
from trace_async.app.eval_recorder import Episode, Step
from trace_async.app.evaluate import Evaluator
from trace_async.config import Config
from trace_async.core.types import Message, StopReason, Task, Turn
from trace_async.environment import EnvironmentKit, StepResult

SEED = 3


class Quiz(CoinEnvironment):
    """Coin tossing that measures: `em` is the reward so far, `searches` the turns, `odd` only when there are three."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        turns = float(len(self.actions))
        metrics = {"em": result.reward, "searches": turns, **({"odd": 1.0} if turns == 3 else {})}
        return replace(result, metrics=metrics)


class QuizTasks:
    def size(self, split: str) -> int | None:
        return 1000

    def task(self, split: str, index: int) -> Task:
        return Task(f"quiz/{split}/{index}", {"question": f"Which side, {index}?", "answers": ["heads", "Kopf"]})


def make_plan(
    policy: Path, *, world: World | None = None, num: int = 6, modes: tuple[str, ...] = ("sampled",), split: str = "dev"
) -> Plan:
    """A plan over the first quiz tasks; `policy` is a folder with something in it."""
    policy.mkdir(exist_ok=True)
    (policy / "config.json").write_text("{}")
    used = world or World()
    tasks = tuple(QuizTasks().task(split, index) for index in range(num))
    return Plan(
        config=Config(),
        policy=policy,
        kit=EnvironmentKit(lambda: Quiz(used), QuizTasks()),
        split=split,
        modes=modes,
        tasks=tasks,
        labels=tuple({"hops": str(2 + index % 3)} for index in range(num)),
        seed=SEED,
    )


def make_evaluator(plan: Plan, *, engine: ScriptedEngine | None = None, max_parallel: int = 2) -> Evaluator:
    player = TurnPlayer(
        engine or ScriptedEngine(latency=lambda call: 0.1),
        WordRenderer(),
        max_turn_tokens=3,
        max_context_tokens=500,
        max_turns=6,
        request_deadline_s=5.0,
        step_deadline_s=5.0,
        clock=loop_clock,
    )
    return Evaluator(
        player=player,
        make_environment=plan.kit.make_environment,
        seed=plan.seed,
        max_parallel=max_parallel,
        clock=loop_clock,
    )


def evaluate(
    out: Path, plan: Plan, *, engine: ScriptedEngine | None = None, limit_s: float | None = None, max_parallel: int = 2
) -> Session:
    """Plays what is missing in the folder of all modes, or is cancelled after `limit_s` virtual seconds."""
    request = Request(source=Path("quiz.toml"), out=out, split=plan.split)
    with open_session(request, plan) as session:

        async def play() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    for mode in plan.modes:
                        await play_mode(session, mode, make_evaluator(plan, engine=engine, max_parallel=max_parallel))

        run(play())
        return session


def make_turn(*, tokens: int = 2, reply_tokens: int = 0, outcome: float = float("nan"), reward: float = 0.0) -> Turn:
    return Turn(
        action_ids=np.arange(tokens, dtype=np.int32),
        action_logprobs=np.zeros(tokens, dtype=np.float32),
        observation_ids=np.arange(reply_tokens, dtype=np.int32),
        version_min=4,
        version_max=5,
        kv_version_min=4,
        stop=StopReason.STOP,
        valid=True,
        reward=reward,
        outcome=outcome,
    )


def make_episode(
    index: int = 0,
    *,
    said: str = "<answer>Paris</answer>",
    reply: str = "a page",
    question: str = "Where?",
    answers: tuple[str, ...] = ("Paris",),
    outcome: float = 1.0,
    metrics: dict[str, float] | None = None,
) -> Episode:
    """One search and one answer."""
    looked = StepResult(messages=(Message("user", reply),), reward=0.0, terminated=False)
    ended = StepResult(messages=(), reward=outcome, terminated=True, metrics=metrics or {})
    return Episode(
        task=Task(f"quiz/dev/{index}", {"question": question, "answers": list(answers)}),
        index=index,
        wall_s=1.5,
        opening=(Message("system", "Answer."), Message("user", question)),
        prompt_tokens=7,
        turns=(make_turn(tokens=3, reply_tokens=5), make_turn(outcome=outcome, reward=outcome)),
        steps=(Step("<search>capital</search>", looked), Step(said, ended)),
    )
