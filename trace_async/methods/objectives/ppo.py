"""The clipped surrogate on a turn tree: PPO, DAPO, Dr.GRPO, and their decoupled forms.

Maximises, over turns n and their tokens,

    sum_n  mass_n  M_n  sum_t  b+ C+_n min(r, 1 + clip_high)  +  b- C-_n max(r, 1 - clip_low)

with r = pi/prox, b = sg min(C, prox/mu) by sign and age (`anchor.py`), M_n the turn's veto. C+_n and C-_n are the mean
over the leaves below of max(A, 0) and of min(A, 0): the clip bends at another side for each sign, so a turn below which
both occur has both terms. With them the sum is exactly that of the flattened tree, min(r A, clip(r) A) in the row of
every leaf; the net advantage would be another objective. Dual clip (arXiv 1912.09729): the second term's maximum is
bounded by `dual_clip` from above.

PPO: arXiv 1707.06347, one clip for both sides. DAPO: 2503.14476, a wider upper side. Dr.GRPO: 2503.20783, a constant
instead of lengths in the denominator.

A ratio beyond the bound on exponents has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import ClipOptions
from trace_async.methods.objectives.anchor import take_anchor
from trace_async.methods.objectives.ratios import make_ratios
from trace_async.methods.objectives.turns import Surrogate, TurnTensors


def ppo(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig, options: ClipOptions) -> Surrogate:
    """The loss of the tokens at hand; see `turns.py`."""
    ratios = make_ratios(logprobs, turns, config)
    anchored = take_anchor(ratios, turns, config)
    ratio, highest = anchored.ratio, 1.0 + options.clip_high
    upper = torch.clamp(ratio, max=highest)
    lower = torch.clamp(ratio, min=1.0 - options.clip_low)
    too_far = ratio < 1.0 - options.clip_low
    if options.dual_clip > 0.0:
        lower = torch.clamp(lower, max=options.dual_clip)
        too_far = too_far | (ratio > options.dual_clip)
    mass = (turns.mass * ratios.usable)[turns.turn]
    positive, negative = turns.positive[turns.turn], turns.negative[turns.turn]
    gain = anchored.weight_positive * positive * upper + anchored.weight_negative * negative * lower
    touched = ((positive > 0) & ((ratio > highest) | anchored.capped_positive)) | (
        (negative < 0) & (too_far | anchored.capped_negative)
    )
    return Surrogate(-(mass * gain).sum(), touched, ratios.vetoed)
