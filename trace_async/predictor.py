"""What a rollout's chance of success is, before and while it is played; serves the allocator and nothing else.

Owns the `Predictor` Protocol and `BetaPredictor`; `scoring.py` asks a predictor for many prefixes at once. Invariants:
a prediction looks at a prefix's past only; state is bounded; `state` and `load` are exact inverses, so a resumed run
predicts to the bit what the killed one would have. Needs no torch. Outcomes above 0.5 count as successes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import FloatArray, Group, GrownBy, Json, NodeState, Prefix
from trace_async.errors import ConfigError
from trace_async.methods.registry import pick, read_options

Floats = NDArray[np.float64]

OPTIONS_KEY = "predictor.options"

NUM_DEPTHS = 256
"""Depths with their own counts; deeper prefixes share the last one's."""

SUCCESS_ABOVE = 0.5


class Belief(NamedTuple):
    """Success probability of a prompt ~ Beta(alpha, beta)."""

    alpha: float
    beta: float

    @property
    def mean(self) -> float:
        """Predicted success probability."""
        return self.alpha / (self.alpha + self.beta)


class Predictor(Protocol):
    """Predicts at the actor, learns at the learner; `state` travels with every policy version."""

    @property
    def version(self) -> int:
        """Policy version with which the present parameters were published."""
        ...

    def score_prompt(self, prompt_id: str) -> Belief:
        """Belief about a root rollout of the prompt."""
        ...

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Success probability of a rollout that goes on from each prefix, float32 [prefixes] in [0, 1]."""
        ...

    def observe(self, group: Group) -> None:
        """Learn from a finished tree, once, when it is consumed."""
        ...

    def state(self) -> Json:
        """Everything `load` needs, as JSON."""
        ...

    def load(self, state: Json, *, version: int) -> None:
        """Become the predictor that `state` came from. Raises ValueError, and changes nothing, when it is malformed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaOptions:
    """Options of `beta`."""

    prior_rollouts: float = 2.0  # how many rollouts the prior of an unseen prompt weighs
    discount: float = 0.8  # lambda: what a prompt's evidence is worth at its next visit, since the policy moves on
    memory_rollouts: float = 1024.0  # horizon of the statistics shared by all prompts
    max_prompts: int = 8192  # prompts remembered; the one not seen for longest is forgotten first

    def __post_init__(self) -> None:
        for name, low in (("prior_rollouts", 0.0), ("memory_rollouts", 1.0), ("max_prompts", 0)):
            if not getattr(self, name) > low:
                raise ConfigError(f"{OPTIONS_KEY}.{name} must be more than {low:g}, got {getattr(self, name)}")
        if not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"{OPTIONS_KEY}.discount must lie between 0 and 1, got {self.discount:g}")


class BetaPredictor:
    """Counts, no learning: a Beta posterior for each prompt, and how success changes with the turns survived.

    Prompt. Each rollout that starts at the prompt is one draw; only its own end counts, not its continuations', since
    those are granted by looking at outcomes. With s successes and f failures, evidence discounted by lambda at every
    visit as in MoPPS (arXiv 2507.04632):

        v ~ Beta(c p + s, c (1-p) + f),   c = prior_rollouts, p = success rate of prompts seen for the first time

    p is learned from first visits only: later visits are chosen by belief and would pull it towards one half.

    Prefix after t turns. Let S_t, F_t be the numbers of root rollouts, over all prompts, that went on after turn t and
    later succeeded, failed. If how long a success or a failure lasts does not depend on the prompt, Bayes' rule gives

        odds(success | prompt, alive after t) = odds(v) (S_t / S_0) / (F_t / F_0)

    exactly, v being the posterior mean. S_t + F_t is shrunk by one rollout of the overall rate, so a depth that nobody
    reached leaves the prompt's own odds.
    """

    def __init__(self, options: BetaOptions) -> None:
        self._options = options
        self._version = 0  # knowing nothing is what is published with the start weights
        self._prompts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # s, f; longest unseen first
        self._first_visits = np.zeros(2)  # successes, failures
        self._alive = np.zeros((NUM_DEPTHS, 2))  # [t] S_t, F_t
        # Derived from the counts; None when these have changed.
        self._survived: list[float] | None = None
        self._rate: float | None = None

    @property
    def version(self) -> int:
        """Policy version of the state that was loaded last; 0 before any."""
        return self._version

    def score_prompt(self, prompt_id: str) -> Belief:
        """Posterior of the prompt."""
        if self._rate is None:
            self._rate = float((self._first_visits[0] + 1.0) / (self._first_visits.sum() + 2.0))
        rate = self._rate
        successes, failures = self._prompts.get(prompt_id, (0.0, 0.0))
        weight = self._options.prior_rollouts
        return Belief(float(weight * rate + successes), float(weight * (1.0 - rate) + failures))

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Posterior mean of each prefix's prompt, moved by the turns it has survived."""
        survived = self._survival_log_odds()
        success = np.empty(len(prefixes), np.float32)
        for place, prefix in enumerate(prefixes):
            alpha, beta = self.score_prompt(prefix.prompt_id)
            log_odds = math.log(alpha / beta) + survived[min(prefix.turn_index, NUM_DEPTHS - 1)]
            success[place] = 0.5 + 0.5 * math.tanh(0.5 * log_odds)
        return success

    def observe(self, group: Group) -> None:
        """Count the group's rollouts from the prompt; those that failed or were closed tell nothing."""
        rollouts = [(end, depth) for end, depth in _prompt_rollouts(group) if group.state[end] == NodeState.LEAF]
        if not rollouts:
            return
        successes = np.array([group.outcome[end] > SUCCESS_ABOVE for end, _ in rollouts])
        drawn = np.array([successes.sum(), (~successes).sum()], np.float64)
        self._survived = self._rate = None
        keep = (1.0 - 1.0 / self._options.memory_rollouts) ** len(rollouts)
        if group.prompt_id not in self._prompts:
            self._first_visits = self._first_visits * keep + drawn
        self._alive *= keep
        for succeeded, (_, depth) in zip(successes, rollouts, strict=True):
            self._alive[: min(depth, NUM_DEPTHS), 0 if succeeded else 1] += 1.0  # it went on after turns 0 .. depth - 1
        before = self._prompts.pop(group.prompt_id, (0.0, 0.0))
        after = np.array(before) * self._options.discount + drawn
        self._prompts[group.prompt_id] = (float(after[0]), float(after[1]))
        if len(self._prompts) > self._options.max_prompts:
            self._prompts.popitem(last=False)

    def state(self) -> Json:
        """Counts of prompts (longest unseen first), of first visits, and of depths reached."""
        depths = int(np.flatnonzero(self._alive.any(axis=1)).max(initial=-1)) + 1
        return {
            "kind": "beta",
            "prompts": [[prompt_id, *counts] for prompt_id, counts in self._prompts.items()],
            "first_visits": self._first_visits.tolist(),
            "alive": self._alive[:depths].tolist(),
        }

    def load(self, state: Json, *, version: int) -> None:
        """Take over what `state` returned, stamped with `version`; more prompts than `max_prompts` are forgotten."""
        prompts, first_visits, alive = _parsed(state)
        while len(prompts) > self._options.max_prompts:
            prompts.popitem(last=False)
        self._prompts, self._first_visits, self._alive, self._version = prompts, first_visits, alive, version
        self._survived = self._rate = None

    def _survival_log_odds(self) -> list[float]:
        """[t] log of (S_t / S_0) / (F_t / F_0), shrunk; kept until the counts change."""
        if self._survived is None:
            rate = (self._alive[0] + 1.0) / (self._alive[0].sum() + 2.0)
            log_counts = np.log(self._alive + rate)
            survived = log_counts - log_counts[0]
            self._survived = (survived[:, 0] - survived[:, 1]).tolist()
        return self._survived


