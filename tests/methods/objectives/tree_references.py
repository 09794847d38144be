"""Reference forms (`references.py`) of the objectives that look at whole trees.

Each sees the rows of the leaves and the table of turns. A path's ratio is taken along its own row; a fork is found by
walking over the rows; a divergence is written as its definition and differentiated by autograd.

Legend: L leaves · T tokens of the longest row · K alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig

if TYPE_CHECKING:
    from tests.methods.objectives.references import LeafRows


def gspo_turn(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """min(s A, clip(s) A) once per turn of each row, s the geometric mean over the turn."""
    loss = torch.zeros(())
    for row, weight in enumerate(rows.weight[:, 0]):
        for turn in _turns_of(rows, row):
            at = rows.turn[row] == turn
            if bool(rows.trained[row][at].all()):
                ratio = rows.log_ratio[row][at].mean().exp()
                loss = loss - weight * _clipped(ratio, rows.advantage[row][at][0], options)
    return loss


def gspo_path(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """min(s A, clip(s) A) once per row (arXiv 2507.18071); untrained tokens count in s and have no gradient."""
    real = (rows.turn >= 0).float()
    x = torch.where(rows.trained, rows.log_ratio, rows.log_ratio.detach())
    ratio = ((x * real).sum(1) / real.sum(1)).exp()
    return -sum(
        (
            weight * _clipped(s, a[0], options)
            for weight, s, a in zip(rows.weight[:, 0], ratio, rows.advantage, strict=True)
        ),
        torch.zeros(()),
    )


def _clipped(ratio: Tensor, advantage: Tensor, options: Any) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantage)


def topr(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """clamp(W) A log pi, W the product over the row, the window by the sign of A."""
    product = rows.log_ratio.detach().sum(1, keepdim=True).exp()
    above = product.clamp(options.positive_low, options.positive_high)
    below = product.clamp(options.negative_low, options.negative_high)
    gain = torch.where(rows.advantage > 0, above, below) * rows.advantage * rows.logprobs
    return -(rows.weight * torch.where(rows.trained, gain, 0.0)).sum()


# ---- V-trace ----------------------------------------------------------------------------------------------------


def vtrace(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """kappa A sg(min(C, R)) log pi token by token of every row, A and kappa by recursion over turns."""
    walk = _Walk(rows, options)
    loss = torch.zeros(())
    positive, negative = (rows.cap(torch.full_like(rows.net, sign), config) for sign in (1.0, -1.0))
    for row, weight in enumerate(rows.weight[:, 0]):
        path = _turns_of(rows, row)
        for depth, turn in enumerate(path):
            at = (rows.turn[row] == turn) & rows.trained[row]
            advantage = walk.advantage(turn)
            cap = (positive if advantage > 0 else negative)[row]
            ratio = torch.minimum(rows.log_ratio[row].detach().exp(), cap)
            gain = advantage * walk.prefix(path[:depth]) * ratio * rows.logprobs[row]
            loss = loss - weight * torch.where(at, gain, 0.0).sum()
    return loss


class _Walk:
    """What V-trace says of a turn; a place is a turn, or the group of a prompt as -1 - g."""

    def __init__(self, rows: LeafRows, options: Any) -> None:
        self.rows, self.options, self.turns = rows, options, rows.turns
        self.above = {
            turn: (path[i - 1] if i else -1 - int(self.turns.group[turn]))
            for row in range(len(rows.leaf))
            for path in [_turns_of(rows, row)]
            for i, turn in enumerate(path)
        }

    def ratio(self, turn: int, *, geometric: bool) -> float:
        row, at = next((r, r_at) for r in range(len(self.rows.leaf)) if (r_at := self.rows.turn[r] == turn).any())
        x = self.rows.log_ratio[row][at].detach()
        return math.exp(float(x.mean() if geometric else x.sum()))

    def belief(self, place: int) -> float:
        return float(self.turns.belief[place] if place >= 0 else self.turns.root_belief[-1 - place])

    def children(self, place: int) -> list[int]:
        return [turn for turn, above in self.above.items() if above == place]

    def value(self, turn: int) -> float:
        if turn in self.rows.leaf.tolist():
            return float(self.turns.outcome[turn])
        b, below = self.belief(turn), self.children(turn)
        pulls = [self.future(m) * (self.value(m) - b) for m in below]
        return float(b + sum(pulls) / len(below))

    def future(self, turn: int) -> float:
        if self.options.future == "none":
            return 1.0
        return float(min(self.options.future_bar, self.ratio(turn, geometric=self.options.future == "geometric")))

    def baseline(self, turn: int) -> float:
        place = self.above[turn]
        if self.options.baseline == "belief":
            return self.belief(place)
        others = [self.value(m) for m in self.children(place) if m != turn]
        if others:
            return sum(others) / len(others)
        return self.baseline(place) if place >= 0 else self.value(turn)

    def advantage(self, turn: int) -> float:
        return self.value(turn) - self.baseline(turn)

    def prefix(self, above: list[int]) -> float:
        match self.options.prefix:
            case "product":
                factor = math.prod(self.ratio(turn, geometric=False) for turn in above)
            case "minimum":
                factor = min((self.ratio(turn, geometric=True) for turn in above), default=1.0)
            case _:
                return 1.0
        return float(min(self.options.prefix_bar, factor))


# ---- LPO --------------------------------------------------------------------------------------------------------


class _Alternative(NamedTuple):
    row: int  # a row that has its tokens
    at: Tensor  # bool [T] its tokens there
    reward: float


def lpo(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """sum over sets of mass x sum_k sg(dD/ds_k) x mean of clipped token log-ratios (arXiv 2605.06139)."""
    loss = torch.zeros(())
    low, high = math.log(1 - options.epsilon), math.log(1 + options.epsilon)
    for mass, alternatives in _forks(rows) if options.simplex == "node" else _prompts(rows):
        means = []
        for row, at, _ in alternatives:
            means.append(rows.log_ratio[row].detach()[at].sum() / (at.sum() if options.normalise else 1))
        rewards = torch.tensor([alternative.reward for alternative in alternatives])
        s = torch.stack(means).requires_grad_()
        floor = 0.05 if options.simplex == "node" else 0.0
        target = _target(rewards, s.detach(), options, floor)
        (c,) = torch.autograd.grad(divergence(torch.softmax(s, 0), target, options), s)
        for (row, at, _), c_k in zip(alternatives, c, strict=True):
            clipped = torch.where(at & rows.trained[row], rows.log_ratio[row].clamp(low, high), 0.0)
            loss = loss + mass * c_k * clipped.sum() / (at.sum() if options.normalise else 1)
    return loss


def divergence(p: Tensor, w: Tensor, options: Any) -> Tensor:
    """D(w, P) as defined, on vectors."""
    match options.divergence:
        case "forward_kl":
            return _kl(w, p)
        case "reverse_kl":
            return _kl(p, w)
        case "jensen_shannon":
            return (_kl(w, (w + p) / 2) + _kl(p, (w + p) / 2)) / 2
        case "hellinger":
            return 1 - (w * p).sqrt().sum()
    a = float(options.alpha)
    overlap: Tensor = w**a * p ** (1 - a)
    return (1 - overlap.sum()) / (a * (1 - a))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    terms: Tensor = torch.special.xlogy(first, first) - torch.special.xlogy(first, second)
    return terms.sum()


def _target(rewards: Tensor, s: Tensor, options: Any, floor: float) -> Tensor:
    tau = {"one": 1.0, "group_std": float(rewards.std(correction=0)), "group_mean": float(rewards.mean()) or 1.0}
    least = 0.0 if options.tau == "one" else floor
    scaled = (rewards - rewards.mean()) / (max(tau[options.tau], least) + 1e-6)
    return torch.softmax(scaled + s if options.start == "policy" else scaled, 0)


def _prompts(rows: LeafRows) -> Iterator[tuple[float, list[_Alternative]]]:
    groups = rows.turns.group[rows.leaf].tolist()
    for group in sorted(set(groups)):
        yield (
            1.0,
            [
                _Alternative(row, rows.turn[row] >= 0, float(rows.turns.outcome[rows.leaf[row]]))
                for row in range(len(groups))
                if groups[row] == group
            ],
        )


def _forks(rows: LeafRows) -> Iterator[tuple[float, list[_Alternative]]]:
    walk = _Walk(rows, None)
    for place in sorted(set(walk.above.values())):
        children = walk.children(place)
        if len(children) >= 2:
            mass = float(rows.turns.mass[place]) if place >= 0 else 1.0
            yield mass, [_alternative(child, walk, rows) for child in children]


def _alternative(child: int, walk: _Walk, rows: LeafRows) -> _Alternative:
    segment = [child]
    while len(below := walk.children(segment[-1])) == 1:
        segment += below
    row = next(row for row in range(len(rows.leaf)) if segment[-1] in _turns_of(rows, row))
    return _Alternative(row, torch.isin(rows.turn[row], torch.tensor(segment)), float(rows.turns.value[child]))


def _turns_of(rows: LeafRows, row: int) -> list[int]:
    return [turn for turn in dict.fromkeys(rows.turn[row].tolist()) if turn >= 0]


TREE_REFERENCES: dict[str, Callable[[LeafRows, ObjectiveConfig, Any], Tensor]] = {
    "gspo_turn": gspo_turn,
    "gspo_path": gspo_path,
    "topr": topr,
    "vtrace": vtrace,
    "lpo": lpo,
}
