"""The off-policy-corrected policy gradient on a turn tree: truncated importance weights per token, vetoes per turn.

Owns the loss and its diagnostics; the only torch in `methods`. Maximises, for turns n of one batch of rows,

    sum_n  mass_n  A_n  M_n  sum_t  sg[ min(C_n, exp(logp_t - mu_t)) ]  logp_t

with sg a stop-gradient, mu the behaviour log-probabilities recorded when the token was sampled, C_n the turn's cap and
M_n its veto. Token-level truncated importance sampling in the CISPO form (arXiv 2506.13585): a capped token keeps its
gradient. Each turn carries one advantage, so by linearity this equals the loss of the flattened tree, in which a shared
turn stands in the row of every leaf below it, with leaf weights that sum to the turn's mass.

Two factors of the general tree form are 1 here: the prefix factor, the ratio of everything above a turn, which would
make its state distributed as under the trained policy; and the future ratio of what was sampled below it, which would
make its advantage an estimate of the trained policy's own value. Only turns with nothing above are exact in the first
sense, only turns with nothing below in the second. Both factors are products over many tokens, whose variance grows
with depth, while the bias of leaving them out grows with age only: ages end at `max_age_steps`, and after
`soft_age_steps` caps are 1 (verdict TIGHT).

Invariants: float32; masks before exponentials, exponents clamped; a token whose log-probabilities are not finite takes
its whole turn out of the loss and is counted, so the loss is never NaN (a model whose logits are NaN still has NaN
gradients: that is the trainer's to see). Nothing is divided here: the denominator is the caller's, fixed by what was
played and not by what was masked.

Diagnostics: the log-ratio is trained minus behaviour log-probability. k3 = r - 1 - log r estimates KL(behaviour ||
trained) with low variance (J. Schulman, "Approximating KL divergence", 2020). Effective sample size is (sum w)^2 /
sum w^2 over turns (A. Kong, 1992), w the uncapped product of a turn's token ratios. Harmful tokens are those a clip
would touch, advantage > 0 with ratio > 1 or < 0 with ratio < 1; M2PO (arXiv 2510.01161) watches their mean square.

Legend: B rows, T positions, J trained turns of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_async.config import ObjectiveConfig
from trace_async.core.packing import RowBatch
from trace_async.core.types import Verdict

LOG_RATIO_BOUND = 20.0
"""Exponents are clamped to +-20: e^20 is beyond any cap, and float32 overflows near e^88."""

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
"""Names of the buckets of ages and depths."""

BUCKET_STARTS = (1, 2, 3, 5, 9)
"""First value of every bucket but the first."""

SIGNS = ("negative", "zero", "positive")

COLUMNS = ("tokens", "log_ratio", "log_ratio_sq", "k3", "capped", "harmful", "harmful_sq", "turns", "vetoed", "broken")
"""Sums per bucket. The first seven run over tokens of turns with finite log-probabilities, the rest over turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveBatch:
    """What the objective reads of a `RowBatch`, as tensors on the device of the log-probabilities."""

    behaviour_logprobs: Tensor  # f32 [B, T] nats
    turn_index: Tensor  # i64 [B, T]; -1 where no loss
    advantage: Tensor  # f32 [J]
    mass: Tensor  # f32 [J]
    age: Tensor  # i64 [J] optimizer steps
    tight: Tensor  # bool [J] verdict TIGHT
    depth: Tensor  # i64 [J]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveStats:
    """Additive sums, detached; `merge_stats` adds them up."""

    age: Tensor  # f64 [buckets, columns]
    depth: Tensor  # f64 [buckets, columns]
    sign: Tensor  # f64 [3, columns]
    weights: Tensor  # f64 [3]: number of turns with finite log-probabilities, sum of their weights, sum of squares
    max_abs_log_ratio: Tensor  # f64 []: the largest before any clamp; merged by maximum


