"""The policy that clipped ratios are taken to, and the weight that makes up for its not having sampled the tokens.

Decoupled PPO (arXiv 2110.00641; AReaL, 2505.24298): the ratio pi/prox says how far an update has gone, the weight
min(C, prox/mu) how stale the tokens are. `objective.proximal` names prox:

    behaviour     mu itself: plain PPO, weight 1
    recomputed    the weights that the optimizer step starts from, by one more forward pass
    interpolated  log prox = log mu + a (log sg pi - log mu), a = (s - 1)/s at age s >= 1 and 0 before: one training
                  step behind the trained policy, as if log-probabilities moved by the same amount at every step (A-3PO,
                  arXiv 2512.06547). No pass.

Legend: n tokens at hand · J turns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.errors import InvariantError
from trace_async.methods.objectives.ratios import Ratios, bounded_exp, caps
from trace_async.methods.objectives.turns import TurnTensors


class Anchored(NamedTuple):
    """Ratios to the proximal policy, f32 [n]."""

    ratio: Tensor  # pi / prox; gradient flows through pi, none beyond the bound on exponents
    weight_positive: Tensor  # min(C, prox/mu) for positive advantages, detached
    weight_negative: Tensor  # for negative ones
    capped_positive: Tensor  # bool [n] where the first was capped
    capped_negative: Tensor  # bool [n] where the second was


def take_anchor(ratios: Ratios, turns: TurnTensors, config: ObjectiveConfig) -> Anchored:
    """The anchor that the configuration names.

    Raises InvariantError where it is "recomputed" and nobody has computed it.
    """
    drift = _drift(ratios, turns, config.proximal)
    staleness = bounded_exp(drift)
    positive, negative = (cap[turns.turn] for cap in caps(turns, config))
    moved = ratios.logprobs - ratios.logprobs.detach() + ratios.log_ratio - drift
    return Anchored(
        ratio=bounded_exp(moved),
        weight_positive=torch.minimum(positive, staleness),
        weight_negative=torch.minimum(negative, staleness),
        capped_positive=staleness > positive,
        capped_negative=staleness > negative,
    )


def _drift(ratios: Ratios, turns: TurnTensors, proximal: str) -> Tensor:
    """log prox - log mu, [n] detached; 0 where a log-probability is not finite."""
    if proximal == "behaviour":
        return torch.zeros_like(ratios.log_ratio)
    if proximal == "interpolated":
        age = turns.age.to(torch.float32)
        share = torch.where(turns.age >= 1, (age - 1.0) / age.clamp(min=1.0), 0.0)
        return share[turns.turn] * ratios.log_ratio
    if turns.proximal_logprobs is None:
        raise InvariantError("objective.proximal = 'recomputed', but the proximal log-probabilities were not computed")
    drift = turns.proximal_logprobs.to(torch.float32) - turns.behaviour_logprobs
    return torch.where(torch.isfinite(drift), drift, 0.0)
