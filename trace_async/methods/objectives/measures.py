"""What an update saw, by age, depth and sign of the advantage: sums that add up over micro-batches and processes.

The log-ratio is trained minus behaviour log-probability. k3 = r - 1 - log r estimates KL(behaviour || trained) with
low variance (J. Schulman, "Approximating KL divergence", 2020). Effective sample size is (sum w)^2 / sum w^2 (A. Kong,
1992) over turns that are not vetoed, w the uncapped product of a turn's token ratios. Harmful tokens are those a clip
would touch, advantage > 0 with ratio > 1 or < 0 with ratio < 1; M2PO (arXiv 2510.01161) watches their mean square.

Measured are trained turns, the same way for every objective. Never part of a loss.

Legend: n tokens at hand · J turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.methods.objectives.ratios import LOG_RATIO_BOUND, any_in_turn, make_ratios
from trace_async.methods.objectives.turns import Surrogate, TurnTensors

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
"""Names of the buckets of ages and depths."""

BUCKET_STARTS = (1, 2, 3, 5, 9)
"""First value of every bucket but the first."""

SIGNS = ("negative", "zero", "positive")

COLUMNS = (
    *("tokens", "log_ratio", "log_ratio_sq", "k3", "capped", "masked", "harmful", "harmful_sq"),
    *("turns", "vetoed", "broken"),
)
"""Sums per bucket. The first eight run over tokens of turns with finite log-probabilities, the rest over turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveStats:
    """Additive sums, detached; `merge_stats` adds them up."""

    age: Tensor  # f64 [buckets, columns]
    depth: Tensor  # f64 [buckets, columns]
    sign: Tensor  # f64 [3, columns]
    weights: Tensor  # f64 [3]: number of turns with finite log-probabilities, sum of their weights, sum of squares
    max_abs_log_ratio: Tensor  # f64 []: the largest before any clamp; merged by maximum
    held_back: Tensor  # f64 []: tokens that `objective.m2_budget` kept out of the loss


