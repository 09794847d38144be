"""From `objective.kind` to its function, and the one door through which the trainer uses it."""

from __future__ import annotations

from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.core.packing import Denominators
from trace_async.methods.objective_kinds import Normaliser, Scope, kind_of, options_of
from trace_async.methods.objectives.gspo import gspo_path, gspo_turn
from trace_async.methods.objectives.lpo import lpo
from trace_async.methods.objectives.m2_brake import find_held_back, hold_back
from trace_async.methods.objectives.m2po import m2po
from trace_async.methods.objectives.masks import dppo, icepop, ipo
from trace_async.methods.objectives.measures import ObjectiveStats, measure
from trace_async.methods.objectives.ppo import ppo
from trace_async.methods.objectives.reinforce import reinforce
from trace_async.methods.objectives.topr import topr
from trace_async.methods.objectives.tree_tis import tree_tis
from trace_async.methods.objectives.turns import Objective, TurnTensors
from trace_async.methods.objectives.vtrace import vtrace

FUNCTIONS: dict[str, Objective] = {
    "tree_tis": tree_tis,
    "reinforce": reinforce,
    "ppo": ppo,
    "dapo": ppo,
    "dr_grpo": ppo,
    "icepop": icepop,
    "dppo": dppo,
    "ipo": ipo,
    "m2po": m2po,
    "gspo_turn": gspo_turn,
    "gspo_path": gspo_path,
    "topr": topr,
    "vtrace": vtrace,
    "lpo": lpo,
}
"""One for every name in `objective_kinds.KINDS`."""


class ChosenObjective:
    """The objective that the configuration names."""

    def __init__(self, config: ObjectiveConfig) -> None:
        """Raises ConfigError for a kind or an option that there is not."""
        self._config = config
        self._kind = kind_of(config)
        self._options = options_of(config)
        self._function = FUNCTIONS[config.kind]
        self._brakes = config.m2_budget > 0 and self._kind.braked

    @property
    def scope(self) -> Scope:
        """What it has to see at once."""
        return Scope.STEP if self._brakes else self._kind.scope

    @property
    def needs_proximal(self) -> bool:
        """The log-probabilities that a step starts from have to be computed first."""
        return self._kind.anchors and self._config.proximal == "recomputed"

    def denominator(self, counts: Denominators) -> float:
        """What the summed loss is divided by; 0 when nothing was played."""
        match self._kind.normaliser:
            case Normaliser.TOKENS:
                return counts.tokens
            case Normaliser.TURNS:
                return counts.turns
            case Normaliser.PROMPTS:
                return float(counts.prompts)
            case Normaliser.CONSTANT:
                return float(counts.prompts) * float(self._options.max_tokens)

    def __call__(self, logprobs: Tensor, turns: TurnTensors) -> tuple[Tensor, ObjectiveStats]:
        """The summed loss to minimise, and what was seen; `logprobs` f32 [n] of the tokens that `turns` lists."""
        held = None
        if self._brakes:
            held = find_held_back(logprobs, turns, self._config)
            logprobs = hold_back(logprobs, held)
        surrogate = self._function(logprobs, turns, self._config, self._options)
        return surrogate.loss, measure(logprobs, turns, self._config, surrogate, held=held)
