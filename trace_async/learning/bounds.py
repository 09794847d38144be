"""What a well-formed group can hold in this run and at this moment; one beyond it would poison training.

Owns the judgement that needs the run's own facts, after `check_group` has judged what needs none. Invariant: a group
without a fault can be judged by age, credited, packed and trained, by this start of the learner and by every later one.
Pure: records in, a sentence out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_async.core.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The facts of one start."""

    epoch: int
    vocabulary_size: int
    max_context_tokens: int

    def fault(self, group: Group, *, newest_version: int) -> str | None:
        """Why a group is refused; None when nothing is wrong. `newest_version`: published in this epoch, -1 = none."""
        if group.epoch > self.epoch:
            return f"it is of epoch {group.epoch}, this is epoch {self.epoch}"
        newest = int(group.version_max.max())
        if group.epoch == self.epoch and newest > newest_version:
            return f"a turn was sampled by version {newest}, the newest is {newest_version}"
        largest = int(max(group.prompt_ids.max(), group.token_ids.max(initial=0)))
        if largest >= self.vocabulary_size:
            return f"it holds token id {largest}, the policy knows {self.vocabulary_size}"
        longest = _longest_path(group)
        if longest > self.max_context_tokens:
            return f"a path has {longest} tokens, tree.max_context_tokens is {self.max_context_tokens}"
        return None


def _longest_path(group: Group) -> int:
    """Tokens of the longest path, the prompt's included."""
    lengths = (group.action_lengths.astype(np.int64) + group.observation_lengths).tolist()
    through: list[int] = []
    for length, parent in zip(lengths, group.parent.tolist(), strict=True):
        through.append(length + (through[parent] if parent >= 0 else group.prompt_ids.size))
    return max(through)
