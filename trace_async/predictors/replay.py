"""The newest lessons of a predictor: bounded, drawn with a taste for the recent, exact through JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trace_async.core.types import FloatArray
from trace_async.predictors.arrays import array_from_json, array_to_json
from trace_async.predictors.rows import Row


class Lesson(NamedTuple):
    """What one prefix taught, as it was seen before its outcome was known."""

    row: Row  # what the network's input layer reads, [any length]
    scalars: FloatArray  # [scalars]
    counted: float  # log-odds without the network
    value: float  # share of successes below, in [0, 1]
    weight: float  # > 0
    when: int  # observation that brought it


class Minibatch(NamedTuple):
    """Lessons side by side; arrays float32, first axis the lessons."""

    rows: list[Row]
    scalars: FloatArray
    counted: FloatArray
    value: FloatArray
    weight: FloatArray


class Replay:
    """At most `size` lessons; the oldest go first."""

    def __init__(self, size: int) -> None:
        self._lessons: deque[Lesson] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._lessons)

    def extend(self, lessons: Iterable[Lesson]) -> None:
        """Take in new lessons."""
        self._lessons.extend(lessons)

    def chances(self, *, recency: float) -> FloatArray:
        """Cumulated chance of each lesson to be drawn: half as much for every `recency` observations of age."""
        when = np.array([lesson.when for lesson in self._lessons], np.float64)
        cumulated = np.cumsum(0.5 ** ((when[-1] - when) / recency))
        return np.asarray(cumulated / cumulated[-1])

    def draw(self, count: int, *, chances: FloatArray, rng: np.random.Generator) -> Minibatch:
        """`count` lessons, with replacement."""
        places = np.searchsorted(chances, rng.random(count), side="right")
        drawn = [self._lessons[place] for place in np.minimum(places, len(self._lessons) - 1).tolist()]
        return Minibatch(
            [lesson.row for lesson in drawn],
            np.stack([lesson.scalars for lesson in drawn]),
            *(np.array([lesson[field] for lesson in drawn], np.float32) for field in (2, 3, 4)),
        )

    def state(self) -> dict[str, Any]:
        """As JSON."""
        rows = [lesson.row for lesson in self._lessons]
        flat = np.concatenate(rows) if rows else np.empty(0, np.int32)
        numbers = [[*lesson.scalars, lesson.counted, lesson.value, lesson.weight] for lesson in self._lessons]
        return {
            "rows": array_to_json(flat),
            "lengths": array_to_json(np.array([row.size for row in rows], np.int64)),
            "numbers": array_to_json(np.array(numbers, np.float32).reshape(len(rows), -1 if rows else 0)),
            "when": array_to_json(np.array([lesson.when for lesson in self._lessons], np.int64)),
        }

    def load(self, state: Any, *, num_scalars: int, row_dtype: str, what: str) -> None:
        """Take over what `state` returned; raises ValueError, and changes nothing, when it is malformed."""
        if not isinstance(state, dict) or set(state) != {"rows", "lengths", "numbers", "when"}:
            raise ValueError(f"state of a predictor: {what} must have rows, lengths, numbers and when")
        lengths = array_from_json(state["lengths"], dtype="int64", shape=(-1,), what=f"{what}.lengths")
        count = len(lengths)
        dtype, wide = (row_dtype, num_scalars + 3) if count else ("int32", -1)
        flat = array_from_json(state["rows"], dtype=dtype, shape=(-1,), what=f"{what}.rows")
        numbers = array_from_json(state["numbers"], dtype="float32", shape=(count, wide), what=f"{what}.numbers")
        when = array_from_json(state["when"], dtype="int64", shape=(count,), what=f"{what}.when")
        if (lengths < 0).any() or int(lengths.sum()) != flat.size:
            raise ValueError(f"state of a predictor: lengths of {what} do not sum to its {flat.size} row entries")
        rows = np.split(flat, np.cumsum(lengths)[:-1]) if count else []
        columns = (rows, numbers[:, :num_scalars], *numbers[:, num_scalars:].T.tolist(), when.tolist())
        lessons = (Lesson(*entry) for entry in zip(*columns, strict=True))
        self._lessons = deque(lessons, maxlen=self._lessons.maxlen)


def join(parts: Sequence[Minibatch]) -> Minibatch:
    """One minibatch of several."""
    rows = [row for part in parts for row in part.rows]
    return Minibatch(rows, *(np.concatenate(column) for column in zip(*(part[1:] for part in parts), strict=True)))
