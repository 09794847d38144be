"""Scores of prefixes for many coroutines at once, without blocking the event loop.

Invariants: whoever waits for a score gets one or a PredictorError; a score is stamped with the version of the
parameters that gave it. Never: a prediction of its own, or a wait on anything but the next turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from trace_async.core.types import FloatArray, Prefix, Score
from trace_async.errors import PredictorError


class PrefixModel(Protocol):
    """The part of a predictor that scoring needs."""

    @property
    def version(self) -> int: ...

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Success probability of a rollout that goes on from each prefix, float32 [prefixes] in [0, 1]."""
        ...


class BatchScorer:
    """Scores prefixes for concurrent coroutines: whatever is asked in one turn of the event loop is one `predict` call.

    Waits for nothing but the next turn of the loop, whose callback `_flush` wakes everybody who asked. The queue holds
    one entry per waiting coroutine and is emptied every turn, `max_batch` prefixes to a call.
    """

    def __init__(self, predictor: PrefixModel, *, max_batch: int) -> None:
        self._predictor = predictor
        self._max_batch = max_batch
        self._waiting: list[tuple[Prefix, asyncio.Future[Score]]] = []

    @property
    def num_waiting(self) -> int:
        """Prefixes asked for and not yet scored (gauge)."""
        return len(self._waiting)

    async def score(self, prefix: Prefix) -> Score:
        """The score of a prefix, stamped with the predictor's version. Raises PredictorError when there is none.

        May be cancelled at any time; the others of the batch do not notice.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Score] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((prefix, future))
        return await future

    def _flush(self) -> None:
        asked, self._waiting = self._waiting, []
        asked = [(prefix, future) for prefix, future in asked if not future.done()]
        for start in range(0, len(asked), self._max_batch):
            part = asked[start : start + self._max_batch]
            self._answer([prefix for prefix, _ in part], [future for _, future in part])

    def _answer(self, prefixes: list[Prefix], futures: list[asyncio.Future[Score]]) -> None:
        version = self._predictor.version
        try:
            success = _checked(self._predictor.predict(prefixes), len(prefixes))
        except Exception as error:  # noqa: BLE001  the predictor's boundary: each waiter gets the failure as its own
            for prefix, future in zip(prefixes, futures, strict=True):
                _fail(future, prefix, error)
            return
        for future, probability in zip(futures, success.tolist(), strict=True):
            if not future.done():
                future.set_result(Score(success=probability, predictor_version=version))


def _fail(future: asyncio.Future[Score], prefix: Prefix, error: Exception) -> None:
    if future.done():
        return
    failure = PredictorError(
        f"prompt {prefix.prompt_id} after {prefix.turn_index} turns: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    future.set_exception(failure)


def _checked(success: FloatArray, count: int) -> FloatArray:
    if success.shape != (count,) or not ((success >= 0.0) & (success <= 1.0)).all():
        raise ValueError(f"predicted {success} for {count} prefixes; need one probability each")
    return success
