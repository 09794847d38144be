"""Truncated importance sampling on a turn tree, in the CISPO form: the default objective.

Maximises, over turns n,

    sum_n  mass_n  A_n  M_n  sum_t  sg[ min(C_n, exp(logp_t - mu_t)) ]  logp_t

with sg a stop-gradient, mu the behaviour log-probabilities, C_n the turn's cap by age and sign and M_n its veto. A
capped token keeps its gradient (CISPO, arXiv 2506.13585). Each turn carries one advantage, so by linearity this equals
the loss of the flattened tree, in which a shared turn stands in the row of every leaf below it, with leaf weights that
sum to the turn's mass.

Two factors of the general tree form are 1 here (`vtrace.py` has both): the prefix factor, the ratio of everything above
a turn, which would make its state distributed as under the trained policy; and the future ratio of what was sampled
below it, which would make its advantage an estimate of the trained policy's own value. Both are products over many
tokens, whose variance grows with depth, while the bias of leaving them out grows with age only: ages end at
`max_age_steps`, and after `soft_age_steps` caps are 1 (verdict TIGHT).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import NoOptions
from trace_async.methods.objectives.ratios import cap_of_sign, make_ratios
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def tree_tis(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: NoOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    cap = cap_of_sign(turns, config)[turns.turn]
    coefficient = (turns.mass * turns.advantage * ratios.usable)[turns.turn]
    gain = coefficient * torch.minimum(cap, ratios.ratio) * ratios.logprobs
    return Surrogate(-gain.sum(), ratios.ratio > cap, ratios.vetoed)
