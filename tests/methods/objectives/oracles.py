"""Slow oracles: each objective in NumPy float64, leaf by leaf, turn by turn, token by token.

An oracle is a function of log-probabilities x [N] with everything that carries no gradient taken at `now` [N], so its
slope in x, taken by finite differences, is the gradient to follow. To add a kind: in `TERMS`, the gain of one token of
one leaf's row, if its loss is a sum of such; else a function of its own in `ORACLES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.methods.objectives.cases import Case
from tests.methods.objectives.tree_oracles import TREE_ORACLES
from trace_async.config import ObjectiveConfig
from trace_async.core.types import Verdict
from trace_async.methods.objective_kinds import options_of

Floats: TypeAlias = NDArray[np.float64]


class Token(NamedTuple):
    """One token in the row of one leaf."""

    x: float
    now: float
    mu: float
    prox: float
    advantage: float  # the leaf's, or the turn's where credit belongs to turns
    net: float  # the turn's
    age: int
    tight: bool
    weight: float  # omega of the leaf
    place: int  # in the table's N tokens
    turn: int
    leaf: int

    @property
    def ratio(self) -> float:
        """R, without gradient."""
        return math.exp(self.now - self.mu)

    def cap(self, sign_of: float, config: ObjectiveConfig) -> float:
        """C(s)."""
        if self.tight:
            return 1.0
        if sign_of > 0:
            return 1 + (config.cap_positive - 1) * math.pow(config.cap_decay, self.age)
        return config.cap_negative if self.age == 0 else 1.0


def oracle(x: Floats, now: Floats, case: Case, config: ObjectiveConfig) -> float:
    """The summed loss."""
    return ORACLES[config.kind](x, now, case, config)


def tokens_of(x: Floats, now: Floats, case: Case, config: ObjectiveConfig) -> Iterator[Token]:
    """Every trained token of every leaf's row, leaf by leaf; turns that are vetoed are left out."""
    table = case.table
    for leaf in case.leaves:
        for turn in case.path_to(leaf):
            if not table.trained[turn] or vetoed(now, case, turn, config):
                continue
            at = case.tokens_of(turn)
            own = float(table.leaf_advantage[leaf])
            for n in range(at.start, at.stop):
                yield Token(
                    x=float(x[n]),
                    now=float(now[n]),
                    mu=float(table.behaviour_logprobs[n]),
                    prox=float(case.proximal[n]),
                    advantage=float(table.advantage[turn]) if math.isnan(own) else own,
                    net=float(table.advantage[turn]),
                    age=int(table.age[turn]),
                    tight=bool(table.verdict[turn] == Verdict.TIGHT),
                    weight=float(table.mass[leaf]),
                    place=n,
                    turn=turn,
                    leaf=leaf,
                )


def vetoed(now: Floats, case: Case, turn: int, config: ObjectiveConfig) -> bool:
    """Whether the turn's ratios are outside the trust window."""
    at = case.tokens_of(turn)
    ratios = [math.exp(now[n] - case.table.behaviour_logprobs[n]) for n in range(at.start, at.stop)]
    geometric = math.prod(ratios) ** (1 / len(ratios))
    return not config.veto_low <= geometric <= config.veto_high or min(ratios) < config.veto_token


# ---- gains of one token -----------------------------------------------------------------------------------------


def _cispo(token: Token, config: ObjectiveConfig, options: Any) -> float:
    return min(token.ratio, token.cap(token.net, config)) * token.advantage * token.x


def _clipped(token: Token, config: ObjectiveConfig, options: Any) -> float:
    behind = 0.0 if token.age < 1 else (token.age - 1) / token.age
    anchor: float = {
        "behaviour": token.mu,
        "recomputed": token.prox,
        "interpolated": (1 - behind) * token.mu + behind * token.now,
    }[config.proximal]
    ratio = math.exp(token.x - anchor)
    surrogate: float
    if token.advantage > 0:
        surrogate = min(ratio, 1 + options.clip_high)
    else:
        surrogate = max(ratio, 1 - options.clip_low)
        surrogate = min(surrogate, options.dual_clip) if options.dual_clip else surrogate
    return min(math.exp(anchor - token.mu), token.cap(token.advantage, config)) * token.advantage * surrogate


def _reinforce(token: Token, config: ObjectiveConfig, options: Any) -> float:
    return (min(token.ratio, options.cap) if options.cap else 1.0) * token.advantage * token.x


def _icepop(token: Token, config: ObjectiveConfig, options: Any) -> float:
    return _cispo(token, config, options) if options.low <= token.ratio <= options.high else 0.0


def _dppo(token: Token, config: ObjectiveConfig, options: Any) -> float:
    moved = math.exp(token.now) - math.exp(token.mu)
    kept = float(moved <= options.high if token.advantage > 0 else moved >= -options.low)
    return kept * _weighed(token, config) - float(options.kl_tau) * (token.x - token.mu) ** 2


def _ipo(token: Token, config: ObjectiveConfig, options: Any) -> float:
    kept = float(abs(math.exp(token.now) - math.exp(token.mu)) <= options.delta)
    return kept * _weighed(token, config) - float(options.kl_tau) * (token.x - token.mu) ** 2


def _weighed(token: Token, config: ObjectiveConfig) -> float:
    return min(token.ratio, token.cap(token.advantage, config)) * token.advantage * token.x


TERMS: dict[str, Callable[[Token, ObjectiveConfig, Any], float]] = {
    "tree_tis": _cispo,
    "reinforce": _reinforce,
    "ppo": _clipped,
    "dapo": _clipped,
    "dr_grpo": _clipped,
    "icepop": _icepop,
    "dppo": _dppo,
    "ipo": _ipo,
}


def _by_terms(x: Floats, now: Floats, case: Case, config: ObjectiveConfig) -> float:
    options = options_of(config)
    return -sum(token.weight * TERMS[config.kind](token, config, options) for token in tokens_of(x, now, case, config))


def _m2po(x: Floats, now: Floats, case: Case, config: ObjectiveConfig) -> float:
    options = options_of(config)
    tokens = list(tokens_of(x, now, case, config))
    harmful = sorted((abs(t.now - t.mu), t.weight, k) for k, t in enumerate(tokens) if t.advantage * (t.now - t.mu) > 0)
    dropped: set[int] = set()
    if options.variant == "mask":
        while harmful and _mean(harmful, math.inf) > options.budget:
            furthest = harmful[-1][0]  # float32 copies of one token in several rows are the same number
            dropped |= {k for size, _, k in harmful if size == furthest}
            harmful = [entry for entry in harmful if entry[0] < furthest]
    elif harmful and _mean(harmful, math.inf) > options.budget:
        fitting = [size for size, _, _ in harmful if _mean(harmful, size) <= options.budget]
        tau = max(fitting, default=0.0)
        low, high = max(1 - math.exp(-tau), options.floor_low), max(math.exp(tau) - 1, options.floor_high)
        dropped = {k for k, t in enumerate(tokens) if (t.ratio > 1 + high if t.advantage > 0 else t.ratio < 1 - low)}
    return -sum(t.weight * _weighed(t, config) for k, t in enumerate(tokens) if k not in dropped)


def _mean(harmful: list[tuple[float, float, int]], bound: float) -> float:
    total = sum(weight for _, weight, _ in harmful)
    return sum(weight * min(size, bound) ** 2 for size, weight, _ in harmful) / total


ORACLES: dict[str, Callable[[Floats, Floats, Case, ObjectiveConfig], float]] = {
    **dict.fromkeys(TERMS, _by_terms),
    "m2po": _m2po,
    **TREE_ORACLES,
}
