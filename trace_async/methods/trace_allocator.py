"""TRACE, "Tree Rollout Allocation for Contrastive Exploration" (arXiv 2606.11119), stage two: which prefixes go on.

An anchor is a non-leaf prefix of a root rollout whose outcome r is known. With u the predicted success there, one
continuation repeats r with q = r u + (1-r)(1-u), and k of them are worth V_pref(k) = 1 - q^k, the chance that one
flips it. Each grant takes the anchors whose next continuation adds most; earlier ones at an anchor count, running or
ended, but what came of them is not looked at: a number of continuations that depended on their own outcomes would
bias every estimate made from them.

    mode  joint      all m N continuations of a prompt when its m root rollouts have ended: the paper
          streaming  each root rollout's N continuations the moment it ends, over the anchors known by then; nothing
                     waits for the slowest rollout, fewer anchors are in the choice. Continuations that would add less
                     than `hold_below` stay for the ends to come, and are spent with the last
    form  point      u is taken for the truth: the (k+1)-th continuation adds q^k (1-q)
          beta       success ~ Beta(strength u, strength (1-u)): it adds E[q^k (1-q)]

`point` is the default because predictors give a mean at a prefix and nothing else; `strength` would be a guess.

A rollout that failed tells no outcome and lends no anchors. Where the prompt turns out to have none (every rollout had
one turn or failed, or the tree cannot branch) its continuations become rollouts from the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from trace_async.core.nodes import Node
from trace_async.core.outcomes import is_success
from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, GrownBy
from trace_async.errors import ConfigError
from trace_async.methods.allocation import Counts, allocate_prefixes, allocate_prefixes_beta, repeat_probability
from trace_async.methods.growth_rules import (
    RootRollouts,
    bare_rollout,
    continuations,
    continuations_due,
    root_rollouts,
)

UNKNOWN_SUCCESS = 0.5
"""What stands in for a prediction that could not be had: no opinion, so success and failure repeat equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of `trace`."""

    mode: Literal["streaming", "joint"] = "streaming"  # when continuations are granted
    hold_below: float = 0.5  # of "streaming": least chance of a flip for which one is granted before the last end
    form: Literal["point", "beta"] = "point"  # how far a prediction is trusted
    strength: float = 8.0  # of form "beta": how many rollouts' worth of evidence a prediction stands for
    clip: float = 0.02  # predicted success is kept in [clip, 1 - clip], so that no anchor is ever worth nothing
    cost_aware: bool = False  # divide what a continuation is worth by the tokens it is expected to cost

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < 0.5:
            raise ConfigError(f"tree.options.clip must lie between 0 and 0.5, got {self.clip:g}")
        if not 0.0 <= self.hold_below <= 1.0:
            raise ConfigError(f"tree.options.hold_below is a probability, 0 to 1, got {self.hold_below:g}")
        if self.strength <= 0.0:
            raise ConfigError(f"tree.options.strength must be a positive number of rollouts, got {self.strength:g}")


class TraceAllocator(RootRollouts):
    """Continuations go to the anchors where they most likely flip the outcome seen."""

    def __init__(self, options: TraceOptions, rng: np.random.Generator) -> None:
        self._options = options
        self._rng = rng

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """What is due at the end of that root rollout; nothing when a continuation ended."""
        share = continuations_due(tree, node_id)
        is_last = share == tree.continuations_left
        if share == 0 or (self._options.mode == "joint" and not is_last):
            return []
        anchors = known_anchors(tree)
        if anchors:
            counts = self._allocate(anchors, share, at_least=0.0 if is_last else self._options.hold_below)
            return continuations({anchor.node_id: int(count) for anchor, count in zip(anchors, counts, strict=True)})
        # Only a tree that cannot branch is known to have no anchors before its last root rollout has ended.
        return continuations({ROOT: share}) if is_last or not tree.can_branch else []

    def _allocate(self, anchors: Sequence[Anchor], share: int, *, at_least: float) -> Counts:
        """Continuations int64 [n] for each anchor, `share` in all but for those that would add less than `at_least`."""
        options = self._options
        success = np.clip([anchor.success for anchor in anchors], options.clip, 1.0 - options.clip)
        repeat = repeat_probability(success, [anchor.succeeded for anchor in anchors])
        granted = [anchor.granted for anchor in anchors]
        cost = suffix_costs(anchors) if options.cost_aware else None
        if options.form == "point":
            return allocate_prefixes(repeat, budget=share, rng=self._rng, granted=granted, cost=cost, at_least=at_least)
        a, b = options.strength * repeat, options.strength * (1.0 - repeat)
        return allocate_prefixes_beta(a, b, budget=share, rng=self._rng, granted=granted, cost=cost, at_least=at_least)


class Anchor(NamedTuple):
    """A place where continuations can be grown, and what is known there."""

    node_id: int
    depth: int  # turns from the prompt
    success: float  # predicted
    succeeded: bool  # the bare rollout through it
    granted: int  # continuations given so far, whatever became of them
    suffix_tokens: int  # that its bare rollout sampled below it


def known_anchors(tree: TurnTree) -> list[Anchor]:
    """Anchors of all root rollouts that reached an outcome, rollout by rollout from the prompt down."""
    if not tree.can_branch:
        return []
    anchors: list[Anchor] = []
    for first in root_rollouts(tree):
        chain = bare_rollout(tree, first)
        end = chain[-1].turn  # None when it failed; without an outcome while it runs or when it was closed
        if end is not None and not math.isnan(end.outcome):
            anchors += _anchors_of(chain, bool(is_success(end.outcome, tree.success_above)), tree)
    return anchors


def suffix_costs(anchors: Sequence[Anchor]) -> list[float]:
    """Sampled tokens [n] that a continuation of each anchor is expected to take; positive.

    The mean of what the anchor's own rollout took from there and of what all known rollouts took from that depth: one
    sample of the right place, steadied by the others.
    """
    by_depth: dict[int, list[int]] = {}
    for anchor in anchors:
        by_depth.setdefault(anchor.depth, []).append(anchor.suffix_tokens)
    mean = {depth: sum(tokens) / len(tokens) for depth, tokens in by_depth.items()}
    return [(anchor.suffix_tokens + mean[anchor.depth]) / 2.0 for anchor in anchors]


def _anchors_of(chain: Sequence[Node], succeeded: bool, tree: TurnTree) -> list[Anchor]:
    anchors, suffix_tokens = [], 0
    for node, below in zip(reversed(chain[:-1]), reversed(chain), strict=False):
        suffix_tokens += 0 if below.turn is None else below.turn.action_ids.size
        anchors.append(
            Anchor(node.node_id, node.depth, _predicted(node), succeeded, _num_granted(tree, node), suffix_tokens)
        )
    return anchors[::-1]


def _predicted(node: Node) -> float:
    return UNKNOWN_SUCCESS if node.score is None or math.isnan(node.score.success) else node.score.success


def _num_granted(tree: TurnTree, node: Node) -> int:
    return sum(tree.nodes[child].grown_by is not GrownBy.CHAIN for child in node.children)
