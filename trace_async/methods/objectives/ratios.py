"""The one computation of importance ratios, and the guards that every objective shares: caps, vetoes, broken numbers.

Invariants: float32; masks before exponentials, exponents clamped, so no ratio overflows and nothing is inf x 0; a token
whose log-probabilities are not finite takes its whole turn out of the loss and is counted, so a loss is never NaN (a
model whose logits are NaN still has NaN gradients: that is the trainer's to see). Ratios are trained over behaviour
policy unless another anchor is named.

Legend: n tokens at hand · J turns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objectives.turns import TurnTensors

LOG_RATIO_BOUND = 20.0
"""Exponents are clamped to +-20: e^20 is beyond any cap, and float32 overflows near e^88."""


class Ratios(NamedTuple):
    """Trained over behaviour policy, and who may take part."""

    logprobs: Tensor  # f32 [n] with gradient; 0 without gradient where not finite
    log_ratio: Tensor  # f32 [n] detached; 0 where not finite
    ratio: Tensor  # f32 [n] detached, exponent clamped
    broken: Tensor  # bool [J] trained turns with a log-probability that is not finite
    vetoed: Tensor  # bool [J] trained turns outside the trust window, not broken
    usable: Tensor  # bool [J] trained turns that are neither


def make_ratios(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig) -> Ratios:
    """The ratios of the tokens at hand, `logprobs` f32 [n].

    A turn is vetoed when its geometric mean ratio leaves [veto_low, veto_high] or when one of its tokens has a ratio
    below veto_token; a bound of 0 is no bound. Only turns with tokens at hand can be usable.
    """
    logp = logprobs.to(torch.float32)
    log_ratio = logp.detach() - turns.behaviour_logprobs
    finite = torch.isfinite(log_ratio)
    if turns.proximal_logprobs is not None:
        finite = finite & torch.isfinite(turns.proximal_logprobs)
    log_ratio = torch.where(finite, log_ratio, 0.0)
    present = any_in_turn(torch.ones_like(finite), turns)
    broken = any_in_turn(~finite, turns) & turns.trained
    vetoed = _outside(log_ratio, turns, config) & turns.trained & present & ~broken
    return Ratios(
        logprobs=torch.where(finite, logp, 0.0),
        log_ratio=log_ratio,
        ratio=bounded_exp(log_ratio),
        broken=broken,
        vetoed=vetoed,
        usable=turns.trained & present & ~broken & ~vetoed,
    )


def caps(turns: TurnTensors, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Caps of importance weights for positive and for negative advantages, f32 [J] each.

    Positive: C(s) = 1 + (cap_positive - 1) cap_decay^s at age s. Negative: cap_negative at age 0, then 1, as in V-trace
    and TOPR, since stale negatives are what destabilises off-policy policy gradients. TIGHT: 1, either sign.
    """
    age = turns.age.to(torch.float32)
    positive = 1.0 + (config.cap_positive - 1.0) * torch.pow(torch.full_like(age, config.cap_decay), age)
    negative = torch.where(turns.age == 0, config.cap_negative, 1.0)
    one = torch.ones_like(positive)
    return torch.where(turns.tight, one, positive), torch.where(turns.tight, one, negative)


def cap_of_sign(turns: TurnTensors, config: ObjectiveConfig) -> Tensor:
    """The cap that goes with the sign of each turn's advantage, f32 [J]."""
    positive, negative = caps(turns, config)
    return torch.where(turns.advantage > 0, positive, negative)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of an exponent clamped to +-LOG_RATIO_BOUND; no gradient beyond."""
    return torch.exp(exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def sum_in_turn(values: Tensor, turns: TurnTensors) -> Tensor:
    """Sum of `values` [n] over each turn's tokens at hand, [J]; differentiable."""
    return values.new_zeros(turns.num_turns).index_add(0, turns.turn, values)


def count_in_turn(turns: TurnTensors) -> Tensor:
    """Tokens at hand of each turn, f32 [J]."""
    return sum_in_turn(torch.ones_like(turns.behaviour_logprobs), turns)


def mean_in_turn(values: Tensor, turns: TurnTensors) -> Tensor:
    """Mean of `values` [n] over each turn's tokens at hand, [J]; 0 for a turn without any; differentiable."""
    return sum_in_turn(values, turns) / count_in_turn(turns).clamp(min=1.0)


def any_in_turn(flags: Tensor, turns: TurnTensors) -> Tensor:
    """Turns with at least one flagged token at hand, bool [J]."""
    return sum_in_turn(flags.to(torch.float32), turns) > 0


def _outside(log_ratio: Tensor, turns: TurnTensors, config: ObjectiveConfig) -> Tensor:
    geometric = mean_in_turn(log_ratio, turns)
    outside = (geometric < _log(config.veto_low)) | (geometric > _log(config.veto_high))
    return outside | any_in_turn(log_ratio < _log(config.veto_token), turns)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf
