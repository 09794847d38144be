"""What was counted of rollouts from prompts: each prompt's own, those of new prompts, and how long rollouts last.

Owns the evidence that every predictor starts from, and its ageing. Invariants: memory is bounded; a rollout counts
once, by its own end only; `counts_state` and `counts_from` are exact inverses.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.outcomes import is_success
from trace_async.core.types import Group, GrownBy, Json, NodeState
from trace_async.errors import ConfigError
from trace_async.predictors.protocol import OPTIONS_KEY

Floats = NDArray[np.float64]

NUM_DEPTHS = 256
"""Depths with their own counts; deeper prefixes share the last one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOptions:
    """How evidence is kept and how it ages; options of every predictor."""

    prior_rollouts: float = 2.0  # how many rollouts the prior of an unseen prompt weighs
    prior: Literal["learned", "uniform"] = "learned"  # its mean: that of prompts seen for the first time, or 1/2
    discount: float = 0.8  # lambda: what a prompt's evidence is worth at its next visit
    half_life_versions: float = 16.0  # evidence halves in so many policy versions, visited or not; 0: never
    memory_rollouts: float = 1024.0  # horizon of the statistics shared by all prompts
    max_prompts: int = 8192  # prompts remembered; the one not seen for longest is forgotten first

    def __post_init__(self) -> None:
        for name, low in (("prior_rollouts", 0.0), ("memory_rollouts", 1.0), ("max_prompts", 0)):
            if not getattr(self, name) > low:
                raise ConfigError(f"{OPTIONS_KEY}.{name} must be more than {low:g}, got {getattr(self, name)}")
        if not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"{OPTIONS_KEY}.discount must lie between 0 and 1, got {self.discount:g}")
        if not self.half_life_versions >= 0.0:
            raise ConfigError(f"{OPTIONS_KEY}.half_life_versions must be at least 0, got {self.half_life_versions:g}")


class Tally(NamedTuple):
    """A prompt's evidence."""

    successes: float
    failures: float
    version: float  # the policy version to which both are discounted


class Counts:
    """Discounted successes and failures.

    Prompt. Each rollout that starts at the prompt is one draw; only its own end counts, not its continuations', since
    those are granted by looking at outcomes. A draw of policy version w counts 2^-(W - w)/h at the newest version W
    seen, h = half_life_versions, so what is known of a prompt fades while the policy moves on, visited or not, and a
    prompt that was always or never solved comes back. At every further visit what is left is multiplied by lambda =
    discount, as in MoPPS (arXiv 2507.04632): with a prior Beta(a, b) that does not move, alpha = a + s and
    s <- lambda s + new is its alpha <- lambda alpha + (1 - lambda) a + new.

    First visits. `rate` is the success rate of prompts seen for the first time: later visits are chosen by belief and
    would pull it towards one half.

    Lasting. Let S_t, F_t be the numbers of root rollouts, over all prompts, that went on after turn t and later
    succeeded, failed. If how long a success or a failure lasts does not depend on the prompt, Bayes' rule gives

        odds(success | prompt, alive after t) = odds(success | prompt) (S_t / S_0) / (F_t / F_0)

    exactly. S_t + F_t is shrunk by one rollout of the overall rate, so a depth that nobody reached changes nothing.
    """

    def __init__(self, options: CountOptions) -> None:
        self._options = options
        self.prompts: OrderedDict[str, Tally] = OrderedDict()  # longest unseen first
        self.first_visits = np.zeros(2)  # successes, failures
        self.alive = np.zeros((NUM_DEPTHS, 2))  # [t] S_t, F_t
        self.newest_version = 0  # of the policy, among the rollouts seen
        # Derived from the counts; None when these have changed.
        self._survived: list[float] | None = None
        self._rate: float | None = None

    @property
    def rate(self) -> float:
        """Mean of an unseen prompt's prior."""
        if self._rate is None:
            seen = self.first_visits
            learned = self._options.prior == "learned"
            self._rate = float((seen[0] + 1.0) / (seen.sum() + 2.0)) if learned else 0.5
        return self._rate

    def evidence(self, prompt_id: str) -> tuple[float, float]:
        """Successes and failures of a prompt's rollouts, as much as they are worth now; (0, 0) of an unseen one."""
        tally = self.prompts.get(prompt_id)
        if tally is None:
            return 0.0, 0.0
        left = self._left(self.newest_version - tally.version)
        return tally.successes * left, tally.failures * left

    def mean(self, prompt_id: str) -> tuple[float, float]:
        """Mean of what is believed of a prompt, and the share of that belief that is its own evidence, in [0, 1)."""
        successes, failures = self.evidence(prompt_id)
        strength = self._options.prior_rollouts + successes + failures
        return (self._options.prior_rollouts * self.rate + successes) / strength, (successes + failures) / strength

    def survival_log_odds(self, depth: int) -> float:
        """log of (S_t / S_0) / (F_t / F_0) at t = `depth`, shrunk."""
        if self._survived is None:
            rate = (self.alive[0] + 1.0) / (self.alive[0].sum() + 2.0)
            log_counts = np.log(self.alive + rate)
            survived = log_counts - log_counts[0]
            self._survived = (survived[:, 0] - survived[:, 1]).tolist()
        return self._survived[min(depth, NUM_DEPTHS - 1)]

    def observe(self, group: Group) -> None:
        """Count the group's rollouts from the prompt; those that failed or were closed tell nothing."""
        rollouts = [one for one in prompt_rollouts(group) if group.state[one.end] == NodeState.LEAF]
        if not rollouts:
            return
        self._survived = self._rate = None
        keep = (1.0 - 1.0 / self._options.memory_rollouts) ** len(rollouts)
        self.alive *= keep
        drawn = np.zeros(2)
        self.newest_version = max(self.newest_version, *(int(group.version_max[one.end]) for one in rollouts))
        worth = np.zeros(2)
        succeeded = is_success(group.outcome, group.success_above)
        for one in rollouts:
            side = 0 if succeeded[one.end] else 1
            drawn[side] += 1.0
            worth[side] += self._left(self.newest_version - int(group.version_min[one.start]))
            self.alive[: min(one.turns, NUM_DEPTHS), side] += 1.0  # it went on after turns 0 .. turns - 1
        if group.prompt_id not in self.prompts:
            self.first_visits = self.first_visits * keep + drawn
        after = np.array(self.evidence(group.prompt_id)) * self._options.discount + worth
        self.prompts.pop(group.prompt_id, None)
        self.prompts[group.prompt_id] = Tally(float(after[0]), float(after[1]), self.newest_version)
        self.forget()

    def forget(self) -> None:
        """Keep no more prompts than may be remembered."""
        while len(self.prompts) > self._options.max_prompts:
            self.prompts.popitem(last=False)

    def _left(self, versions: float) -> float:
        half_life = self._options.half_life_versions
        return 0.5 ** (max(0.0, versions) / half_life) if half_life else 1.0


