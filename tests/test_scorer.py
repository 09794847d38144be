"""The batched scorer: one call per turn of the loop, stamps, failures and cancellation."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.virtual_time import run
from trace_async.core.types import FloatArray, Prefix, Score
from trace_async.errors import PredictorError
from trace_async.scoring import BatchScorer


def prefix_of(prompt_id: str, turn_index: int) -> Prefix:
    return Prefix(prompt_id=prompt_id, turn_index=turn_index, token_ids=np.zeros(0, np.int32))


class ScriptedPredictor:
    """Answers with the turn index over 100; notes every batch; `answer` replaces the answer."""

    def __init__(self, answer: Callable[[Sequence[Prefix]], FloatArray] | None = None) -> None:
        self.version = 3
        self.quick_batch = 64
        self.batches: list[list[int]] = []
        self._answer = answer

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        self.batches.append([prefix.turn_index for prefix in prefixes])
        if self._answer is not None:
            return self._answer(prefixes)
        return np.array([prefix.turn_index / 100 for prefix in prefixes], np.float32)


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


# ---- what may take long ------------------------------------------------------------------------------------------


class SlowPredictor(ScriptedPredictor):
    """Needs a thread; notes on which it was called; each call waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.quick_batch = 0
        self.threads: set[int] = set()
        self.may_go_on = threading.Semaphore(0)
        self.called = threading.Semaphore(0)
        self.on_call: Callable[[], None] = lambda: None

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        self.threads.add(threading.get_ident())
        self.called.release()
        assert self.may_go_on.acquire(timeout=10)
        self.on_call()
        return super().predict(prefixes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)


def test_a_quick_predictor_is_never_given_more_than_it_is_quick_for_and_the_loop_turns_in_between() -> None:
    predictor = ScriptedPredictor()
    predictor.quick_batch = 2
    scorer = BatchScorer(predictor, max_batch=100)
    turns_of_the_loop: list[int] = []

    async def tick() -> None:
        for _ in range(6):
            turns_of_the_loop.append(len(predictor.batches))
            await asyncio.sleep(0)

    async def scene() -> None:
        async with asyncio.TaskGroup() as group:
            for turn in range(6):
                group.create_task(scorer.score(prefix_of("a", turn)))
            group.create_task(tick())

    run(scene())
    assert predictor.batches == [[0, 1], [2, 3], [4, 5]]
    assert {1, 2, 3} <= set(turns_of_the_loop)


def test_a_slow_predictor_works_in_one_thread_of_its_own_while_the_loop_goes_on() -> None:
    predictor = SlowPredictor()
    scorer = BatchScorer(predictor, max_batch=3)

    async def scene() -> list[Score]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scorer.score(prefix_of("a", turn))) for turn in (1, 2)]
            await until(lambda: predictor.called.acquire(blocking=False))
            assert scorer.num_waiting == 2
            # asked while a call is under way: the next call, as many as fit
            tasks += [group.create_task(scorer.score(prefix_of("a", turn))) for turn in (3, 4, 5, 6)]
            await asyncio.sleep(0.02)
            assert predictor.batches == []
            assert scorer.num_waiting == 6
            predictor.may_go_on.release(3)
        return [task.result() for task in tasks]

    scores = asyncio.run(scene())
    assert predictor.batches == [[1, 2], [3, 4, 5], [6]]
    assert [round(100 * score.success) for score in scores] == [1, 2, 3, 4, 5, 6]
    assert len(predictor.threads) == 1
    assert threading.get_ident() not in predictor.threads
    assert scorer.num_waiting == 0


def test_parameters_that_arrive_while_the_thread_predicts_are_asked_again_and_stamped() -> None:
    predictor = SlowPredictor()

    def load_once() -> None:
        predictor.version, predictor.on_call = 4, lambda: None

    predictor.on_call = load_once
    predictor.may_go_on.release(2)
    score = asyncio.run(BatchScorer(predictor, max_batch=3).score(prefix_of("a", 1)))
    assert score.predictor_version == 4
    assert predictor.batches == [[1], [1]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_waiter_cancelled_while_the_thread_predicts_leaves_the_others_their_answer(fails: bool) -> None:
    predictor = SlowPredictor()
    if fails:
        predictor.on_call = lambda: broken(())  # type: ignore[assignment]  # raises
    scorer = BatchScorer(predictor, max_batch=8)

    async def scene() -> list[Score | BaseException]:
        tasks = [asyncio.ensure_future(scorer.score(prefix_of("a", turn))) for turn in (1, 2)]
        await until(lambda: predictor.called.acquire(blocking=False))
        tasks[0].cancel()
        predictor.may_go_on.release()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second = asyncio.run(scene())
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, PredictorError if fails else Score)
    if fails:
        assert "prompt a after 2 turns: RuntimeError: cannot score" in str(second)


def test_a_loop_that_ends_while_the_thread_predicts_takes_nobody_down(caplog: pytest.LogCaptureFixture) -> None:
    predictor = SlowPredictor()

    async def scene() -> None:
        task = asyncio.ensure_future(BatchScorer(predictor, max_batch=8).score(prefix_of("a", 1)))
        await until(lambda: predictor.called.acquire(blocking=False))
        task.cancel()

    asyncio.run(scene())
    predictor.may_go_on.release()
    gc.collect()  # the scorer's thread ends with the scorer
    for thread in [thread for thread in threading.enumerate() if thread.ident in predictor.threads]:
        thread.join(10)
        assert not thread.is_alive()
    assert caplog.records == []