def _prompt_rollouts(group: Group) -> list[tuple[int, int]]:
    """(turn index where it ends, turns played) of each rollout that started at the prompt, its own chain only."""
    end: dict[int, tuple[int, int]] = {}  # last turn of a chain so far -> its first turn, its depth
    for turn, parent in enumerate(group.parent.tolist()):
        if parent < 0 and group.grown_by[turn] != GrownBy.SELECTED:
            end[turn] = (turn, 1)
        elif group.grown_by[turn] == GrownBy.CHAIN and parent in end:
            first, depth = end.pop(parent)
            end[turn] = (first, depth + 1)
    return [(turn, depth) for turn, (_, depth) in end.items()]


def _parsed(state: Json) -> tuple[OrderedDict[str, tuple[float, float]], Floats, Floats]:
    """Prompts, first visits [2] and depths reached [NUM_DEPTHS, 2] of a state; ValueError when it is malformed."""
    if set(state) != {"kind", "prompts", "first_visits", "alive"} or state["kind"] != "beta":
        raise ValueError(f"not the state of a beta predictor: keys {sorted(state)}, kind {state.get('kind')!r}")
    told, rows = state["prompts"], state["alive"]
    if not isinstance(told, list) or not isinstance(rows, list) or not all(isinstance(entry, list) for entry in told):
        raise ValueError("state of a beta predictor: prompts must be lists in a list, alive a list")
    prompts = OrderedDict((_prompt_id(entry), _counts(entry[1:], f"prompt {entry[0]}")) for entry in told)
    if len(rows) > NUM_DEPTHS or len(prompts) != len(told):
        raise ValueError(f"state of a beta predictor: {len(rows)} depths > {NUM_DEPTHS}, or a prompt told twice")
    alive = np.zeros((NUM_DEPTHS, 2))
    for depth, row in enumerate(rows):
        alive[depth] = _counts(row, f"alive after turn {depth}")
    return prompts, np.array(_counts(state["first_visits"], "first_visits")), alive


def _prompt_id(entry: list[Any]) -> str:
    if not entry or not isinstance(entry[0], str):
        raise ValueError(f"state of a beta predictor: {entry} does not start with a prompt id")
    return entry[0]


def _counts(values: Any, what: str) -> tuple[float, float]:
    numbers = values if isinstance(values, list) else []
    good = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x >= 0 for x in numbers)
    if len(numbers) != 2 or not good:
        raise ValueError(f"state of a beta predictor: {what} must be two counts >= 0, got {values!r}")
    return float(numbers[0]), float(numbers[1])


def _make_beta(options: Mapping[str, Any]) -> Predictor:
    return BetaPredictor(read_options(BetaOptions, options, where=OPTIONS_KEY))


PREDICTORS: dict[str, Callable[[Mapping[str, Any]], Predictor]] = {"beta": _make_beta}


def make_predictor(kind: str, options: Mapping[str, Any]) -> Predictor:
    """The predictor that the configuration names. Raises ConfigError for a kind, option or value it does not know."""
    return pick(PREDICTORS, kind, where="predictor.kind")(options)
