"""V-trace on a turn tree: values corrected for what was sampled below, weights for what was sampled above.

V-trace is IMPALA's (arXiv 1802.01561), the minimum of ratios above a turn is MinPRO's idea; the tree form is derived
here. Maximises, over turns n,

    sum_n  mass_n  A_n  kappa_n  M_n  sum_t  sg[ min(C_n, exp(logp_t - mu_t)) ]  logp_t

where the value of a turn is backed up over its k children m, drawn and with an outcome below, from leaves with V = R:

    V(n) = b_n + 1/k sum_m c_m (V(m) - b_n)      c_m = min(future_bar, ratio of turn m), or 1: the plain mean

    A_n     = V(n) - mean V of its siblings; a turn without any is compared with what the turn above it is compared
              with, and has A = 0 where there is nothing. `baseline = "belief"`: V(n) - b of the prefix it continues.
    kappa_n = min(prefix_bar, .) of the product of the ratios of all turns above, or of the smallest of their geometric
              means (`minimum`), or 1 (`none`)
    b_n     = the predictor's chance of success for the prefix after n, made before anything below n was sampled

With nothing truncated (products, no bars, turns of one token) this is an unbiased policy gradient of the trained policy
for every turn, and for every rule of branching that looks at the prefix only. Leaving out the future ratio keeps only
the last turns exact, leaving out the prefix factor only the first; tests enumerate both. In a turn of several tokens,
the token's own ratio stands for the turn's, as in `tree_tis`.

b is on the scale of a probability. Where outcomes are on another the values stay right in expectation without bars, for
any b, but truncated ratios (c < future_bar) draw values towards b, and noise is larger. Where the predictor was silent
b is that of the prefix above, at last 0.5.

A turn with a log-probability that is not finite counts as not drawn, and what is below it gets no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import VtraceOptions
from trace_async.methods.objectives.ratios import bounded_exp, caps, make_ratios, mean_in_turn, sum_in_turn
from trace_async.methods.objectives.trees import Branches, unreadable
from trace_async.methods.objectives.turns import Surrogate, TurnTensors

UNKNOWN_BELIEF = 0.5
"""Where nothing was predicted for a whole path."""


class Values(NamedTuple):
    """Per place, [J + G]: after each turn, then at each prompt. NaN where no outcome is below."""

    value: Tensor  # V
    belief: Tensor  # b, never NaN
    sums: Tensor  # summed V of the children that count
    children: Tensor  # how many those are


def vtrace(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: VtraceOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    branches = Branches(turns)
    broken = unreadable(logprobs, turns)
    product = sum_in_turn(ratios.log_ratio, turns)
    geometric = mean_in_turn(ratios.log_ratio, turns)
    values = back_up(_future_factor(product, geometric, options), turns, branches, broken)
    advantage = _advantages(values, turns, branches, options)
    prefix = _prefix_factor(product, geometric, branches, options)
    exact = ratios.usable & (branches.sum_on_path(broken.to(prefix.dtype)) == 0)
    positive, negative = caps(turns, config)
    cap = torch.where(advantage > 0, positive, negative)[turns.turn]
    coefficient = torch.where(exact, turns.mass * advantage * prefix, 0.0)[turns.turn]
    gain = coefficient * torch.minimum(cap, ratios.ratio) * ratios.logprobs
    return Surrogate(-gain.sum(), ratios.ratio > cap, ratios.vetoed)


def back_up(future: Tensor, turns: TurnTensors, branches: Branches, broken: Tensor) -> Values:
    """V of every place, from the leaves up; `future` [J] is c, `broken` bool [J] turns that do not count."""
    belief = _beliefs(turns, branches)
    children, sums, pulls = (torch.zeros_like(belief) for _ in range(3))
    value = torch.cat([turns.outcome, torch.full_like(turns.root_belief, torch.nan)])
    for level in reversed(branches.levels):
        value = value.index_copy(0, level, _value(value, belief, children, pulls)[level])
        level = level[turns.drawn[level] & ~broken[level] & ~torch.isnan(value[level])]
        place = branches.place[level]
        children = children.index_add(0, place, torch.ones_like(belief[place]))
        sums = sums.index_add(0, place, value[level])
        pulls = pulls.index_add(0, place, future[level] * (value[level] - belief[place]))
    return Values(_value(value, belief, children, pulls), belief, sums, children)


def _value(value: Tensor, belief: Tensor, children: Tensor, pulls: Tensor) -> Tensor:
    """V where children count, else what stands there: the outcome, or NaN."""
    return torch.where(children > 0, belief + pulls / children.clamp(min=1.0), value)


def _beliefs(turns: TurnTensors, branches: Branches) -> Tensor:
    belief = torch.cat([turns.belief, torch.nan_to_num(turns.root_belief, nan=UNKNOWN_BELIEF)])
    for level in branches.levels:
        above = belief[branches.place[level]]
        belief = belief.index_copy(0, level, torch.where(torch.isnan(belief[level]), above, belief[level]))
    return belief


def _advantages(values: Values, turns: TurnTensors, branches: Branches, options: VtraceOptions) -> Tensor:
    """A [J]; 0 where a value or something to compare it with is missing."""
    own = values.value[: turns.num_turns]
    if options.baseline == "belief":
        return torch.nan_to_num(own - values.belief[branches.place], nan=0.0)
    counts = turns.drawn & ~torch.isnan(own)  # a turn that was chosen is not among the draws it is compared with
    others = values.children[branches.place] - counts.to(own.dtype)
    baseline = (values.sums[branches.place] - torch.where(counts, own, 0.0)) / others.clamp(min=1.0)
    baseline = torch.where(others > 0, baseline, torch.nan)
    for level in branches.levels[1:]:
        inherited = baseline[turns.parent[level]]
        baseline = baseline.index_copy(0, level, torch.where(others[level] > 0, baseline[level], inherited))
    return torch.nan_to_num(own - baseline, nan=0.0)


def _future_factor(product: Tensor, geometric: Tensor, options: VtraceOptions) -> Tensor:
    """c [J] from the log-ratios of turns, summed and averaged over their tokens."""
    if options.future == "none":
        return torch.ones_like(product)
    return bounded_exp(geometric if options.future == "geometric" else product).clamp(max=options.future_bar)


def _prefix_factor(product: Tensor, geometric: Tensor, branches: Branches, options: VtraceOptions) -> Tensor:
    """kappa [J]; first turns have nothing above them."""
    if options.prefix == "none":
        return torch.ones_like(product)
    if options.prefix == "product":
        return bounded_exp(branches.sum_on_path(product) - product).clamp(max=options.prefix_bar)
    smallest = torch.full_like(geometric, torch.inf)  # log of the smallest ratio above
    for level in branches.levels[1:]:
        parent = branches.parent[level]
        smallest = smallest.index_copy(0, level, torch.minimum(smallest[parent], geometric[parent]))
    factor = torch.where(torch.isinf(smallest), 1.0, bounded_exp(smallest))
    return factor.clamp(max=options.prefix_bar)
