"""Turns and policies as the objective's tests write them down."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective import ObjectiveBatch, tree_tis

OPEN = ObjectiveConfig(veto_low=0.0, veto_high=1e9, veto_token=0.0)
"""No turn is vetoed."""


@dataclass(frozen=True)
class Turn:
    """One trained turn as a test writes it down."""

    mu: tuple[float, ...]  # probabilities
    advantage: float = 1.0
    mass: float = 1.0
    age: int = 0
    tight: bool = False
    depth: int = 1


def batch_of(*turns: Turn) -> ObjectiveBatch:
    """One row per turn, after one position without loss."""
    width = 1 + max(len(turn.mu) for turn in turns)
    logprobs, index = torch.zeros(len(turns), width), torch.full((len(turns), width), -1)
    for j, turn in enumerate(turns):
        logprobs[j, 1 : 1 + len(turn.mu)] = torch.tensor(turn.mu).log()
        index[j, 1 : 1 + len(turn.mu)] = j
    return ObjectiveBatch(
        behaviour_logprobs=logprobs,
        turn_index=index,
        advantage=torch.tensor([turn.advantage for turn in turns]),
        mass=torch.tensor([turn.mass for turn in turns]),
        age=torch.tensor([turn.age for turn in turns]),
        tight=torch.tensor([turn.tight for turn in turns]),
        depth=torch.tensor([turn.depth for turn in turns]),
    )


def trained(batch: ObjectiveBatch, *rows: tuple[float, ...]) -> Tensor:
    """Log-probabilities [B, T] of the trained policy from its probabilities, row by row; NaN where no loss is on."""
    logprobs = torch.full(batch.turn_index.shape, math.nan)
    for j, row in enumerate(rows):
        logprobs[j, 1 : 1 + len(row)] = torch.tensor(row).log()
    return logprobs.requires_grad_()


def coefficients(logprobs: Tensor, batch: ObjectiveBatch, config: ObjectiveConfig = OPEN) -> Tensor:
    """Ascent coefficient of each log-probability, [B, T]."""
    loss, _ = tree_tis(logprobs, batch, config)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return -gradient
