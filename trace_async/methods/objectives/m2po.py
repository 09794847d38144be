"""M2PO: a budget for the second moment of the log-ratios, spent over the whole optimizer step (arXiv 2510.01161).

A token is harmful, for an advantage's sign, where a clip would touch it: log R > 0 for A > 0, log R < 0 for A < 0. M2
is the mean of (log R)^2 over harmful tokens of usable turns. Under the budget nothing is masked or clipped. Over it,

    mask  (the paper)     harmful tokens are dropped, the furthest first, until the mean of the others is within it
    clip  (its code)      the largest tau among the |log R|, or 0, for which bounding |log R| at tau brings M2 within
                          it; then PPO's clip at 1 - max(1 - e^-tau, floor_low) and 1 + max(e^tau - 1, floor_high)

and what is kept is weighed as in `masks.py`, which for the clip has PPO's gradient. Means are those of the flattened
tree: a token counts with the mass of the leaves below it whose advantage has the sign. Tokens equally far are dropped
together, so neither order nor how a leaf's weight is divided matters.

Legend: n tokens at hand · J turns · M harmful tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import M2poOptions
from trace_async.methods.objectives.masks import weigh_kept
from trace_async.methods.objectives.ratios import make_ratios
from trace_async.methods.objectives.trees import Branches
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def m2po(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: M2poOptions) -> Surrogate:
    """The loss of all trained tokens of a step; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    x, usable = ratios.log_ratio, ratios.usable[turns.turn]
    mass_positive, mass_negative = (mass[turns.turn] for mass in masses_by_sign(turns))
    up = usable & (x > 0) & (mass_positive > 0)
    down = usable & (x < 0) & (mass_negative > 0)
    sizes = torch.cat([x[up], -x[down]])
    weights = torch.cat([mass_positive[up], mass_negative[down]])
    if options.variant == "mask":
        limit = mask_limit(sizes, weights, options.budget)
        highest, lowest = limit, -limit
    else:
        tau = clip_limit(sizes, weights, options.budget)
        highest = max(tau, math.log1p(options.floor_high))
        lowest = min(-tau, math.log1p(-options.floor_low))
    return weigh_kept(ratios, turns, config, keep_positive=x <= highest, keep_negative=x >= lowest)


def mask_limit(sizes: Tensor, weights: Tensor, budget: float) -> float:
    """The largest |log R| that is kept; infinite when M2 is within the budget, 0 when nothing can be.

    `sizes` f32 [M] > 0, `weights` f32 [M] > 0: for each value taken as the limit, the mean square of what does not
    exceed it is compared with the budget, from the largest down.
    """
    order = torch.argsort(sizes)
    size, weight = sizes[order].double(), weights[order].double()
    mean = torch.cumsum(weight * size.square(), 0) / torch.cumsum(weight, 0)
    return _largest(size, mean <= budget)


def clip_limit(sizes: Tensor, weights: Tensor, budget: float) -> float:
    """The largest of `sizes` at which bounding all of them brings M2 within the budget; infinite when M2 is so as it
    is, 0 when none does. Shapes as in `mask_limit`.
    """
    order = torch.argsort(sizes)
    size, weight = sizes[order].double(), weights[order].double()
    below, above = torch.cumsum(weight * size.square(), 0), weight.sum() - torch.cumsum(weight, 0)
    return _largest(size, (below + above * size.square()) / weight.sum() <= budget)


def masses_by_sign(turns: TurnTensors) -> tuple[Tensor, Tensor]:
    """Mass of the leaves below each turn with a positive, and with a negative advantage, f32 [J] each.

    Where credit belongs to turns, all of a turn's mass has the sign of its advantage.
    """
    branches, leaf_advantage = Branches(turns), torch.nan_to_num(turns.leaf_advantage)
    positive = branches.sum_below(torch.where(leaf_advantage > 0, turns.mass, 0.0))
    negative = branches.sum_below(torch.where(leaf_advantage < 0, turns.mass, 0.0))
    return (
        torch.where(positive > 0, positive, torch.where(turns.positive > 0, turns.mass, 0.0)),
        torch.where(negative > 0, negative, torch.where(turns.negative < 0, turns.mass, 0.0)),
    )


def _largest(size: Tensor, allowed: Tensor) -> float:
    """The largest allowed of ascending sizes, of equal ones the last deciding; infinite when that is the largest."""
    if not size.numel():
        return math.inf
    last = torch.ones_like(allowed)
    last[:-1] = size[1:] > size[:-1]
    found = size[allowed & last]
    if not found.numel():
        return 0.0
    return math.inf if found[-1] == size[-1] else float(found[-1])
