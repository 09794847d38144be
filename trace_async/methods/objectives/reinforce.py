"""REINFORCE on stale data: no correction, or one cap for every ratio. What the corrected objectives are compared with.

Maximises, over turns n,

    sum_n  mass_n  A_n  M_n  sum_t  w_t  logp_t

with M_n the turn's veto and w_t = 1 when `cap` is 0, the plain policy gradient of whatever policy sampled, or else
w_t = sg min(cap, exp(logp_t - mu_t)), truncated importance sampling of tokens whose cap knows neither age nor sign
(E. Ionides, "Truncated importance sampling", 2008). `tree_tis` is this with caps by age and sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import ReinforceOptions
from trace_async.methods.objectives.ratios import make_ratios
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def reinforce(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: ReinforceOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    if options.cap > 0.0:
        weight, touched = ratios.ratio.clamp(max=options.cap), ratios.ratio > options.cap
    else:
        weight, touched = torch.ones_like(ratios.ratio), torch.zeros_like(ratios.ratio, dtype=torch.bool)
    coefficient = (turns.mass * turns.advantage * ratios.usable)[turns.turn]
    return Surrogate(-(coefficient * weight * ratios.logprobs).sum(), touched, ratios.vetoed)