def to_tensors(rows: RowBatch, device: torch.device | str = "cpu") -> ObjectiveBatch:
    """The tensors of a `RowBatch`. The loss mask is `turn_index` >= 0, as packing promises."""
    return ObjectiveBatch(
        behaviour_logprobs=torch.as_tensor(rows.behaviour_logprobs, dtype=torch.float32, device=device),
        turn_index=torch.as_tensor(rows.turn_index, dtype=torch.int64, device=device),
        advantage=torch.as_tensor(rows.advantage, dtype=torch.float32, device=device),
        mass=torch.as_tensor(rows.mass, dtype=torch.float32, device=device),
        age=torch.as_tensor(rows.age, dtype=torch.int64, device=device),
        tight=torch.as_tensor(rows.verdict == Verdict.TIGHT, dtype=torch.bool, device=device),
        depth=torch.as_tensor(rows.depth, dtype=torch.int64, device=device),
    )


def caps(batch: ObjectiveBatch, config: ObjectiveConfig) -> Tensor:
    """Cap of the importance weight of each turn, f32 [J].

    Positive advantage: C(s) = 1 + (cap_positive - 1) cap_decay^s at age s. Negative: cap_negative at age 0, then 1, as
    in V-trace and TOPR, since stale negatives are what destabilises off-policy policy gradients. TIGHT: 1, either sign.
    """
    age = batch.age.to(torch.float32)
    positive = 1.0 + (config.cap_positive - 1.0) * torch.pow(torch.full_like(age, config.cap_decay), age)
    negative = torch.where(batch.age == 0, config.cap_negative, 1.0)
    by_sign = torch.where(batch.advantage > 0, positive, negative)
    return torch.where(batch.tight, torch.ones_like(by_sign), by_sign)


def tree_tis(logprobs: Tensor, batch: ObjectiveBatch, config: ObjectiveConfig) -> tuple[Tensor, ObjectiveStats]:
    """The loss to minimise, summed and not divided, and what it saw.

    `logprobs` f32 [B, T]: log-probability of the token AT each position under the weights being trained; positions
    without loss are not read. A turn is vetoed when its geometric mean ratio leaves [veto_low, veto_high], when one of
    its tokens has a ratio below veto_token, or when one of its log-probabilities is not finite.
    """
    on = batch.turn_index >= 0
    turn = batch.turn_index[on]  # [tokens]
    logp, mu = logprobs[on].to(torch.float32), batch.behaviour_logprobs[on]
    log_ratio = logp.detach() - mu
    finite = torch.isfinite(log_ratio)
    log_ratio = torch.where(finite, log_ratio, 0.0)
    broken = _any_in_turn(~finite, turn, batch)
    vetoed = _vetoed(log_ratio, turn, batch, config) & ~broken
    cap = caps(batch, config)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    coefficient = batch.mass * batch.advantage * (~vetoed & ~broken)
    per_token = coefficient[turn] * torch.minimum(cap[turn], ratio) * torch.where(finite, logp, 0.0)
    stats = _measure(
        log_ratio,
        turn,
        ~broken,
        capped=ratio > cap[turn],
        vetoed=vetoed,
        sign=torch.sign(batch.advantage),
        age=batch.age,
        depth=batch.depth,
    )
    return -per_token.sum(), stats