def measure(
    logprobs: Tensor,
    turns: TurnTensors,
    config: ObjectiveConfig,
    surrogate: Surrogate,
    *,
    held: Tensor | None = None,
) -> ObjectiveStats:
    """What the tokens at hand say, `logprobs` [n]; detached. `held` bool [n]: those that a brake kept out."""
    ratios = make_ratios(logprobs.detach(), turns, config)
    x = ratios.log_ratio.double()
    sign = torch.sign(turns.advantage)
    counted = any_in_turn(torch.ones_like(turns.turn), turns) & turns.trained
    usable = counted & ~ratios.broken
    stands = ~surrogate.vetoed[turns.turn]
    masked = torch.zeros_like(stands) if surrogate.masked is None else surrogate.masked & stands
    flags = torch.stack([surrogate.touched & stands, masked], 1)
    per_turn = _per_turn_sums(x, turns.turn, usable, flags=flags, sign=sign)
    happened = torch.stack([counted, surrogate.vetoed & counted, counted & ratios.broken], 1).to(x.dtype)
    per_turn = torch.cat([per_turn, happened], 1)
    product = torch.zeros_like(per_turn[:, 0]).index_add_(0, turns.turn, x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = product[usable & ~surrogate.vetoed].exp()
    starts = torch.tensor(BUCKET_STARTS, device=turns.age.device)
    return ObjectiveStats(
        age=_by_bucket(per_turn, torch.bucketize(turns.age, starts, right=True), len(BUCKETS)),
        depth=_by_bucket(per_turn, torch.bucketize(turns.depth, starts, right=True), len(BUCKETS)),
        sign=_by_bucket(per_turn, sign.long() + 1, len(SIGNS)),
        weights=torch.stack([torch.ones_like(weight).sum(), weight.sum(), weight.square().sum()]),
        max_abs_log_ratio=torch.cat([x.abs() * counted[turns.turn], x.new_zeros(1)]).max(),
        held_back=x.new_zeros(()) if held is None else held.sum().to(x.dtype),
    )


def merge_stats(parts: Sequence[ObjectiveStats]) -> ObjectiveStats:
    """The stats of all micro-batches together. Raises ValueError for none."""
    if not parts:
        raise ValueError("no micro-batch to merge: a step without trained turns has no objective statistics")
    return ObjectiveStats(
        age=torch.stack([part.age for part in parts]).sum(0),
        depth=torch.stack([part.depth for part in parts]).sum(0),
        sign=torch.stack([part.sign for part in parts]).sum(0),
        weights=torch.stack([part.weights for part in parts]).sum(0),
        max_abs_log_ratio=torch.stack([part.max_abs_log_ratio for part in parts]).max(),
        held_back=torch.stack([part.held_back for part in parts]).sum(),
    )


def no_stats(device: torch.device | str = "cpu") -> ObjectiveStats:
    """What nothing says; changes no merge."""
    return from_vector(torch.zeros(_VECTOR_LENGTH, dtype=torch.float64, device=device))


def to_vector(stats: ObjectiveStats) -> Tensor:
    """All numbers, f64 [...], for a process that merges those of several."""
    return torch.cat([getattr(stats, name).reshape(-1) for name in _SHAPES])


def from_vector(vector: Tensor) -> ObjectiveStats:
    """The opposite of `to_vector`."""
    parts = torch.split(vector, [math.prod(shape) for shape in _SHAPES.values()])
    return ObjectiveStats(
        **{name: part.reshape(shape) for (name, shape), part in zip(_SHAPES.items(), parts, strict=True)}
    )


_SHAPES = {
    "age": (len(BUCKETS), len(COLUMNS)),
    "depth": (len(BUCKETS), len(COLUMNS)),
    "sign": (len(SIGNS), len(COLUMNS)),
    "weights": (3,),
    "max_abs_log_ratio": (),
    "held_back": (),
}
_VECTOR_LENGTH = sum(math.prod(shape) for shape in _SHAPES.values())


def finish_stats(stats: ObjectiveStats) -> dict[str, float]:
    """Flat metrics: `objective/...` over everything, `age/3-4/...`, `depth/2/...`, `sign/positive/...` where seen.

    Each group has tokens, turns, log_ratio_mean, log_ratio_sq_mean, kl_k3, harmful_sq_mean, capped_share and
    masked_share (of tokens), vetoed_share and nonfinite_share (of turns); a mean over nothing is NaN. `objective` also
    has ess_ratio (effective sample size per turn that is not vetoed, 1 when on-policy), max_abs_log_ratio and
    held_back_share.
    """
    count, total, squares = stats.weights.tolist()
    metrics = dict(_named("objective", stats.age.sum(0)))
    metrics["objective/ess_ratio"] = _ratio(total * total, squares * count)
    metrics["objective/max_abs_log_ratio"] = float(stats.max_abs_log_ratio)
    metrics["objective/held_back_share"] = _ratio(
        float(stats.held_back), float(stats.age[:, COLUMNS.index("tokens")].sum())
    )
    for group, names, table in (
        ("age", BUCKETS, stats.age),
        ("depth", BUCKETS, stats.depth),
        ("sign", SIGNS, stats.sign),
    ):
        for name, row in zip(names, table, strict=True):
            if row[COLUMNS.index("turns")] > 0:
                metrics.update(_named(f"{group}/{name}", row))
    return metrics


def _per_turn_sums(x: Tensor, turn: Tensor, usable: Tensor, *, flags: Tensor, sign: Tensor) -> Tensor:
    """[J, 8]: token sums of usable turns; `flags` bool [n, 2] are what was capped and what was masked."""
    counted = usable[turn].to(x.dtype)
    harmful = (sign[turn] * x > 0).to(x.dtype)
    bounded = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k3 = bounded.expm1() - bounded
    capped, masked = flags.to(x.dtype).unbind(1)
    per_token = torch.stack([torch.ones_like(x), x, x.square(), k3, capped, masked, harmful, harmful * x.square()], 1)
    return x.new_zeros(len(usable), per_token.shape[1]).index_add_(0, turn, per_token * counted[:, None])


def _by_bucket(per_turn: Tensor, bucket: Tensor, num_buckets: int) -> Tensor:
    return per_turn.new_zeros(num_buckets, per_turn.shape[1]).index_add_(0, bucket, per_turn)


def _named(prefix: str, row: Tensor) -> Iterator[tuple[str, float]]:
    sums = dict(zip(COLUMNS, row.tolist(), strict=True))
    yield f"{prefix}/tokens", sums["tokens"]
    yield f"{prefix}/turns", sums["turns"]
    yield f"{prefix}/log_ratio_mean", _ratio(sums["log_ratio"], sums["tokens"])
    yield f"{prefix}/log_ratio_sq_mean", _ratio(sums["log_ratio_sq"], sums["tokens"])
    yield f"{prefix}/kl_k3", _ratio(sums["k3"], sums["tokens"])
    yield f"{prefix}/capped_share", _ratio(sums["capped"], sums["tokens"])
    yield f"{prefix}/masked_share", _ratio(sums["masked"], sums["tokens"])
    yield f"{prefix}/harmful_sq_mean", _ratio(sums["harmful_sq"], sums["harmful"])
    yield f"{prefix}/vetoed_share", _ratio(sums["vetoed"], sums["turns"])
    yield f"{prefix}/nonfinite_share", _ratio(sums["broken"], sums["turns"])


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
