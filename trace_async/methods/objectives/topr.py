"""TOPR, tapered off-policy REINFORCE (arXiv 2503.14286): failures fade as they become unlikely, successes do not.

Maximises, over turns n,

    sum_n  C_n  M_n  sum_t  logp_t,     C_n = sum over leaves l below n of  mass_l  A_l  sg[ clamp(W_l, low, high) ]

with W_l the product of trained over behaviour probability of every token on the path to l, and the window by the sign
of A_l: [1, 1] for positives, whose weight is 1 whatever the policy thinks of them by now, and [0, 1] for negatives.
Without the fading, pushing down what is unlikely already is what makes off-policy REINFORCE diverge. Other windows are
the paper's general form.

Turns on the path that carry no loss (over age, or vetoed) count in W_l and get no gradient; one with a log-probability
that is not finite takes the leaves below it out. Caps by age play no part: the windows are the caps. The paper divides
by the length of a trajectory; here the sum is divided by all tokens, so a long path weighs as much as its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import ToprOptions
from trace_async.methods.objectives.ratios import bounded_exp, make_ratios, sum_in_turn
from trace_async.methods.objectives.trees import Branches, unreadable
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def topr(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: ToprOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    branches = Branches(turns)
    product = bounded_exp(branches.sum_on_path(sum_in_turn(ratios.log_ratio, turns)))
    broken = branches.sum_on_path(unreadable(logprobs, turns).to(product.dtype)) > 0
    leaf = ~broken & ~torch.isnan(turns.leaf_advantage)
    advantage = torch.where(leaf, turns.leaf_advantage, 0.0)
    weight = torch.where(
        advantage > 0,
        product.clamp(options.positive_low, options.positive_high),
        product.clamp(options.negative_low, options.negative_high),
    )
    pull = branches.sum_below(turns.mass * advantage * weight)
    tapered = branches.sum_below(((weight != product) & (advantage != 0)).to(product.dtype)) > 0
    loss = -((pull * ratios.usable)[turns.turn] * ratios.logprobs).sum()
    return Surrogate(loss, tapered[turns.turn], ratios.vetoed)
