"""LPO, Listwise Policy Optimization (arXiv 2605.06139), on the forks of a turn tree or on all its leaves.

Minimises, over sets of alternatives with target w and listwise policy P (`simplex.py`),

    sum_sets  mass  sum_k  sg[ c_k ]  (1 / len_k)  sum_t  clip( logp_t - mu_t,  log(1 - eps),  log(1 + eps) )

with c_k = dD(w, P)/ds_k at s_k = mean of the unclipped logp_t - mu_t over the alternative's tokens (their sum, and no
1 / len_k, with `normalise = false`). The clip is two-sided: a token outside it has no gradient, whatever its sign.

    simplex = "node"    A set is the children of one prefix, where two or more were drawn and have an outcome below. R
                        is the child's value. Its tokens are the child's turn and, while only one such child follows,
                        that child's too, up to the next fork or leaf. mass is the prefix's; tau is at least TAU_FLOOR,
                        since values of few siblings may be close together. Named as future work in the paper.
    simplex = "prompt"  The paper's: one set per prompt, all its leaves. R is the outcome, tokens are those of the whole
                        path; shared turns belong to several leaves. mass is 1.

A set's coefficients sum to zero and, for forward KL, their sizes to 2 at most, however many alternatives there are and
whatever rewards they got, so prompts with more rollouts do not weigh more. Importance weights and their caps play no
part: what a policy may move is bounded by the clip and by P, which follows it.

The listwise policy is relative to the behaviour policy: s = 0 where nothing was trained since. What the target improves
on (s_t in the paper, where both are one) is that policy with `start = "sampler"`, which pulls old data's alternatives
back to where they were sampled from; with "policy" it is the policy of this update, s_t = sg[s].

Turns that carry no loss (over age, or vetoed) give their ratio to s all the same. A turn with a log-probability that is
not finite takes its sets out of the loss. SELECTED turns are no draws and belong to no set. With equal rewards the
target is the start's: from the sampler, a fork whose children are equally good pulls a policy that has drifted back to
even.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import LpoOptions
from trace_async.methods.objectives.ratios import count_in_turn, make_ratios, sum_in_turn
from trace_async.methods.objectives.simplex import log_policy, log_target, slopes, temperature
from trace_async.methods.objectives.trees import Branches, unreadable
from trace_async.methods.objectives.turns import Surrogate, TurnTensors

TAU_FLOOR = 0.05
"""Least tau of a fork, in units of the outcome: what 1 in 20 leaves moves a value by."""


class _Alternatives(NamedTuple):
    """M members of sets."""

    simplex: Tensor  # i64 [M] which set, any numbers
    reward: Tensor  # [M]
    log_ratio: Tensor  # [M] the logit s, detached
    length: Tensor  # [M] what token log-ratios are divided by
    mass: Tensor  # [M] of the set
    sound: Tensor  # bool [M] every log-probability is finite


def lpo(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: LpoOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    weigh = _node_weights if options.simplex == "node" else _prompt_weights
    weight = weigh(sum_in_turn(ratios.log_ratio, turns), turns, unreadable(logprobs, turns), options)
    low, high = math.log1p(-options.epsilon), math.log1p(options.epsilon)
    moving = ratios.log_ratio + (ratios.logprobs - ratios.logprobs.detach())
    loss = ((weight * ratios.usable)[turns.turn] * moving.clamp(low, high)).sum()
    return Surrogate(loss, (ratios.log_ratio < low) | (ratios.log_ratio > high), ratios.vetoed)


def _node_weights(log_ratio: Tensor, turns: TurnTensors, broken: Tensor, options: LpoOptions) -> Tensor:
    """What each token of a turn is weighted by, [J]; `log_ratio` [J] summed over the turn's tokens."""
    branches = Branches(turns)
    segment = _segments(turns, branches)
    inside = segment >= 0
    at = segment.clamp(min=0)

    def in_segment(values: Tensor) -> Tensor:
        return torch.zeros_like(log_ratio).index_add(0, at, torch.where(inside, values, 0.0))

    heads = torch.nonzero(segment == torch.arange(turns.num_turns, device=segment.device))[:, 0]
    length = (
        in_segment(count_in_turn(turns))[heads].clamp(min=1.0) if options.normalise else turns.mass.new_ones(len(heads))
    )
    parent = turns.parent[heads]
    members = _Alternatives(
        simplex=branches.place[heads],
        reward=turns.value[heads],
        log_ratio=in_segment(log_ratio)[heads] / length,
        length=length,
        mass=torch.where(parent >= 0, turns.mass[parent.clamp(min=0)], 1.0),
        sound=in_segment(broken.to(log_ratio.dtype))[heads] == 0,
    )
    weight = torch.zeros_like(log_ratio).index_copy(0, heads, _weights(members, options, floor=TAU_FLOOR))
    return torch.where(inside, weight[at], 0.0)


def _segments(turns: TurnTensors, branches: Branches) -> Tensor:
    """The first turn of the alternative that each turn belongs to, i64 [J]; -1 where it belongs to none."""
    counts = turns.drawn & ~torch.isnan(turns.value)
    siblings = branches.sum_at_place(counts.to(turns.mass.dtype))[branches.place]
    itself = torch.arange(turns.num_turns, device=counts.device)
    segment = torch.where(counts & (siblings > 1), itself, -1)
    for level in branches.levels[1:]:
        goes_on = counts[level] & (siblings[level] == 1)
        segment = segment.index_copy(0, level, torch.where(goes_on, segment[turns.parent[level]], segment[level]))
    return segment


def _prompt_weights(log_ratio: Tensor, turns: TurnTensors, broken: Tensor, options: LpoOptions) -> Tensor:
    """As `_node_weights`."""
    branches = Branches(turns)
    selected = branches.sum_on_path((~turns.drawn).to(log_ratio.dtype)) > 0
    leaves = torch.nonzero(~torch.isnan(turns.outcome) & ~selected)[:, 0]
    length = branches.sum_on_path(count_in_turn(turns))[leaves].clamp(min=1.0)
    length = length if options.normalise else torch.ones_like(length)
    members = _Alternatives(
        simplex=turns.group[leaves],
        reward=turns.outcome[leaves],
        log_ratio=branches.sum_on_path(log_ratio)[leaves] / length,
        length=length,
        mass=torch.ones_like(length),
        sound=branches.sum_on_path(broken.to(log_ratio.dtype))[leaves] == 0,
    )
    weight = _weights(members, options, floor=0.0)
    return branches.sum_below(torch.zeros_like(log_ratio).index_copy(0, leaves, weight))


def _weights(members: _Alternatives, options: LpoOptions, *, floor: float) -> Tensor:
    """mass x c / length of each member, [M]."""
    if len(members.simplex) == 0:
        return members.mass
    _, row, counts = torch.unique(members.simplex, return_inverse=True, return_counts=True)
    order = torch.argsort(row, stable=True)
    rank = torch.empty_like(row)
    rank[order] = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row[order]]
    shape = (len(counts), int(counts.max()))

    def padded(values: Tensor) -> Tensor:
        return values.new_zeros(shape).index_put((row, rank), values)

    mask, rewards = padded(torch.ones_like(members.sound)), padded(members.reward)
    tau = temperature(rewards, mask, rule=options.tau, floor=floor)
    logits = padded(members.log_ratio)
    slope = slopes(
        log_policy(logits, mask),
        log_target(rewards, mask, tau, logits if options.start == "policy" else None),
        divergence=options.divergence,
        alpha=options.alpha,
    )[row, rank]
    whole = padded(~members.sound).sum(1) == 0
    return torch.where(whole[row], members.mass * slope / members.length, 0.0)
