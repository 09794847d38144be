"""Sums over the branches of turn trees: what lies above a turn on its path, and what lies below it.

One pass per depth, all turns of a depth at once, so the work is a few small operations whatever the trees look like.
Trees do not mix: a sum never leaves its group. Shared by the objectives that look at whole trees.

Legend: n tokens at hand · J turns, parents first · G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.methods.objectives.ratios import any_in_turn
from trace_async.methods.objectives.turns import TurnTensors


class Branches:
    """The shape of the trees of a table."""

    def __init__(self, turns: TurnTensors) -> None:
        """Reads depths and parents only."""
        order = torch.argsort(turns.depth, stable=True)
        sizes = torch.bincount(turns.depth, minlength=1)[1:].tolist()
        self.levels: list[Tensor] = list(torch.split(order, sizes))
        """Turns of depth 1, 2, ..., i64 each."""
        self.parent = turns.parent
        self.place = torch.where(turns.parent >= 0, turns.parent, turns.num_turns + turns.group)
        """Where a turn was sampled from, i64 [J]: a turn, or J + g for the prompt of group g."""
        self.num_places = turns.num_turns + int(turns.root_belief.shape[0])

    def sum_on_path(self, values: Tensor) -> Tensor:
        """Sum of `values` [J] over each turn and all turns above it, [J]; differentiable."""
        for level in self.levels[1:]:
            values = values.index_add(0, level, values[self.parent[level]])
        return values

    def sum_below(self, values: Tensor) -> Tensor:
        """Sum of `values` [J] over each turn and everything below it, [J]; differentiable."""
        for level in reversed(self.levels[1:]):
            values = values.index_add(0, self.parent[level], values[level])
        return values

    def sum_at_place(self, values: Tensor) -> Tensor:
        """Sum of `values` [J] over the turns sampled from each place, [J + G]."""
        return values.new_zeros(self.num_places).index_add(0, self.place, values)


def unreadable(logprobs: Tensor, turns: TurnTensors) -> Tensor:
    """Turns, trained or not, with a log-probability at hand that is not finite, bool [J]."""
    return any_in_turn(~torch.isfinite(logprobs.detach() - turns.behaviour_logprobs), turns)
