"""The arithmetic of Listwise Policy Optimization (arXiv 2605.06139) on one set of alternatives, or a batch of sets.

K alternatives with rewards R and logits s, the log-ratios of trained over behaviour policy, make a listwise policy
P = softmax(s). The target w maximises sum_k w_k R_k - tau KL(w || P_t) over the simplex, with P_t = softmax(s_t) where
the update starts: w = softmax(R / tau + s_t); s_t = 0 where that is the sampler. The policy is moved towards it by a
divergence D(w, P), whose slopes c_k = dD/ds_k sum to zero over a set.

    forward_kl      KL(w || P)                                   covers every alternative that the target has
    reverse_kl      KL(P || w)                                   seeks the best; on-policy it is a plain policy gradient
    jensen_shannon  (KL(w || m) + KL(P || m)) / 2, m = (w+P)/2   between the two, bounded
    hellinger       1 - sum sqrt(w P)                            the squared distance
    alpha           (1 - sum w^a P^(1-a)) / (a (1 - a))          forward KL at a -> 1, reverse at a -> 0

Pure functions of any floating type. Legend: S sets · K alternatives, padded where `mask` is false.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jensen_shannon", "hellinger", "alpha"]
TauRule: TypeAlias = Literal["group_std", "one", "group_mean"]

TAU_OFFSET = 1e-6
"""Added to every tau, so that a set of equal rewards has a uniform target instead of 0 / 0."""

_PAD = -1e30  # a logit that is never chosen; finite, so that 0 times it is 0


def temperature(rewards: Tensor, mask: Tensor, *, rule: TauRule, floor: float) -> Tensor:
    """tau of each set, [S]: what divides rewards in the method that `rule` copies, at least `floor`, plus TAU_OFFSET.

    group_std: the standard deviation of the set's n rewards, divided by n, as GRPO's; one: as Dr.GRPO and RLOO, which
    do not divide; group_mean: as MaxRL, for rewards >= 0; a mean that is not above 0 divides by 1.
    """
    if rule == "one":
        return torch.ones_like(rewards[:, 0]) + TAU_OFFSET
    mean = _mean(rewards, mask)
    if rule == "group_mean":
        return torch.where(mean > 0, mean.clamp(min=floor), 1.0) + TAU_OFFSET
    return _mean((rewards - mean[:, None]).square(), mask).sqrt().clamp(min=floor) + TAU_OFFSET


def log_target(rewards: Tensor, mask: Tensor, tau: Tensor, start: Tensor | None = None) -> Tensor:
    """log w [S, K] for `rewards` [S, K] and `tau` [S]; a baseline that the whole set shares cancels.

    `start` [S, K] are the logits s_t of the policy that the target improves on; None: 0, the sampler.
    """
    centred = (rewards - _mean(rewards, mask)[:, None]) / tau[:, None]
    return log_policy(centred if start is None else centred + start, mask)


def log_policy(logits: Tensor, mask: Tensor) -> Tensor:
    """log softmax over each set, [S, K]; hugely negative in padding."""
    return torch.log_softmax(torch.where(mask, logits, _PAD), 1)


def slopes(log_p: Tensor, log_w: Tensor, *, divergence: Divergence, alpha: float) -> Tensor:
    """c = dD/ds [S, K], 0 in padding, from the logarithms of P and w.

    For any D, c_k = P_k (g_k - sum_j P_j g_j) with g = dD/dP. `alpha` is read by that divergence only.
    """
    p = log_p.exp()
    match divergence:
        case "forward_kl":
            return p - log_w.exp()
        case "reverse_kl":
            return _centred(p, log_p - log_w)
        case "jensen_shannon":
            log_middle = torch.logaddexp(log_p, log_w) - torch.log(p.new_tensor(2.0))
            return _centred(p, (log_p - log_middle) / 2)
        case "hellinger":
            both = ((log_p + log_w) / 2).exp()
            return (p * both.sum(1, keepdim=True) - both) / 2
        case "alpha":
            both = (alpha * log_w + (1 - alpha) * log_p).exp()
            return (p * both.sum(1, keepdim=True) - both) / alpha


def _centred(p: Tensor, slope: Tensor) -> Tensor:
    return p * (slope - (p * slope).sum(1, keepdim=True))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)
