"""Evaluation: every task once, failures told apart from losses, intervals from a published table."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes import CoinEnvironment, Fault, ScriptedEngine, WordRenderer, World, loop_clock, no_fault, now_and_then
from tests.virtual_time import run
from trace_async.acting.turns import TurnPlayer
from trace_async.app.eval_recorder import Episode, Recorder
from trace_async.app.evaluate import Counts, Evaluation, Evaluator, summarize, wilson_interval
from trace_async.core.types import Task
from trace_async.environment import StepResult
from trace_async.errors import EngineError, InvariantError

TASKS = [Task(f"t{index}", {}) for index in range(30)]


def make_evaluator(
    world: World,
    engine: ScriptedEngine,
    *,
    max_parallel: int = 8,
    max_turns: int = 10,
    environment: type[CoinEnvironment] = CoinEnvironment,
) -> Evaluator:
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
    return Evaluator(
        player=player,
        make_environment=lambda: environment(world),
        seed=3,
        max_parallel=max_parallel,
        clock=loop_clock,
    )


def evaluate(world: World, engine: ScriptedEngine, *, max_parallel: int = 8, max_turns: int = 10) -> Evaluation:
    async def main() -> Evaluation:
        return await make_evaluator(world, engine, max_parallel=max_parallel, max_turns=max_turns).run(TASKS)

    return run(main())


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


@pytest.mark.parametrize(("above", "wins"), [(0.5, 2), (0.6, 1), (0.2, 3), (1.0, 0), (-2.0, 4)])
def test_success_is_an_outcome_above_the_threshold(above: float, wins: int) -> None:
    counts = [Counts(False, outcome, 2, 0, 10) for outcome in (1.0, 0.6, 0.3, -1.0)]
    found = summarize([*counts, Counts(True, math.nan, 0, 0, 0)], success_above=above)
    assert (found.success, found.num_failed) == (wins / 4, 1)
    assert (found.success_low, found.success_high) == wilson_interval(wins, 4)
    assert found.mean_outcome == pytest.approx(0.9 / 4)


def test_an_evaluator_counts_by_its_own_threshold() -> None:
    async def success(above: float) -> float:
        evaluator = replace(make_evaluator(World(), failing()), success_above=above)
        return (await evaluator.run(TASKS)).success

    assert run(success(-0.5)) == 1.0
    assert run(success(1.0)) == 0.0
    assert run(success(0.5)) == evaluate(World(), failing()).success


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


class MeasuringCoin(CoinEnvironment):
    """Measures the number of turns so far, but never on the second one a number."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        turns = len(self.actions)
        return replace(result, metrics={"turns": np.float32(turns)} if turns != 2 else {"turns": None})  # type: ignore[dict-item]


def play(world: World, engine: ScriptedEngine, environment: type[CoinEnvironment]) -> list[Episode]:
    episodes: list[Episode] = []

    async def main() -> None:
        evaluator = make_evaluator(world, engine, environment=environment)
        await evaluator.play(enumerate(TASKS, start=100), on_end=episodes.append)

    run(main())
    return episodes


def test_an_episode_has_its_number_every_turn_and_what_was_said() -> None:
    episodes = play(World(), failing(), CoinEnvironment)
    assert sorted((episode.index, episode.task) for episode in episodes) == list(enumerate(TASKS, start=100))
    for episode in episodes:
        assert episode.opening[0].content == f"toss {episode.task.task_id} please"
        assert episode.prompt_tokens == 3
        assert len(episode.turns) == len(episode.steps)
        assert [step.action for step in episode.steps] == [
            WordRenderer().text(turn.action_ids) for turn in episode.turns
        ]
        assert [step.result.reward for step in episode.steps] == [turn.reward for turn in episode.turns]
        assert episode.outcome == episode.turns[-1].outcome
        assert episode.end == ("terminated" if episode.steps[-1].result.terminated else "turn_limit")
        assert episode.wall_s == pytest.approx(0.1 * len(episode.turns))


def test_a_metric_that_is_no_number_fails_the_episode_and_says_so() -> None:
    episodes = play(World(), failing(), MeasuringCoin)
    for episode in episodes:
        if episode.failure:
            assert "step failed: TypeError" in episode.failure
            assert (episode.turns, episode.end) == ((), "failed")
        else:
            assert len(episode.turns) == 1
            assert episode.metrics == {"turns": 1.0}
            assert type(episode.metrics["turns"]) is float
    assert 0 < sum(bool(episode.failure) for episode in episodes) < len(episodes)


def test_a_recorder_passes_everything_through() -> None:
    world = World(end_probability=0.0)

    async def main() -> None:
        recorder = Recorder(ReplayableCoin(world))
        await recorder.reset(TASKS[0], seed=1)
        reply = await recorder.step("a")
        twin = await recorder.fork(seed=1)
        assert recorder.snapshot() == b"a"
        recorder.restore(b"b")
        assert recorder.snapshot() == b"b"
        assert (await twin.step("c")).messages[0].content.endswith("after a c")
        await recorder.close()
        await twin.close()
        assert [step.action for step in recorder.steps] == ["a"]
        assert recorder.steps[0].result == reply

    run(main())
    assert not world.open_episodes


class ReplayableCoin(CoinEnvironment):
    def snapshot(self) -> bytes:
        return " ".join(self.actions).encode()

    def restore(self, state: bytes) -> None:
        self.actions = state.decode().split()


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
