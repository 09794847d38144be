"""Scores of prefixes for many coroutines at once, without blocking the event loop.

Invariants: whoever waits for a score gets one or a PredictorError; a score is stamped with the version of the
parameters that gave it; the loop is never held for longer than one quick call. Never: a prediction of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeAlias

from trace_async.core.types import FloatArray, Prefix, Score
from trace_async.errors import PredictorError


class PrefixModel(Protocol):
    """The part of a predictor that scoring needs."""

    @property
    def version(self) -> int: ...

    @property
    def quick_batch(self) -> int:
        """Prefixes of one call that an event loop can wait for, about a millisecond; 0: none, it needs a thread."""
        ...

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Success probability of a rollout that goes on from each prefix, float32 [prefixes] in [0, 1]."""
        ...


class _Asked(NamedTuple):
    prefix: Prefix
    answer: asyncio.Future[Score]


_Answer: TypeAlias = tuple[FloatArray, int]
"""Success probabilities, and the version of the parameters that gave them."""


class BatchScorer:
    """Scores prefixes for concurrent coroutines: what waits is one `predict` call, up to a bound.

    A quick predictor is called on the loop, `quick_batch` prefixes in each turn of it (or `max_batch`, if that is
    less). A slow one is called in a thread of its own, `max_batch` prefixes at a time; what is asked meanwhile is the
    next call, so there is never more than one under way. The queue holds one entry per waiting coroutine.
    """

    def __init__(self, predictor: PrefixModel, *, max_batch: int) -> None:
        self._predictor = predictor
        quick = predictor.quick_batch
        self._max_batch = min(max_batch, quick) if quick else max_batch
        self._worker = None if quick else ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._waiting: list[_Asked] = []
        self._in_thread = 0  # prefixes of the call under way
        self._is_due = False  # `_flush` is about to be called

    @property
    def num_waiting(self) -> int:
        """Prefixes asked for and not yet scored (gauge)."""
        return len(self._waiting) + self._in_thread

    async def score(self, prefix: Prefix) -> Score:
        """The score of a prefix, stamped with the predictor's version. Raises PredictorError when there is none.

        Woken by `_answer`, which is called with whatever the predictor answers. May be cancelled at any time; the
        others of the batch do not notice.
        """
        answer: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(prefix, answer))
        self._schedule()
        return await answer

    def _schedule(self) -> None:
        if self._waiting and not self._is_due and not self._in_thread:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        waiting = [asked for asked in self._waiting if not asked.answer.done()]
        batch, self._waiting = waiting[: self._max_batch], waiting[self._max_batch :]
        if batch and self._worker is None:
            self._answer(batch, self._ask(batch))
        elif batch and self._worker is not None:
            self._in_thread = len(batch)
            self._worker.submit(self._ask_in_thread, batch, asyncio.get_running_loop())
        self._schedule()

    def _ask_in_thread(self, batch: list[_Asked], loop: asyncio.AbstractEventLoop) -> None:
        answer = self._ask(batch)
        with suppress(RuntimeError):  # the loop has ended meanwhile, and nobody waits any more
            loop.call_soon_threadsafe(self._back, batch, answer)

    def _back(self, batch: list[_Asked], answer: _Answer | Exception) -> None:
        self._in_thread = 0
        self._answer(batch, answer)
        self._schedule()

    def _ask(self, batch: list[_Asked]) -> _Answer | Exception:
        """Possibly in the thread; new parameters may be loaded meanwhile, and then the question is asked again."""
        prefixes = [asked.prefix for asked in batch]
        try:
            while True:
                version = self._predictor.version
                success = _checked(self._predictor.predict(prefixes), len(prefixes))
                if self._predictor.version == version:
                    return success, version
        except Exception as error:  # noqa: BLE001  the predictor's boundary: each waiter gets the failure as its own
            return error

    def _answer(self, batch: list[_Asked], answer: _Answer | Exception) -> None:
        if isinstance(answer, Exception):
            for asked in batch:
                _fail(asked, answer)
            return
        success, version = answer
        for asked, probability in zip(batch, success.tolist(), strict=True):
            if not asked.answer.done():
                asked.answer.set_result(Score(success=probability, predictor_version=version))


def _fail(asked: _Asked, error: Exception) -> None:
    if asked.answer.done():
        return
    prefix = asked.prefix
    failure = PredictorError(
        f"prompt {prefix.prompt_id} after {prefix.turn_index} turns: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    asked.answer.set_exception(failure)


def _checked(success: FloatArray, count: int) -> FloatArray:
    if success.shape != (count,) or not ((success >= 0.0) & (success <= 1.0)).all():
        raise ValueError(f"predicted {success} for {count} prefixes; need one probability each")
    return success
