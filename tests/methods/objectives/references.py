"""The reference form: each objective as its paper writes it, on the flattened tree, differentiated by autograd.

One row per leaf, [L, T]: the log-probabilities of a tree's tokens, computed once, are gathered into the row of every
leaf below them. A row has its leaf's weight and advantage (where credit belongs to turns, each token has its turn's),
so nothing here knows of masses, of sign splits or of turns that are shared. An objective in node form must have the
same loss and the same gradient.

To add a kind: a function `(rows, config, options) -> loss`, summed, in `REFERENCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.methods.objectives.tree_references import TREE_REFERENCES
from trace_async.config import ObjectiveConfig
from trace_async.methods.objective_kinds import options_of
from trace_async.methods.objectives.turns import TurnTensors


@dataclass(frozen=True, kw_only=True)
class LeafRows:
    """Rows of leaves; [L, T] unless said otherwise, 0 where a row has ended."""

    logprobs: Tensor  # with gradient
    mu: Tensor
    proximal: Tensor
    advantage: Tensor  # the leaf's; the turn's where credit belongs to turns
    net: Tensor  # the turn's
    age: Tensor
    tight: Tensor
    turn: Tensor  # i64; -1 where a row has ended
    trained: Tensor  # bool: its turn carries loss and is not vetoed
    weight: Tensor  # [L, 1] omega
    leaf: Tensor  # i64 [L] the turn a row ends with
    turns: TurnTensors  # the table

    @property
    def log_ratio(self) -> Tensor:
        """Trained over behaviour, with gradient."""
        return self.logprobs - self.mu

    def cap(self, sign_of: Tensor, config: ObjectiveConfig) -> Tensor:
        """C(s) by sign and age."""
        positive = 1 + (config.cap_positive - 1) * config.cap_decay**self.age
        negative = torch.where(self.age == 0, config.cap_negative, 1.0)
        return torch.where(self.tight, 1.0, torch.where(sign_of > 0, positive, negative))


Reference: TypeAlias = Callable[[LeafRows, ObjectiveConfig, Any], Tensor]


def reference_loss(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig) -> Tensor:
    """The summed loss of the flattened trees; all tokens of the table are at hand."""
    return REFERENCES[config.kind](leaf_rows(logprobs, turns, config), config, options_of(config))


def leaf_rows(logprobs: Tensor, turns: TurnTensors, config: ObjectiveConfig) -> LeafRows:
    """Gathers [N] into [L, T]."""
    parents = turns.parent.tolist()
    leaves = [j for j in range(turns.num_turns) if j not in parents]
    rows = [[n for turn in _path(parents, leaf) for n in _tokens(turns, turn)] for leaf in leaves]
    width = max(len(row) for row in rows)
    index = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    real = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    turn = turns.turn[index]
    alive = torch.tensor([_alive(logprobs.detach(), turns, j, config) for j in range(turns.num_turns)])
    own = turns.leaf_advantage[leaves][:, None]
    proximal = turns.behaviour_logprobs if turns.proximal_logprobs is None else turns.proximal_logprobs

    def gathered(values: Tensor) -> Tensor:
        return torch.where(real, values[index], 0.0)

    return LeafRows(
        logprobs=gathered(logprobs),
        mu=gathered(turns.behaviour_logprobs),
        proximal=gathered(proximal),
        advantage=torch.where(real, torch.where(torch.isnan(own), turns.advantage[turn], own), 0.0),
        net=torch.where(real, turns.advantage[turn], 0.0),
        age=torch.where(real, turns.age[turn], 0),
        tight=turns.tight[turn],
        turn=torch.where(real, turn, -1),
        trained=real & alive[turn],
        weight=turns.mass[leaves][:, None],
        leaf=torch.tensor(leaves),
        turns=turns,
    )


def summed(rows: LeafRows, gain: Tensor) -> Tensor:
    """The loss of a gain per token, [L, T]."""
    return -(rows.weight * torch.where(rows.trained, gain, 0.0)).sum()


def _path(parents: list[int], turn: int) -> list[int]:
    return [] if turn < 0 else [*_path(parents, parents[turn]), turn]


def _tokens(turns: TurnTensors, turn: int) -> list[int]:
    return (turns.turn == turn).nonzero()[:, 0].tolist()


def _alive(logprobs: Tensor, turns: TurnTensors, turn: int, config: ObjectiveConfig) -> bool:
    at = _tokens(turns, turn)
    ratio = (logprobs[at] - turns.behaviour_logprobs[at]).exp()
    geometric = float(ratio.log().mean().exp())
    outside = not config.veto_low <= geometric <= config.veto_high or float(ratio.min()) < config.veto_token
    return bool(turns.trained[turn]) and not outside


# ---- the losses -------------------------------------------------------------------------------------------------


def cispo(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """sg(min(C, R)) A log pi (arXiv 2506.13585), the cap by the sign of the turn's advantage."""
    weight = torch.minimum(rows.log_ratio.exp().detach(), rows.cap(rows.net, config))
    return summed(rows, weight * rows.advantage * rows.logprobs)


