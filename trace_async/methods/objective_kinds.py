"""What each objective needs to see, how it is normalised and what may be set: data, without torch.

Owns the table that `objective.kind` names an entry of. The formulas are in `methods/objectives/`, one file each. The
learner packs by `signal` and `scope`, divides by `normaliser`, and the configuration is checked against `needs_leaves`
and `anchors`, so what an objective would have to guess is refused before anything runs. Never computes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from trace_async.config import ObjectiveConfig
from trace_async.core.rows import Signal
from trace_async.errors import ConfigError
from trace_async.methods.registry import pick, read_options


class Scope(Enum):
    """What an objective has to see at once; more than a forward pass holds costs one more pass without gradient."""

    TURN = "turn"
    TREE = "tree"  # every turn of a tree
    STEP = "step"  # every trained turn of the optimizer step


class Normaliser(Enum):
    """What the summed loss is divided by; counted over what was played, whatever became of it."""

    TOKENS = "tokens"  # sum of mass x sampled tokens
    TURNS = "turns"  # sum of mass
    PROMPTS = "prompts"  # prompts with an outcome
    CONSTANT = "constant"  # prompts x `max_tokens` of the options


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One entry of the table."""

    signal: Signal = Signal.ADVANTAGE
    scope: Scope = Scope.TURN
    normaliser: Normaliser = Normaliser.TOKENS
    needs_leaves: bool = False  # only credit rules that give every leaf an advantage will do
    anchors: bool = False  # takes its ratio to the proximal policy that `objective.proximal` names
    braked: bool = False  # `objective.m2_budget` acts in front of it: it has no trust region of its own
    options: type[Any] | None = None  # dataclass with defaults; None: the kind takes no options


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """For kinds that take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceOptions:
    """Of `reinforce`."""

    cap: float = 0.0  # of every token's ratio, whatever its age and sign; 0: no ratios, every token weighs 1

    def __post_init__(self) -> None:
        _not_negative("cap", self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class LpoOptions:
    """Of `lpo`."""

    simplex: Literal["node", "prompt"] = "node"  # children of every fork, or all leaves of a prompt
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon", "hellinger", "alpha"] = "forward_kl"
    alpha: float = 0.5  # of the alpha-divergence
    tau: Literal["group_std", "one", "group_mean"] = "group_std"  # how sharp the target is
    normalise: bool = True  # log-ratios are means over tokens, as in the paper; false: sums
    epsilon: float = 0.2  # token ratios are clipped to 1 +- epsilon
    start: Literal["sampler", "policy"] = "sampler"  # whose choice the target improves on

    def __post_init__(self) -> None:
        _between("alpha", self.alpha, 0.0, 1.0)
        _between("epsilon", self.epsilon, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoOptions:
    """Of `gspo_turn` and `gspo_path`. The paper's 3e-4 and 4e-4 were found with minibatches of fresh data and
    responses of thousands of tokens; the asynchronous runs of ScaleRL needed ten times as much, and a geometric mean
    over one turn varies more than one over a response.
    """

    clip_low: float = 4e-3  # the geometric mean ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 4e-3

    def __post_init__(self) -> None:
        _between("clip_low", self.clip_low, 0.0, 1.0)
        _above("clip_high", self.clip_high, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToprOptions:
    """Of `topr`: what a path's ratio is clamped to, by the sign of its leaf's advantage."""

    positive_low: float = 1.0
    positive_high: float = 1.0
    negative_low: float = 0.0  # failures that became unlikely fade away
    negative_high: float = 1.0

    def __post_init__(self) -> None:
        for sign in ("positive", "negative"):
            low, high = getattr(self, f"{sign}_low"), getattr(self, f"{sign}_high")
            _not_negative(f"{sign}_low", low)
            if high < low:
                raise ConfigError(f"objective.options.{sign}_high must not be below {sign}_low = {low:g}, got {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VtraceOptions:
    """Of `vtrace`."""

    future: Literal["geometric", "product", "none"] = "geometric"  # ratio of a turn that its value is weighed by
    future_bar: float = 1.0  # its cap, c_bar
    prefix: Literal["minimum", "product", "none"] = "minimum"  # what the ratios above a turn make of its weight
    prefix_bar: float = 1.0  # its cap, kappa_bar
    baseline: Literal["siblings", "belief"] = "siblings"  # what a turn's value is compared with

    def __post_init__(self) -> None:
        _above("future_bar", self.future_bar, 0.0)
        _above("prefix_bar", self.prefix_bar, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """Of `ppo`."""

    clip_low: float = 0.2  # ratios below 1 - clip_low no longer push a token down
    clip_high: float = 0.2  # ratios above 1 + clip_high no longer push it up
    dual_clip: float = 0.0  # ratios above it do not push down any more either; 0: they do

    def __post_init__(self) -> None:
        _between("clip_low", self.clip_low, 0.0, 1.0)
        _above("clip_high", self.clip_high, 0.0)
        if self.dual_clip != 0.0:
            _above("dual_clip", self.dual_clip, 1.0, also="0 for none, or ")


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoOptions(ClipOptions):
    """Of `dapo`."""

    clip_high: float = 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpoOptions(ClipOptions):
    """Of `dr_grpo`."""

    max_tokens: int = 1024  # the constant that stands for the length of a rollout: sampled tokens of one path

    def __post_init__(self) -> None:
        ClipOptions.__post_init__(self)
        _above("max_tokens", self.max_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Of `icepop`."""

    low: float = 0.5  # a token whose ratio is below gets no loss
    high: float = 5.0  # nor one whose ratio is above

    def __post_init__(self) -> None:
        _between("low", self.low, 0.0, 1.0)
        _above("high", self.high, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoOptions:
    """Of `dppo`."""

    low: float = 0.2  # a token whose probability fell by more is not pushed down
    high: float = 0.2  # a token whose probability rose by more is not pushed up
    kl_tau: float = 1e-3  # weight of the squared log-ratio

    def __post_init__(self) -> None:
        _above("low", self.low, 0.0)
        _above("high", self.high, 0.0)
        _not_negative("kl_tau", self.kl_tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpoOptions:
    """Of `ipo`."""

    delta: float = 0.1  # a token whose probability moved by more gets no loss
    kl_tau: float = 0.0  # weight of the squared log-ratio

    def __post_init__(self) -> None:
        _above("delta", self.delta, 0.0)
        _not_negative("kl_tau", self.kl_tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poOptions:
    """Of `m2po`."""

    budget: float = 0.04  # of the mean squared log-ratio of harmful tokens
    variant: Literal["mask", "clip"] = "mask"  # drop the furthest harmful tokens, or clip ratios as the budget allows
    floor_low: float = 0.3  # "clip" never clips above 1 - floor_low
    floor_high: float = 0.5  # nor below 1 + floor_high

    def __post_init__(self) -> None:
        _above("budget", self.budget, 0.0)
        _between("floor_low", self.floor_low, 0.0, 1.0)
        _not_negative("floor_high", self.floor_high)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        raise ConfigError(f"objective.options.{name} must lie between {low:g} and {high:g}, got {value:g}")


def _above(name: str, value: float, low: float, *, also: str = "") -> None:
    if value <= low:
        raise ConfigError(f"objective.options.{name} must be {also}above {low:g}, got {value:g}")


def _not_negative(name: str, value: float) -> None:
    if value < 0.0:
        raise ConfigError(f"objective.options.{name} must not be negative, got {value:g}")


KINDS: dict[str, Kind] = {
    "tree_tis": Kind(braked=True),
    "reinforce": Kind(options=ReinforceOptions),
    "ppo": Kind(signal=Signal.LEAVES, anchors=True, options=ClipOptions),
    "dapo": Kind(signal=Signal.LEAVES, anchors=True, options=DapoOptions),
    "dr_grpo": Kind(signal=Signal.LEAVES, normaliser=Normaliser.CONSTANT, anchors=True, options=DrGrpoOptions),
    "icepop": Kind(braked=True, options=WindowOptions),
    "dppo": Kind(signal=Signal.LEAVES, options=DppoOptions),
    "ipo": Kind(signal=Signal.LEAVES, options=IpoOptions),
    "m2po": Kind(signal=Signal.LEAVES, scope=Scope.STEP, options=M2poOptions),
    "gspo_turn": Kind(signal=Signal.LEAVES, normaliser=Normaliser.TURNS, options=GspoOptions),
    "gspo_path": Kind(
        signal=Signal.LEAVES,
        scope=Scope.TREE,
        normaliser=Normaliser.PROMPTS,
        needs_leaves=True,
        options=GspoOptions,
    ),
    "topr": Kind(signal=Signal.LEAVES, scope=Scope.TREE, needs_leaves=True, options=ToprOptions),
    "vtrace": Kind(signal=Signal.MASS, scope=Scope.TREE, options=VtraceOptions),
    "lpo": Kind(signal=Signal.MASS, scope=Scope.TREE, normaliser=Normaliser.PROMPTS, options=LpoOptions),
}


def kind_of(config: ObjectiveConfig) -> Kind:
    """The entry that `objective.kind` names; raises ConfigError for an unknown name."""
    return pick(KINDS, config.kind, where="objective.kind")


def options_of(config: ObjectiveConfig) -> Any:
    """`objective.options` as the kind's own dataclass; raises ConfigError for what it does not take."""
    return read_options(kind_of(config).options or NoOptions, config.options, where="objective.options")
