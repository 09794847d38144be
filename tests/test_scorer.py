"""The batched scorer: one call per turn of the loop, stamps, failures and cancellation."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.virtual_time import run
from trace_async.core.types import FloatArray, Group, Json, Prefix, Score
from trace_async.errors import PredictorError
from trace_async.predictor import Belief
from trace_async.scoring import BatchScorer


def prefix_of(prompt_id: str, turn_index: int) -> Prefix:
    return Prefix(prompt_id=prompt_id, turn_index=turn_index, token_ids=np.zeros(0, np.int32))


class ScriptedPredictor:
    """Answers with the turn index over 100; notes every batch; `answer` replaces the answer."""

    def __init__(self, answer: Callable[[Sequence[Prefix]], FloatArray] | None = None) -> None:
        self.version = 3
        self.batches: list[list[int]] = []
        self._answer = answer

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        self.batches.append([prefix.turn_index for prefix in prefixes])
        if self._answer is not None:
            return self._answer(prefixes)
        return np.array([prefix.turn_index / 100 for prefix in prefixes], np.float32)

    def score_prompt(self, prompt_id: str) -> Belief:
        return Belief(1.0, 1.0)

    def observe(self, group: Group) -> None: ...

    def state(self) -> Json:
        return {}

    def load(self, state: Json, *, version: int) -> None: ...


async def score_all(scorer: BatchScorer, turns: Sequence[int]) -> list[Score]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(scorer.score(prefix_of("a", turn))) for turn in turns]
    return [task.result() for task in tasks]


def test_what_is_asked_in_one_turn_of_the_loop_is_one_call_and_is_stamped() -> None:
    predictor = ScriptedPredictor()
    scorer = BatchScorer(predictor, max_batch=8)
    scores = run(score_all(scorer, [10, 20, 30]))
    assert predictor.batches == [[10, 20, 30]]
    assert [round(score.success, 6) for score in scores] == [0.1, 0.2, 0.3]
    assert {score.predictor_version for score in scores} == {3}
    assert scorer.num_waiting == 0


def test_more_than_a_batch_is_several_calls_and_the_queue_can_be_seen() -> None:
    predictor = ScriptedPredictor()
    scorer = BatchScorer(predictor, max_batch=2)

    async def scene() -> int:
        async with asyncio.TaskGroup() as group:
            for turn in range(5):
                group.create_task(scorer.score(prefix_of("a", turn)))
            await asyncio.sleep(0)
            return scorer.num_waiting

    assert run(scene()) in (0, 5)
    assert predictor.batches == [[0, 1], [2, 3], [4]]


def test_a_second_wave_is_a_second_call_with_the_version_of_its_time() -> None:
    predictor = ScriptedPredictor()
    scorer = BatchScorer(predictor, max_batch=8)

    async def scene() -> list[int]:
        first = await scorer.score(prefix_of("a", 1))
        predictor.version = 4
        second = await scorer.score(prefix_of("a", 2))
        return [first.predictor_version, second.predictor_version]

    assert run(scene()) == [3, 4]
    assert predictor.batches == [[1], [2]]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda prefixes: 1 / 0, "prompt a after {turn} turns: ZeroDivisionError"),
        (lambda prefixes: np.zeros(1, np.float32), "for 2 prefixes"),
        (lambda prefixes: np.array([0.5, np.nan], np.float32), "need one probability each"),
        (lambda prefixes: np.array([0.5, 1.5], np.float32), "need one probability each"),
    ],
)
def test_a_predictor_that_fails_fails_each_waiter_with_its_own_error(
    answer: Callable[[Sequence[Prefix]], FloatArray], complaint: str
) -> None:
    scorer = BatchScorer(ScriptedPredictor(answer), max_batch=8)

    async def scene() -> list[Score | BaseException]:
        return await asyncio.gather(*(scorer.score(prefix_of("a", turn)) for turn in (1, 2)), return_exceptions=True)

    first, second = run(scene())
    assert isinstance(first, PredictorError)
    assert isinstance(second, PredictorError)
    assert first is not second
    assert complaint.format(turn=1) in str(first)
    assert complaint.format(turn=2) in str(second)
    assert isinstance(first.__cause__, ArithmeticError | ValueError)


@pytest.mark.parametrize("fails", [False, True])
def test_a_waiter_cancelled_before_its_batch_is_left_out_of_it(fails: bool) -> None:
    predictor = ScriptedPredictor(broken if fails else None)
    scorer = BatchScorer(predictor, max_batch=8)

    async def scene() -> list[Score | BaseException]:
        tasks = [asyncio.ensure_future(scorer.score(prefix_of("a", turn))) for turn in (1, 2)]
        asyncio.get_running_loop().call_soon(tasks[0].cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second = run(scene())
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, PredictorError if fails else Score)
    assert predictor.batches == [[2]]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_waiter_cancelled_while_its_answer_arrives_leaves_nothing_behind(fails: bool, at_once: bool) -> None:
    """While the predictor works, or between its answer and the moment the waiter would have read it."""
    tasks: list[asyncio.Task[Score]] = []

    def answer(prefixes: Sequence[Prefix]) -> FloatArray:
        if at_once:
            tasks[0].cancel()
        else:
            asyncio.get_running_loop().call_soon(tasks[0].cancel)
        return broken(prefixes) if fails else np.full(len(prefixes), 0.5, np.float32)

    scorer = BatchScorer(ScriptedPredictor(answer), max_batch=8)
    complaints: list[dict[str, Any]] = []

    async def scene() -> list[Score | BaseException]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        tasks.extend(asyncio.ensure_future(scorer.score(prefix_of("a", turn))) for turn in (1, 2))
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second = run(scene())
    gc.collect()
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, PredictorError if fails else Score)
    assert complaints == []


def broken(prefixes: Sequence[Prefix]) -> FloatArray:
    raise RuntimeError(f"cannot score {len(prefixes)} prefixes")
