"""Oracles (`oracles.py`) of the objectives that look at whole trees: NumPy float64, loops, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.methods.objectives.cases import Case
from trace_async.config import ObjectiveConfig
from trace_async.core.types import Verdict
from trace_async.methods.objective_kinds import options_of

Floats: TypeAlias = NDArray[np.float64]


class _View:
    """A case with its numbers at hand, for one configuration."""

    def __init__(self, x: Floats, now: Floats, case: Case, config: ObjectiveConfig) -> None:
        self.x, self.now, self.case, self.config = x, now, case, config
        self.table = case.table
        self.mu = case.table.behaviour_logprobs.astype(np.float64)
        self.options: Any = options_of(config)

    def tokens(self, turns: Sequence[int]) -> list[int]:
        return [n for turn in turns for n in range(self.case.tokens_of(turn).start, self.case.tokens_of(turn).stop)]

    def alive(self, turn: int) -> bool:
        ratios = [math.exp(self.now[n] - self.mu[n]) for n in self.tokens([turn])]
        geometric = math.prod(ratios) ** (1 / len(ratios))
        inside = self.config.veto_low <= geometric <= self.config.veto_high
        return bool(self.table.trained[turn]) and inside and min(ratios) >= self.config.veto_token

    def log_ratios(self, turns: Sequence[int]) -> list[float]:
        """Of every token of these turns; without gradient where a turn carries no loss."""
        return [
            float((self.x if self.alive(turn) else self.now)[n] - self.mu[n])
            for turn in turns
            for n in self.tokens([turn])
        ]

    def fixed(self, turns: Sequence[int]) -> float:
        """Summed log-ratio of these turns, without gradient."""
        return float(sum(self.now[n] - self.mu[n] for n in self.tokens(turns)))

    def children(self, turn: int, group: int) -> list[int]:
        places = zip(self.table.parent.tolist(), self.table.group.tolist(), strict=True)
        return [j for j, place in enumerate(places) if place == (turn, group)]

    def mean_of(self, turn: int) -> float:
        return self.fixed([turn]) / int(self.table.tokens[turn])


def _gspo_turn(view: _View) -> float:
    loss = 0.0
    for leaf in view.case.leaves:
        for turn in view.case.path_to(leaf):
            if view.alive(turn):
                own = float(view.table.leaf_advantage[leaf])
                advantage = float(view.table.advantage[turn]) if math.isnan(own) else own
                loss -= float(view.table.mass[leaf]) * _clip(view.log_ratios([turn]), advantage, view.options)
    return loss


def _gspo_path(view: _View) -> float:
    return -sum(
        float(view.table.mass[leaf])
        * _clip(view.log_ratios(view.case.path_to(leaf)), float(view.table.leaf_advantage[leaf]), view.options)
        for leaf in view.case.leaves
    )


def _clip(log_ratios: list[float], advantage: float, options: Any) -> float:
    ratio = math.exp(sum(log_ratios) / len(log_ratios))
    return float(min(ratio * advantage, min(max(ratio, 1 - options.clip_low), 1 + options.clip_high) * advantage))


def _topr(view: _View) -> float:
    loss, options = 0.0, view.options
    for leaf in view.case.leaves:
        path, advantage = view.case.path_to(leaf), float(view.table.leaf_advantage[leaf])
        low, high = options.negative_low, options.negative_high
        if advantage > 0:
            low, high = options.positive_low, options.positive_high
        weight = min(max(math.exp(view.fixed(path)), low), high)
        for turn in filter(view.alive, path):
            loss -= float(view.table.mass[leaf]) * weight * advantage * sum(view.x[n] for n in view.tokens([turn]))
    return loss


def _vtrace(view: _View) -> float:
    loss = 0.0
    for turn in filter(view.alive, range(len(view.case.turns))):
        advantage, age = _advantage(view, turn), int(view.table.age[turn])
        above = view.case.path_to(turn)[:-1]
        match view.options.prefix:
            case "product":
                prefix = min(view.options.prefix_bar, math.exp(view.fixed(above)))
            case "minimum":
                smallest = min((math.exp(view.mean_of(j)) for j in above), default=1.0)
                prefix = min(view.options.prefix_bar, smallest)
            case _:
                prefix = 1.0
        if view.table.verdict[turn] == Verdict.TIGHT:
            cap = 1.0
        elif advantage > 0:
            cap = 1 + (view.config.cap_positive - 1) * view.config.cap_decay**age
        else:
            cap = view.config.cap_negative if age == 0 else 1.0
        for n in view.tokens([turn]):
            ratio = min(cap, math.exp(view.now[n] - view.mu[n]))
            loss -= float(view.table.mass[turn]) * advantage * prefix * ratio * float(view.x[n])
    return loss


def _belief(view: _View, turn: int, group: int) -> float:
    return float(view.table.belief[turn] if turn >= 0 else view.table.root_belief[group])


def _value(view: _View, turn: int) -> float:
    group = int(view.table.group[turn])
    children = view.children(turn, group)
    if not children:
        return float(view.table.outcome[turn])
    total, belief = 0.0, _belief(view, turn, group)
    for child in children:
        logs = {"geometric": view.mean_of(child), "product": view.fixed([child])}
        weight = (
            min(view.options.future_bar, math.exp(logs[view.options.future])) if view.options.future in logs else 1.0
        )
        total += weight * (_value(view, child) - belief)
    return belief + total / len(children)


def _advantage(view: _View, turn: int) -> float:
    parent, group = int(view.table.parent[turn]), int(view.table.group[turn])
    if view.options.baseline == "belief":
        return _value(view, turn) - _belief(view, parent, group)
    at = turn
    while at >= 0:
        siblings = [j for j in view.children(int(view.table.parent[at]), group) if j != at]
        if siblings:
            return _value(view, turn) - sum(_value(view, j) for j in siblings) / len(siblings)
        at = int(view.table.parent[at])
    return 0.0


def _lpo(view: _View) -> float:
    loss, options = 0.0, view.options
    for mass, rewards, members in _sets(view):
        logits = [view.fixed(turns) / (len(view.tokens(turns)) if options.normalise else 1) for turns in members]
        for k, turns in enumerate(members):
            tokens = [n for turn in filter(view.alive, turns) for n in view.tokens([turn])]
            low, high = math.log(1 - options.epsilon), math.log(1 + options.epsilon)
            total = sum(min(max(float(view.x[n] - view.mu[n]), low), high) for n in tokens)
            length = len(view.tokens(turns)) if options.normalise else 1
            loss += mass * _slope(logits, k, rewards, options) * total / length
    return loss


def _sets(view: _View) -> list[tuple[float, list[float], list[list[int]]]]:
    """Mass, rewards and turns of the alternatives of every set."""
    table, groups = view.table, range(len(view.case.root_belief))
    if view.options.simplex == "prompt":
        of = {group: [leaf for leaf in view.case.leaves if table.group[leaf] == group] for group in groups}
        return [
            (1.0, [float(table.outcome[leaf]) for leaf in leaves], [view.case.path_to(leaf) for leaf in leaves])
            for leaves in of.values()
        ]
    found = []
    places = [(-1, group) for group in groups] + [(j, int(table.group[j])) for j in range(table.num_turns)]
    for place in places:
        children = view.children(*place)
        if len(children) >= 2:
            mass = float(table.mass[place[0]]) if place[0] >= 0 else 1.0
            found.append((mass, [float(table.value[j]) for j in children], [_segment(view, j) for j in children]))
    return found


def _segment(view: _View, turn: int) -> list[int]:
    children = view.children(turn, int(view.table.group[turn]))
    return [turn, *(_segment(view, children[0]) if len(children) == 1 else [])]


def _slope(logits: list[float], k: int, rewards: list[float], options: Any) -> float:
    """dD/ds_k by central differences of the definition."""
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    floor = 0.05 if options.simplex == "node" else 0.0
    tau = {"one": 1.0, "group_std": max(spread, floor), "group_mean": max(mean, floor) if mean > 0 else 1.0}
    start = logits if options.start == "policy" else [0.0] * len(logits)
    target = _softmax(
        [(reward - mean) / (tau[options.tau] + 1e-6) + s for reward, s in zip(rewards, start, strict=True)]
    )
    step, sides = 1e-5, []
    for sign in (1, -1):
        moved = [s + sign * step * (j == k) for j, s in enumerate(logits)]
        sides.append(_divergence(_softmax(moved), target, options))
    return (sides[0] - sides[1]) / (2 * step)


def _softmax(logits: list[float]) -> list[float]:
    chances = [math.exp(logit - max(logits)) for logit in logits]
    return [chance / sum(chances) for chance in chances]


def _divergence(p: list[float], w: list[float], options: Any) -> float:
    match options.divergence:
        case "forward_kl":
            return _kl(w, p)
        case "reverse_kl":
            return _kl(p, w)
        case "jensen_shannon":
            middle = [(a + b) / 2 for a, b in zip(p, w, strict=True)]
            return (_kl(w, middle) + _kl(p, middle)) / 2
        case "hellinger":
            return 1 - sum(math.sqrt(a * b) for a, b in zip(p, w, strict=True))
    alpha = float(options.alpha)
    overlap = sum(float(b**alpha * a ** (1 - alpha)) for a, b in zip(p, w, strict=True))
    return (1 - overlap) / (alpha * (1 - alpha))


def _kl(first: list[float], second: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)


def _of(oracle: Callable[[_View], float]) -> Callable[[Floats, Floats, Case, ObjectiveConfig], float]:
    return lambda x, now, case, config: oracle(_View(x, now, case, config))


TREE_ORACLES = {
    "gspo_turn": _of(_gspo_turn),
    "gspo_path": _of(_gspo_path),
    "topr": _of(_topr),
    "vtrace": _of(_vtrace),
    "lpo": _of(_lpo),
}