def _measure(
    log_ratio: Tensor,
    turn: Tensor,
    usable: Tensor,
    *,
    capped: Tensor,
    vetoed: Tensor,
    sign: Tensor,
    age: Tensor,
    depth: Tensor,
) -> ObjectiveStats:
    """Sums of one micro-batch: `log_ratio`, `turn` (its index), `capped` over tokens; the others [J] over its turns."""
    x = log_ratio.double()
    per_turn = _per_turn_sums(x, turn, usable, capped=capped, sign=sign, vetoed=vetoed)
    product = torch.zeros_like(per_turn[:, 0]).index_add_(0, turn, x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = product[usable].exp()
    starts = torch.tensor(BUCKET_STARTS, device=age.device)
    return ObjectiveStats(
        age=_by_bucket(per_turn, torch.bucketize(age, starts, right=True), len(BUCKETS)),
        depth=_by_bucket(per_turn, torch.bucketize(depth, starts, right=True), len(BUCKETS)),
        sign=_by_bucket(per_turn, sign.long() + 1, len(SIGNS)),
        weights=torch.stack([torch.ones_like(weight).sum(), weight.sum(), weight.square().sum()]),
        max_abs_log_ratio=torch.cat([x.abs(), x.new_zeros(1)]).max(),
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
    )


def finish_stats(stats: ObjectiveStats) -> dict[str, float]:
    """Flat metrics: `objective/...` over everything, `age/3-4/...`, `depth/2/...`, `sign/positive/...` where seen.

    Each group has tokens, turns, log_ratio_mean, log_ratio_sq_mean, kl_k3, capped_share (of tokens), harmful_sq_mean,
    vetoed_share and nonfinite_share (of turns); a mean over nothing is NaN. `objective` also has ess_ratio (effective
    sample size per turn, 1 when on-policy) and max_abs_log_ratio.
    """
    count, total, squares = stats.weights.tolist()
    metrics = dict(_named("objective", stats.age.sum(0)))
    metrics["objective/ess_ratio"] = _ratio(total * total, squares * count)
    metrics["objective/max_abs_log_ratio"] = float(stats.max_abs_log_ratio)
    for group, names, table in (
        ("age", BUCKETS, stats.age),
        ("depth", BUCKETS, stats.depth),
        ("sign", SIGNS, stats.sign),
    ):
        for name, row in zip(names, table, strict=True):
            if row[COLUMNS.index("turns")] > 0:
                metrics.update(_named(f"{group}/{name}", row))
    return metrics


def _vetoed(log_ratio: Tensor, turn: Tensor, batch: ObjectiveBatch, config: ObjectiveConfig) -> Tensor:
    """Turns outside the trust window, bool [J]; a bound of 0 is no bound."""
    tokens = torch.zeros_like(batch.mass).index_add_(0, turn, torch.ones_like(log_ratio))
    total = torch.zeros_like(batch.mass).index_add_(0, turn, log_ratio)
    geometric = total / tokens.clamp(min=1.0)
    outside = (geometric < _log(config.veto_low)) | (geometric > _log(config.veto_high))
    return outside | _any_in_turn(log_ratio < _log(config.veto_token), turn, batch)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf


def _any_in_turn(flags: Tensor, turn: Tensor, batch: ObjectiveBatch) -> Tensor:
    """Turns with at least one flagged token, bool [J]."""
    return torch.zeros_like(batch.mass).index_add_(0, turn, flags.to(batch.mass.dtype)) > 0


def _per_turn_sums(x: Tensor, turn: Tensor, usable: Tensor, *, capped: Tensor, sign: Tensor, vetoed: Tensor) -> Tensor:
    """[J, columns]: token sums of usable turns, then the turn counts."""
    counted = usable[turn].to(x.dtype)
    harmful = (sign[turn] * x > 0).to(x.dtype)
    bounded = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k3 = bounded.expm1() - bounded
    per_token = torch.stack(
        [torch.ones_like(x), x, x.square(), k3, capped.to(x.dtype), harmful, harmful * x.square()], 1
    )
    sums = x.new_zeros(len(usable), per_token.shape[1]).index_add_(0, turn, per_token * counted[:, None])
    turns = torch.stack([torch.ones_like(usable), vetoed, ~usable], 1).to(x.dtype)
    return torch.cat([sums, turns], 1)


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
    yield f"{prefix}/harmful_sq_mean", _ratio(sums["harmful_sq"], sums["harmful"])
    yield f"{prefix}/vetoed_share", _ratio(sums["vetoed"], sums["turns"])
    yield f"{prefix}/nonfinite_share", _ratio(sums["broken"], sums["turns"])


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
