"""How the tests of objectives write turns down and run a kind.

To add a kind to the common tests (`test_every_kind.py`):
    1. `references.py`: its flattened loss on rows of leaves, as in its paper, in `REFERENCES`;
    2. `oracles.py`: the same in NumPy float64, in loops, in `ORACLES` (in `TERMS`, for losses that are sums over the
       tokens of the leaves' rows);
    3. here: in `VARIANTS`, the configurations it is tried with, if its defaults are not all there is to see.

Turns that the tests name by hand: `turns_of(Turn(mu=(.2,)), Turn(mu=(.5, .5), parent=0))`. Trees made at random, with
a softmax over the possible tokens for every prefix, for the sampler, the proximal policy and the trained one:
`cases.random_case(rng, by_leaves=True)`.

Legend: n tokens at hand, here all N of the table in its order · J turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.core.turn_table import TurnTable
from trace_async.core.types import Verdict
from trace_async.methods.objective_kinds import KINDS, options_of
from trace_async.methods.objectives.registry import FUNCTIONS
from trace_async.methods.objectives.turns import Surrogate, TurnTensors, to_tensors

OPEN = ObjectiveConfig(m2_budget=0.0, veto_low=0.0, veto_high=1e9, veto_token=0.0)
"""No turn is vetoed."""

UNCAPPED = replace(OPEN, cap_positive=1e6, cap_negative=1e6)

VETOING = ObjectiveConfig(
    m2_budget=0.0, veto_low=0.7, veto_high=1.6, veto_token=0.2, cap_positive=2.0, cap_negative=1.5
)
"""Vetoes and caps that the random cases hit."""

VARIANTS: dict[str, list[ObjectiveConfig]] = {
    "reinforce": [ObjectiveConfig(options={"cap": 1.1})],
    "ppo": [
        ObjectiveConfig(proximal="recomputed", cap_positive=1.2, cap_negative=1.1),
        ObjectiveConfig(proximal="interpolated", options={"dual_clip": 1.3}),
    ],
    "dapo": [ObjectiveConfig(proximal="recomputed", options={"clip_low": 0.1, "dual_clip": 1.5})],
    "dr_grpo": [ObjectiveConfig(proximal="interpolated")],
    "icepop": [ObjectiveConfig(options={"low": 0.8, "high": 1.3})],
    "dppo": [ObjectiveConfig(options={"low": 0.05, "high": 0.02, "kl_tau": 0.3})],
    "ipo": [ObjectiveConfig(options={"delta": 0.03, "kl_tau": 0.3})],
    "m2po": [ObjectiveConfig(options={"variant": "clip", "floor_low": 0.05, "floor_high": 0.05})],
    "gspo_turn": [ObjectiveConfig(options={"clip_low": 0.4, "clip_high": 0.5})],
    "gspo_path": [ObjectiveConfig(options={"clip_low": 0.3, "clip_high": 0.3})],
    "topr": [
        ObjectiveConfig(options={"positive_low": 0.5, "positive_high": 2.0, "negative_low": 0.1, "negative_high": 1.5})
    ],
    "vtrace": [
        ObjectiveConfig(options={"future": "product", "future_bar": 2.0, "prefix": "product", "prefix_bar": 1.5}),
        ObjectiveConfig(options={"future": "none", "prefix": "none", "baseline": "belief"}, cap_positive=1.5),
    ],
    "lpo": [
        ObjectiveConfig(options={"simplex": "prompt", "epsilon": 0.9}),
        ObjectiveConfig(options={"divergence": "reverse_kl", "tau": "one", "normalise": False, "epsilon": 0.9}),
        ObjectiveConfig(options={"divergence": "jensen_shannon", "simplex": "prompt", "tau": "group_mean"}),
        ObjectiveConfig(options={"divergence": "hellinger", "tau": "group_mean", "epsilon": 0.5}),
        ObjectiveConfig(options={"start": "policy", "simplex": "prompt", "epsilon": 0.9}),
        ObjectiveConfig(options={"start": "policy", "divergence": "reverse_kl", "tau": "one", "epsilon": 0.9}),
        ObjectiveConfig(options={"divergence": "alpha", "alpha": 0.3, "simplex": "prompt", "normalise": False}),
    ],
}
"""Further configurations per kind. Only what they change is used, on top of VETOING."""


def configs_of(kind: str) -> list[ObjectiveConfig]:
    """What a kind is tried with: its defaults without vetoes, and its variants with them."""
    found = [replace(OPEN, kind=kind)]
    for variant in VARIANTS.get(kind, [ObjectiveConfig()]):
        names = ("cap_positive", "cap_negative", "proximal", "options")
        own = {name: getattr(variant, name) for name in names}
        found.append(replace(VETOING, kind=kind, **{k: v for k, v in own.items() if v != getattr(OPEN, k)}))
    return found


ALL_CONFIGS = [config for kind in KINDS for config in configs_of(kind)]


def name_of(config: ObjectiveConfig) -> str:
    """For the ids of parametrised tests."""
    options = ",".join(f"{name}={value}" for name, value in config.options.items())
    return "-".join(
        filter(None, [config.kind, config.proximal[:5], options, "open" if config.veto_low == 0 else "veto"])
    )


# ---- turns by hand ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn as a test writes it down; parents stand before their children."""

    mu: tuple[float, ...] = (0.5,)  # probabilities of its tokens
    parent: int = -1
    group: int = 0
    advantage: float | None = None  # None: mean of `leaf_advantage` below, or 1 where there is none
    leaf_advantage: float = math.nan  # of a leaf
    mass: float | None = None  # None: sum of the children's, or 1 without children
    age: int = 0
    tight: bool = False
    depth: int | None = None
    trained: bool = True
    drawn: bool = True
    outcome: float = math.nan
    value: float | None = None  # None: mean outcome below
    belief: float = math.nan


