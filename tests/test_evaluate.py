"""Evaluation: every task once, failures told apart from losses, intervals from a published table."""

from __future__ import annotations

import math

import pytest

from tests.fakes import CoinEnvironment, Fault, ScriptedEngine, WordRenderer, World, loop_clock, no_fault, now_and_then
from tests.virtual_time import run
from trace_async.acting.turns import TurnPlayer
from trace_async.app.evaluate import Evaluation, Evaluator, wilson_interval
from trace_async.core.types import Task
from trace_async.errors import EngineError, InvariantError

TASKS = [Task(f"t{index}", {}) for index in range(30)]


def evaluate(world: World, engine: ScriptedEngine, *, max_parallel: int = 8, max_turns: int = 10) -> Evaluation:
    async def play() -> Evaluation:
        player = TurnPlayer(
            engine,
            WordRenderer(),
            max_turn_tokens=3,
            max_context_tokens=500,
            max_turns=max_turns,
            request_deadline_s=5.0,
            step_deadline_s=5.0,
            clock=loop_clock,
        )
        evaluator = Evaluator(
            player=player, make_environment=lambda: CoinEnvironment(world), seed=3, max_parallel=max_parallel
        )
        return await evaluator.run(TASKS)

    return run(play())


def failing(fault: Fault = no_fault) -> ScriptedEngine:
    return ScriptedEngine(latency=lambda call: 0.1, fault=fault)


def test_every_task_is_played_once_and_every_episode_closed() -> None:
    world = World()
    result = evaluate(world, failing())
    assert (result.num_played, result.num_failed) == (30, 0)
    assert world.opened == 30
    assert not world.open_episodes
    assert 0 < result.success_low < result.success < result.success_high < 1
    assert result.success == result.mean_outcome
    assert result.mean_turns >= 1
    assert result.sampled_tokens >= 30 * result.mean_turns


def test_the_numbers_do_not_depend_on_how_many_episodes_run_at_a_time() -> None:
    assert evaluate(World(), failing(), max_parallel=1) == evaluate(World(), failing(), max_parallel=30)


def test_no_more_episodes_run_at_a_time_than_allowed() -> None:
    engine = failing()
    evaluate(World(), engine, max_parallel=4)
    assert engine.max_in_flight == 4


def test_a_task_whose_engine_fails_is_counted_as_failed_and_not_as_lost() -> None:
    result = evaluate(World(), failing(now_and_then(1, [lambda: EngineError("boom")], probability=0.2)))
    assert result.num_failed > 0
    assert result.num_played + result.num_failed == 30


def test_a_task_whose_environment_cannot_start_is_counted_as_failed() -> None:
    world = World(fault=lambda call: OSError("no sandbox") if call == "reset:" else None)
    result = evaluate(world, failing())
    assert (result.num_played, result.num_failed) == (0, 30)
    assert math.isnan(result.success)
    assert math.isnan(result.success_low)
    assert not world.open_episodes


def test_a_broken_promise_ends_the_evaluation() -> None:
    def fault(call: str) -> Exception | None:
        return InvariantError("broken") if "t3" in call else None

    with pytest.raises(ExceptionGroup) as caught:
        evaluate(World(), failing(fault))
    assert caught.group_contains(InvariantError)


def test_an_episode_ends_at_the_turn_limit() -> None:
    result = evaluate(World(end_probability=0.0), failing(), max_turns=4)
    assert result.mean_turns == 4
    assert result.success == 0


@pytest.mark.parametrize(
    ("wins", "trials", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_agrees_with_newcombe(wins: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(wins, trials) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_is_unknown_without_trials() -> None:
    assert all(math.isnan(end) for end in wilson_interval(0, 0))
