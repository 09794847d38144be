"""What every objective reads and returns, as tensors.

An objective is a function `(logprobs, turns, config, options) -> Surrogate`. `logprobs` f32 [n] are the log-
probabilities, under the weights being trained, of the sampled tokens that `turns` lists; gradient flows through them
and nothing else. The loss it returns is to be minimised, summed over turns and never divided: the denominator is fixed
by what was played. Turns whose tokens are not among the n are context of the table only, and contribute nothing.

Legend: n tokens at hand · J turns of the table, parents first · G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.core.turn_table import TurnTable
from trace_async.core.types import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTensors:
    """A `TurnTable` and the tokens of it that are at hand. Fields as there, f32 unless said otherwise."""

    behaviour_logprobs: Tensor  # [n] nats
    proximal_logprobs: Tensor | None  # [n] nats, of the weights the step started from; None: not computed
    turn: Tensor  # i64 [n]
    group: Tensor  # i64 [J]
    parent: Tensor  # i64 [J]; -1 for first turns
    tokens: Tensor  # i64 [J]
    depth: Tensor  # i64 [J]
    trained: Tensor  # bool [J] carries loss: verdict, signal and mass allow it
    drawn: Tensor  # bool [J]
    tight: Tensor  # bool [J] verdict TIGHT
    age: Tensor  # i64 [J]
    advantage: Tensor  # [J]
    positive: Tensor  # [J] >= 0; with `negative` it sums to the advantage
    negative: Tensor  # [J] <= 0
    mass: Tensor  # [J]
    value: Tensor  # [J] NaN unknown
    leaf_advantage: Tensor  # [J] NaN where there is none
    outcome: Tensor  # [J] NaN where no leaf
    belief: Tensor  # [J] NaN unknown
    root_belief: Tensor  # [G] NaN unknown

    @property
    def num_turns(self) -> int:
        """J."""
        return int(self.mass.shape[0])


class Surrogate(NamedTuple):
    """What an objective makes of the tokens at hand."""

    loss: Tensor  # [] to be minimised; summed, not divided
    touched: Tensor  # bool [n] a cap, a clip or a token mask changed what the token would have had
    vetoed: Tensor  # bool [J] turns taken out of the loss by a rule, not by broken numbers
    masked: Tensor | None = None  # bool [n] those of the touched that lost a gradient to a mask; None: no masks


Objective: TypeAlias = Callable[[Tensor, TurnTensors, ObjectiveConfig, Any], Surrogate]


def to_tensors(
    table: TurnTable,
    *,
    tokens: NDArray[np.int64] | None = None,
    proximal_logprobs: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> TurnTensors:
    """The table on a device. `tokens` [n]: places in the table of those at hand, default all of its N tokens.

    `proximal_logprobs` [n] belong to the same tokens.
    """

    def floats(array: NDArray[Any]) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float32, device=device)

    def whole(array: NDArray[Any]) -> Tensor:
        return torch.as_tensor(array, dtype=torch.int64, device=device)

    def flags(array: NDArray[np.bool_]) -> Tensor:
        return torch.as_tensor(array, dtype=torch.bool, device=device)

    at: NDArray[np.int64] | slice = slice(None) if tokens is None else tokens
    return TurnTensors(
        behaviour_logprobs=floats(table.behaviour_logprobs[at]),
        proximal_logprobs=proximal_logprobs,
        turn=whole(table.turn[at]),
        group=whole(table.group),
        parent=whole(table.parent),
        tokens=whole(table.tokens),
        depth=whole(table.depth),
        trained=flags(table.trained),
        drawn=flags(table.drawn),
        tight=flags(table.verdict == Verdict.TIGHT),
        age=whole(table.age),
        advantage=floats(table.advantage),
        positive=floats(table.positive),
        negative=floats(table.negative),
        mass=floats(table.mass),
        value=floats(table.value),
        leaf_advantage=floats(table.leaf_advantage),
        outcome=floats(table.outcome),
        belief=floats(table.belief),
        root_belief=floats(table.root_belief),
    )