def table_of(*turns: Turn, root_belief: Sequence[float] | None = None) -> TurnTable:
    """The table of these turns; one group for each number up to the largest that they name."""
    num_turns = len(turns)
    parent = np.array([turn.parent for turn in turns], np.int32)
    tokens = np.array([len(turn.mu) for turn in turns], np.int32)
    depth, mass = np.ones(num_turns, np.int32), np.zeros(num_turns)
    for j, turn in enumerate(turns):
        depth[j] = turn.depth if turn.depth is not None else 1 + (depth[turn.parent] if turn.parent >= 0 else 0)
    for j in reversed(range(num_turns)):
        own = turns[j].mass
        below = mass[parent == j]
        mass[j] = own if own is not None else below.sum() if below.size else 1.0
    above, below_zero, value = (np.zeros(num_turns) for _ in range(3))
    for j, turn in enumerate(turns):
        above[j], below_zero[j] = _signs(j, turns, mass)
        value[j] = turn.value if turn.value is not None else _mean_below(j, turns, mass, "outcome")
    groups = 1 + max(turn.group for turn in turns)
    return TurnTable(
        behaviour_logprobs=np.log(np.array([p for turn in turns for p in turn.mu])).astype(np.float32),
        turn=np.repeat(np.arange(num_turns, dtype=np.int32), tokens),
        group=np.array([turn.group for turn in turns], np.int32),
        parent=parent,
        tokens=tokens,
        depth=depth,
        trained=np.array([turn.trained for turn in turns]),
        scored=np.array([turn.trained for turn in turns]),
        advantage=(above + below_zero).astype(np.float32),
        positive=above.astype(np.float32),
        negative=below_zero.astype(np.float32),
        mass=mass.astype(np.float32),
        value=value.astype(np.float32),
        leaf_advantage=np.array([turn.leaf_advantage for turn in turns], np.float32),
        outcome=np.array([turn.outcome for turn in turns], np.float32),
        belief=np.array([turn.belief for turn in turns], np.float32),
        drawn=np.array([turn.drawn for turn in turns]),
        age=np.array([turn.age for turn in turns], np.int32),
        verdict=np.array([Verdict.TIGHT if turn.tight else Verdict.TRAIN for turn in turns], np.uint8),
        root_belief=np.full(groups, np.nan, np.float32) if root_belief is None else np.array(root_belief, np.float32),
        token_start=np.cumsum(tokens, dtype=np.int64) - tokens,
    )