def clipped(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """b min(r A, clip(r) A), for A < 0 not below c A (arXiv 1707.06347, 1912.09729; b as in 2505.24298)."""
    now = rows.logprobs.detach()
    fresh = rows.age < 1
    share = torch.where(fresh, 0.0, (rows.age - 1) / rows.age.clamp(min=1))
    anchor = {
        "behaviour": rows.mu,
        "recomputed": rows.proximal,
        "interpolated": rows.mu + share * (now - rows.mu),
    }[config.proximal]
    a, ratio = rows.advantage, (rows.logprobs - anchor).exp()
    gain = torch.minimum(ratio * a, ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * a)
    if options.dual_clip > 0:
        gain = torch.where(a < 0, torch.maximum(gain, options.dual_clip * a), gain)
    return summed(rows, torch.minimum((anchor - rows.mu).exp(), rows.cap(a, config)) * gain)


def reinforce(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """A log pi, or min(cap, R) A log pi."""
    ratio = rows.log_ratio.exp().detach()
    weight = ratio.clamp(max=options.cap) if options.cap else torch.ones_like(ratio)
    return summed(rows, weight * rows.advantage * rows.logprobs)


def icepop(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """R if it is in the window, else 0 (arXiv 2510.18855)."""
    ratio = rows.log_ratio.exp().detach()
    inside = (ratio >= options.low) & (ratio <= options.high)
    weight = torch.where(inside, torch.minimum(ratio, rows.cap(rows.net, config)), 0.0)
    return summed(rows, weight * rows.advantage * rows.logprobs)


def dppo(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """keep A R log pi - tau (log R)^2, a token being dropped when its probability moved too far its advantage's way."""
    moved = (rows.logprobs.exp() - rows.mu.exp()).detach()
    a = rows.advantage
    dropped = ((a > 0) & (moved > options.high)) | ((a < 0) & (moved < -options.low))
    return _kept(rows, config, ~dropped) + summed(rows, -options.kl_tau * rows.log_ratio**2)


def ipo(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """The same, a token being dropped when its probability moved too far either way."""
    moved = (rows.logprobs.exp() - rows.mu.exp()).detach()
    return _kept(rows, config, moved.abs() <= options.delta) + summed(rows, -options.kl_tau * rows.log_ratio**2)


def m2po(rows: LeafRows, config: ObjectiveConfig, options: Any) -> Tensor:
    """r A on tokens that are kept (arXiv 2510.01161); row by row and token by token, each as heavy as its leaf."""
    x, a = rows.log_ratio.detach(), rows.advantage
    harmful = rows.trained & (a * x > 0)
    size, weight = x.abs()[harmful], rows.weight.expand_as(x)[harmful]
    over = bool(size.numel()) and float((weight * size**2).sum() / weight.sum()) > options.budget
    if not over:
        return _kept(rows, config, torch.ones_like(harmful))
    if options.variant == "mask":
        kept_sizes = [
            bound
            for bound in [0.0, *size.tolist()]
            if float((weight * size**2)[size <= bound].sum()) <= options.budget * float(weight[size <= bound].sum())
        ]
        return _kept(rows, config, ~harmful | (x.abs() <= max(kept_sizes)))
    taus = [
        bound
        for bound in [0.0, *size.tolist()]
        if float((weight * size.clamp(max=bound) ** 2).sum() / weight.sum()) <= options.budget
    ]
    tau = torch.tensor(max(taus))
    low = 1 - float(torch.maximum(1 - torch.exp(-tau), torch.tensor(options.floor_low)))
    high = 1 + float(torch.maximum(torch.exp(tau) - 1, torch.tensor(options.floor_high)))
    return _kept(rows, config, torch.where(a > 0, x.exp() <= high, x.exp() >= low))


def _kept(rows: LeafRows, config: ObjectiveConfig, keep: Tensor) -> Tensor:
    """sg(min(C, R)) A log pi where kept."""
    weight = torch.minimum(rows.log_ratio.exp().detach(), rows.cap(rows.advantage, config))
    return summed(rows, torch.where(keep, weight * rows.advantage * rows.logprobs, 0.0))


REFERENCES: dict[str, Reference] = {
    "tree_tis": cispo,
    "reinforce": reinforce,
    "ppo": clipped,
    "dapo": clipped,
    "dr_grpo": clipped,
    "icepop": icepop,
    "dppo": dppo,
    "ipo": ipo,
    "m2po": m2po,
    **TREE_REFERENCES,
}
