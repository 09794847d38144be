"""GSPO (arXiv 2507.18071): one ratio for a whole sequence, the geometric mean of its tokens' ratios, clipped as one.

`gspo_turn`: a sequence is a turn. Maximises, over turns n of len_n tokens,

    sum_n  mass_n M_n [ A+_n min(s_n, 1 + clip_high) + A-_n max(s_n, 1 - clip_low) ],  log s_n = mean_t logp_t - mu_t

with A+ and A- the parts of the turn's advantage from leaves above and below zero. That is the flattened tree's loss,
since a turn's ratio is the same in every row that it stands in. A token of a turn that is not clipped has s_n / len_n.

`gspo_path`: a sequence is the path to a leaf l, as in the paper, where responses are not trees:

    sum_l  mass_l  min( s_l A_l,  clip(s_l, 1 - clip_low, 1 + clip_high) A_l )

so a token of turn n has C_n = sum over leaves below of mass_l A_l s_l 1[l not clipped] / len_l. Turns on the path that
carry no loss (over age, or vetoed) count in s_l and len_l and get no gradient; one with a log-probability that is not
finite takes the leaves below it out.

Ratios are to the behaviour policy; caps by age play no part, since the clip is far below any of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import GspoOptions
from trace_async.methods.objectives.ratios import (
    Ratios,
    bounded_exp,
    count_in_turn,
    make_ratios,
    mean_in_turn,
    sum_in_turn,
)
from trace_async.methods.objectives.trees import Branches, unreadable
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def gspo_turn(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: GspoOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    ratio = bounded_exp(mean_in_turn(_moving(ratios, turns), turns))
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    gain = turns.positive * ratio.clamp(max=high) + turns.negative * ratio.clamp(min=low)
    clipped = ((ratio > high) & (turns.positive > 0)) | ((ratio < low) & (turns.negative < 0))
    return Surrogate(-(turns.mass * gain)[ratios.usable].sum(), clipped[turns.turn], ratios.vetoed)


def gspo_path(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: GspoOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    branches = Branches(turns)
    tokens = branches.sum_on_path(count_in_turn(turns))
    ratio = bounded_exp(branches.sum_on_path(sum_in_turn(_moving(ratios, turns), turns)) / tokens.clamp(min=1.0))
    broken = branches.sum_on_path(unreadable(logprobs, turns).to(ratio.dtype)) > 0
    leaf = (tokens > 0) & ~broken & ~torch.isnan(turns.leaf_advantage)
    advantage = torch.where(leaf, turns.leaf_advantage, 0.0)
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    bounded = torch.where(advantage > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    clipped = leaf & torch.where(advantage > 0, ratio > high, (ratio < low) & (advantage < 0))
    touched = branches.sum_below(clipped.to(ratio.dtype)) > 0
    return Surrogate(-(turns.mass * advantage * bounded).sum(), touched[turns.turn], ratios.vetoed)


def _moving(ratios: Ratios, turns: TurnTensors) -> Tensor:
    """Token log-ratios [n] whose gradient flows where a turn carries loss."""
    flows = ratios.usable[turns.turn].to(ratios.logprobs.dtype)
    return ratios.log_ratio + flows * (ratios.logprobs - ratios.logprobs.detach())