def turns_of(*turns: Turn) -> TurnTensors:
    """The same as tensors, all tokens at hand."""
    return to_tensors(table_of(*turns))


def policy(*rows: tuple[float, ...]) -> Tensor:
    """Log-probabilities [n] of the trained policy from its probabilities, turn by turn."""
    return torch.tensor([p for row in rows for p in row]).log().requires_grad_()


def leaves_below(turn: int, turns: Sequence[Turn]) -> list[int]:
    """The turns without children at or below `turn`."""
    children = [j for j, other in enumerate(turns) if other.parent == turn]
    return [leaf for child in children for leaf in leaves_below(child, turns)] if children else [turn]


def _signs(j: int, turns: Sequence[Turn], mass: NDArray[np.float64]) -> tuple[float, float]:
    """Mean over the leaves below of what is above and of what is below zero."""
    own = turns[j].advantage
    if own is None and math.isnan(_mean_below(j, turns, mass, "leaf_advantage")):
        own = 1.0
    if own is not None:
        return max(own, 0.0), min(own, 0.0)
    leaves = leaves_below(j, turns)
    weights = mass[leaves] / mass[leaves].sum()
    own_of = np.array([turns[leaf].leaf_advantage for leaf in leaves])
    return float(weights @ np.maximum(own_of, 0)), float(weights @ np.minimum(own_of, 0))


def _mean_below(j: int, turns: Sequence[Turn], mass: NDArray[np.float64], name: str) -> float:
    leaves = leaves_below(j, turns)
    weights = mass[leaves]
    return float(weights @ np.array([getattr(turns[leaf], name) for leaf in leaves]) / max(weights.sum(), 1e-30))


# ---- running a kind ---------------------------------------------------------------------------------------------


def evaluate(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig = OPEN) -> Surrogate:
    """What the configured kind makes of it."""
    return FUNCTIONS[config.kind](logprobs, turns, config, options_of(config))


def coefficients(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig = OPEN) -> Tensor:
    """Ascent coefficient of each log-probability, [n]."""
    variable = logprobs.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(evaluate(variable, turns, config).loss, variable)
    return -gradient


def _gspo_path(turns: TurnTensors) -> Tensor:
    found = torch.zeros(turns.num_turns)
    for leaf in torch.nonzero(~torch.isnan(turns.leaf_advantage))[:, 0].tolist():
        path = [leaf]
        while int(turns.parent[path[-1]]) >= 0:
            path.append(int(turns.parent[path[-1]]))
        found[path] += turns.mass[leaf] * turns.leaf_advantage[leaf] / turns.tokens[path].sum()
    return (found * turns.trained)[turns.turn]


ON_POLICY: dict[str, Callable[[TurnTensors], Tensor]] = {
    "gspo_turn": lambda turns: (turns.mass * turns.advantage * turns.trained / turns.tokens)[turns.turn],
    "gspo_path": _gspo_path,
}
"""Ascent coefficients [n] of kinds that, with the same policy everywhere, do not have mass x advantage."""


def on_policy_coefficients(kind: str, turns: TurnTensors) -> Tensor:
    """What each token has when sampler, proximal and trained policy are one."""
    if kind in ON_POLICY:
        return ON_POLICY[kind](turns)
    return (turns.mass * turns.advantage * turns.trained)[turns.turn]
