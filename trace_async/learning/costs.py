"""What a run has spent, in every unit in which methods are compared.

Owns the totals since the start of the run; a checkpoint carries them, so a resumed run counts on. Invariants: they are
about consumed groups only, each once; tokens of a prefix that rollouts share count once, as they were sampled once.

    sampled tokens        the unit in which methods are compared
    environment steps     played turns ("tool calls"); steps that only replay a recorded turn are not among them
    rollout equivalents   sampled tokens / mean tokens of a root rollout that came to an outcome
    nominal rollouts      roots + continuations / 2: a continuation is counted as half a rollout, wherever it starts
    seconds               wall time up to the last step; summed over turns, the time in engine and environment
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trace_async.core.outcomes import is_success
from trace_async.core.types import Group, GrownBy, NodeState
from trace_async.methods.forecasts import bare_outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Totals of the consumed groups."""

    sampled_tokens: int = 0
    environment_steps: int = 0
    roots: int = 0  # root rollouts begun
    continuations: int = 0  # begun
    chains: int = 0  # root rollouts that came to an outcome
    successes: int = 0  # of those, how many succeeded
    chain_tokens: int = 0  # sampled in those, along their own chains
    wall_s: float = 0.0  # from a start's first wait to its last step, all starts together
    generate_s: float = 0.0  # turns overlap, so the sums of both may be far over the wall time
    environment_s: float = 0.0

    @property
    def rollout_equivalents(self) -> float:
        """Sampled tokens in units of a whole root rollout; NaN before the first one came to an outcome."""
        return self.sampled_tokens * self.chains / self.chain_tokens if self.chain_tokens else math.nan

    @property
    def nominal_rollouts(self) -> float:
        """Roots, and continuations for half each."""
        return self.roots + self.continuations / 2

    def after(self, groups: Sequence[Group]) -> Costs:
        """The totals after a step that consumed these groups; the wall time is as before."""
        chains = [_chains(group) for group in groups]
        further = (GrownBy.CONTINUATION, GrownBy.SELECTED)
        return Costs(
            sampled_tokens=self.sampled_tokens + sum(group.num_sampled_tokens for group in groups),
            environment_steps=self.environment_steps + sum(_num_played(group) for group in groups),
            roots=self.roots + sum(int((group.grown_by == GrownBy.ROOT).sum()) for group in groups),
            continuations=self.continuations + sum(int(np.isin(group.grown_by, further).sum()) for group in groups),
            chains=self.chains + sum(number for number, _, _ in chains),
            successes=self.successes + sum(succeeded for _, succeeded, _ in chains),
            chain_tokens=self.chain_tokens + sum(tokens for _, _, tokens in chains),
            wall_s=self.wall_s,
            generate_s=self.generate_s + sum(_sum(group.generate_s) for group in groups),
            environment_s=self.environment_s + sum(_sum(group.environment_s) for group in groups),
        )

    def row(self) -> dict[str, float]:
        """The totals as metrics."""
        return {
            "rollout/sampled_tokens_total": self.sampled_tokens,
            "cost/environment_steps_total": self.environment_steps,
            "cost/rollout_equivalents_total": self.rollout_equivalents,
            "cost/nominal_rollouts_total": self.nominal_rollouts,
            "cost/wall_s_total": self.wall_s,
            "cost/generate_s_total": self.generate_s,
            "cost/environment_s_total": self.environment_s,
        }


def _num_played(group: Group) -> int:
    return int((group.state != NodeState.FAILED).sum())


def _chains(group: Group) -> tuple[int, int, int]:
    """Root rollouts with an outcome, how many succeeded, and the tokens sampled in all of them."""
    own: list[bool] = []  # the turn is on a root rollout's own chain
    for parent, grown_by in zip(group.parent.tolist(), group.grown_by.tolist(), strict=True):
        own.append(grown_by == GrownBy.ROOT or (grown_by == GrownBy.CHAIN and own[parent]))
    outcomes = bare_outcomes(group)
    whole = np.array(own, np.bool_) & ~np.isnan(outcomes)
    ended = outcomes[whole & (group.grown_by == GrownBy.ROOT)]
    return ended.size, int(is_success(ended, group.success_above).sum()), int(group.action_lengths[whole].sum())


def _sum(seconds: NDArray[np.float32]) -> float:
    return float(seconds.sum(dtype=np.float64))
