"""A budget for how far harmful tokens may have moved, as a brake in front of any objective that judges turns.

`objective.m2_budget` keeps the furthest harmful tokens of an update out of its gradient, until the mean square of the
others' log-ratios is within the budget: M2PO's mask (arXiv 2510.01161) without its objective. Harmful are tokens of
usable turns that a clip would touch, log R > 0 under a positive advantage of their turn and log R < 0 under a negative
one; each counts with its turn's mass. What is held back keeps its place in every mean, veto and denominator, so the
other tokens are weighed as they would be without the brake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objectives.m2po import mask_limit
from trace_async.methods.objectives.ratios import make_ratios
from trace_async.methods.objectives.turns import TurnTensors


def find_held_back(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig) -> Tensor:
    """Tokens that get no loss, bool [n]; `logprobs` f32 [n] of all scored tokens of an update."""
    ratios = make_ratios(logprobs.detach(), turns, config)
    harmful = (torch.sign(turns.advantage)[turns.turn] * ratios.log_ratio > 0) & ratios.usable[turns.turn]
    size, mass = ratios.log_ratio.abs(), turns.mass[turns.turn]
    limit = mask_limit(size[harmful], mass[harmful], config.m2_budget)
    return harmful & (size > limit)


def hold_back(logprobs: Tensor, held: Tensor) -> Tensor:
    """The same numbers, without gradient where `held`."""
    return torch.where(held, logprobs.detach(), logprobs)
