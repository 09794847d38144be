"""Objectives that weigh a token by its capped ratio, or drop it: IcePop, DPPO and IPO.

All maximise, over turns n and their tokens,

    sum_n  mass_n  M_n  sum_t  [ keep+ C+_n min(cap+, R) + keep- C-_n min(cap-, R) ]  logp

with R = sg pi/mu, caps by sign and age, M_n the turn's veto, C+_n and C-_n the mean over the leaves below of max(A, 0)
and of min(A, 0). They differ in what they keep:

    IcePop (arXiv 2510.18855)  R within [low, high]
    DPPO (as in prime-rl)      for A > 0: p_pi - p_mu <= high; for A < 0: p_pi - p_mu >= -low
    IPO (as in prime-rl)       |p_pi - p_mu| <= delta

with p the probabilities themselves, so a rare token may move by a large ratio. DPPO and IPO add -kl_tau (log R)^2 for
every token of a usable turn, dropped or not, times the turn's mass: gradient flows through the square, log R being held
within the bound on exponents. IcePop's window knows no sign, so one weight with the turn's own advantage is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import DppoOptions, IpoOptions, WindowOptions
from trace_async.methods.objectives.ratios import (
    LOG_RATIO_BOUND,
    Ratios,
    bounded_exp,
    cap_of_sign,
    caps,
    make_ratios,
)
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def icepop(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: WindowOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    cap = cap_of_sign(turns, config)[turns.turn]
    inside = (ratios.ratio >= options.low) & (ratios.ratio <= options.high)
    coefficient = (turns.mass * turns.advantage * ratios.usable)[turns.turn]
    gain = coefficient * torch.minimum(cap, ratios.ratio) * inside * ratios.logprobs
    return Surrogate(-gain.sum(), ~inside | (ratios.ratio > cap), ratios.vetoed, ~inside)


def dppo(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: DppoOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    moved = _moved(ratios, turns)
    kept = weigh_kept(ratios, turns, config, keep_positive=moved <= options.high, keep_negative=moved >= -options.low)
    return kept._replace(loss=kept.loss + options.kl_tau * _squares(ratios, turns))


def ipo(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: IpoOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    near = _moved(ratios, turns).abs() <= options.delta
    kept = weigh_kept(ratios, turns, config, keep_positive=near, keep_negative=near)
    return kept._replace(loss=kept.loss + options.kl_tau * _squares(ratios, turns))


def weigh_kept(
    ratios: Ratios, turns: TurnTensors, config: ObjectiveConfig, *, keep_positive: Tensor, keep_negative: Tensor
) -> Surrogate:
    """The sum at the top, negated, for any masks [n] by sign."""
    cap_positive, cap_negative = (cap[turns.turn] for cap in caps(turns, config))
    positive, negative = turns.positive[turns.turn], turns.negative[turns.turn]
    weight = positive * keep_positive * torch.minimum(cap_positive, ratios.ratio)
    weight = weight + negative * keep_negative * torch.minimum(cap_negative, ratios.ratio)
    gain = (turns.mass * ratios.usable)[turns.turn] * weight * ratios.logprobs
    masked = ((positive > 0) & ~keep_positive) | ((negative < 0) & ~keep_negative)
    capped = ((positive > 0) & (ratios.ratio > cap_positive)) | ((negative < 0) & (ratios.ratio > cap_negative))
    return Surrogate(-gain.sum(), masked | capped, ratios.vetoed, masked)


def _moved(ratios: Ratios, turns: TurnTensors) -> Tensor:
    """Probability under the trained policy less that under the behaviour policy, [n]; 0 for broken tokens."""
    now = ratios.logprobs.detach()
    return bounded_exp(now) - bounded_exp(now - ratios.log_ratio)


def _squares(ratios: Ratios, turns: TurnTensors) -> Tensor:
    """Sum of mass x (log R)^2 over usable turns, []."""
    log_ratio = ratios.logprobs - ratios.logprobs.detach() + ratios.log_ratio
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return ((turns.mass * ratios.usable)[turns.turn] * bounded.square()).sum()
