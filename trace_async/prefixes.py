"""A task as the prefix that a predictor looks at, before anybody has played it.

Owns the cache of rendered openings. Invariant: the tokens are those with which an actor's tree of that task starts.
Never: resets an episode, samples, predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from trace_async.core.types import IntArray, Message, Prefix, Task

MAX_OPENINGS = 8192
"""Openings kept, the last used ones; bounds memory, not results."""

Opening: TypeAlias = Callable[[Task], tuple[Message, ...]]

_NO_TOKENS: IntArray = np.empty(0, np.int32)
_NO_TOKENS.flags.writeable = False


def make_prefix_of(
    opening: Opening | None, opening_ids: Callable[[Sequence[Message]], IntArray]
) -> Callable[[Task], Prefix]:
    """The prompt prefix of a task: its `opening` rendered by `opening_ids`; without tokens where `opening` is None."""
    if opening is None:
        return lambda task: Prefix(prompt_id=task.task_id, turn_index=0, token_ids=_NO_TOKENS)
    openings: dict[str, Prefix] = {}

    def prefix_of(task: Task) -> Prefix:
        found = openings.pop(task.task_id, None)
        if found is None:
            found = Prefix(prompt_id=task.task_id, turn_index=0, token_ids=opening_ids(opening(task)))
            if len(openings) >= MAX_OPENINGS:
                del openings[next(iter(openings))]
        openings[task.task_id] = found  # the last used stands last
        return found

    return prefix_of