def in_order(groups: Sequence[Group]) -> list[Group]:
    """One order, whatever the order of arrival: a resumed run may take in the trees of a step in another."""
    return sorted(groups, key=lambda group: (group.prompt_id, group.group_id))


class PromptRollout(NamedTuple):
    """A rollout that started at the prompt, its own chain only."""

    start: int  # turn index of its first turn
    end: int  # turn index of its last
    turns: int


def prompt_rollouts(group: Group) -> list[PromptRollout]:
    """Every rollout that started at the prompt and was not chosen by looking at it."""
    found: dict[int, PromptRollout] = {}  # by the last turn so far
    for turn, parent in enumerate(group.parent.tolist()):
        if parent < 0 and group.grown_by[turn] != GrownBy.SELECTED:
            found[turn] = PromptRollout(turn, turn, 1)
        elif group.grown_by[turn] == GrownBy.CHAIN and parent in found:
            above = found.pop(parent)
            found[turn] = PromptRollout(above.start, turn, above.turns + 1)
    return list(found.values())


def counts_state(counts: Counts) -> dict[str, Any]:
    """Counts of prompts (longest unseen first), of first visits, and of depths reached, as JSON."""
    depths = int(np.flatnonzero(counts.alive.any(axis=1)).max(initial=-1)) + 1
    return {
        "prompts": [[prompt_id, *tally] for prompt_id, tally in counts.prompts.items()],
        "first_visits": counts.first_visits.tolist(),
        "alive": counts.alive[:depths].tolist(),
        "newest_version": counts.newest_version,
    }


COUNT_KEYS = frozenset(("prompts", "first_visits", "alive", "newest_version"))


def counts_from(state: Json, options: CountOptions) -> Counts:
    """The counts that `counts_state` told, under the bound of `options`. Raises ValueError when it is malformed."""
    if not isinstance(state, dict) or set(state) != COUNT_KEYS:
        raise ValueError(f"state of a predictor: counts must have exactly {sorted(COUNT_KEYS)}")
    counts = Counts(options)
    told, rows, newest = state["prompts"], state["alive"], state["newest_version"]
    if not isinstance(told, list) or not isinstance(rows, list) or not all(isinstance(entry, list) for entry in told):
        raise ValueError("state of a predictor: prompts must be lists in a list, alive a list")
    if type(newest) is not int or newest < 0:
        raise ValueError(f"state of a predictor: newest_version must be a count, got {newest!r}")
    counts.prompts = OrderedDict((_prompt_id(entry), _tally(entry)) for entry in told)
    if len(rows) > NUM_DEPTHS or len(counts.prompts) != len(told):
        raise ValueError(f"state of a predictor: {len(rows)} depths > {NUM_DEPTHS}, or a prompt told twice")
    for depth, row in enumerate(rows):
        counts.alive[depth] = _numbers(row, 2, f"alive after turn {depth}")
    counts.first_visits = np.array(_numbers(state["first_visits"], 2, "first_visits"))
    counts.newest_version = newest
    counts.forget()
    return counts


def _prompt_id(entry: list[Any]) -> str:
    if not entry or not isinstance(entry[0], str):
        raise ValueError(f"state of a predictor: {entry} does not start with a prompt id")
    return entry[0]


def _tally(entry: list[Any]) -> Tally:
    successes, failures, version = _numbers(entry[1:], 3, f"prompt {entry[0]}")
    return Tally(successes, failures, version)


def _numbers(values: Any, count: int, what: str) -> list[float]:
    numbers = values if isinstance(values, list) else []
    good = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x >= 0 for x in numbers)
    if len(numbers) != count or not good:
        raise ValueError(f"state of a predictor: {what} must be {count} numbers >= 0, got {values!r}")
    return [float(number) for number in numbers]
