"""How honest predictions are: pure functions of predicted probabilities and what then happened.

Outcomes are 0 or 1, or success rates in between. A score over nothing is NaN, never 0.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

PROBABILITY_FLOOR = 1e-7
"""Keeps the log loss of a sure and wrong prediction finite (16.1 nats)."""


def brier(predicted: ArrayLike, happened: ArrayLike) -> float:
    """Mean squared error of the probabilities (G. W. Brier, 1950); 0.25 for always saying one half."""
    p, y = _pair(predicted, happened)
    return float(np.mean((p - y) ** 2)) if p.size else math.nan


def log_loss(predicted: ArrayLike, happened: ArrayLike) -> float:
    """Mean negative log-likelihood in nats; 0.693 for always saying one half."""
    p, y = _pair(predicted, happened)
    p = np.clip(p, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    return float(-np.mean(y * np.log(p) + (1.0 - y) * np.log1p(-p))) if p.size else math.nan


def ece(predicted: ArrayLike, happened: ArrayLike, *, bins: int = 10) -> float:
    """Expected calibration error: mean |predicted - happened| of equally wide bins, weighted by how full they are."""
    return ece_of(reliability(predicted, happened, bins=bins))


def reliability(predicted: ArrayLike, happened: ArrayLike, *, bins: int) -> Floats:
    """Number of pairs, sums of both sides in equally wide bins [bins, 3]; tables of several calls may be added."""
    p, y = _pair(predicted, happened)
    which = np.minimum((p * bins).astype(np.int64), bins - 1)
    return np.stack([np.bincount(which, weights=w, minlength=bins) for w in (np.ones_like(p), p, y)], axis=1)


def ece_of(table: ArrayLike) -> float:
    """`ece` of a `reliability` table [bins, 3]; NaN when it is empty."""
    pairs, predicted, happened = np.asarray(table, np.float64).reshape(-1, 3).T
    return float(np.abs(predicted - happened).sum() / pairs.sum()) if pairs.sum() > 0 else math.nan


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Rank correlation, ties at their mean rank. NaN for fewer than two pairs or a constant side."""
    a, b = _pair(first, second)
    if a.size < 2:
        return math.nan
    a, b = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0.0 else math.nan


def _ranks(values: Floats) -> Floats:
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2.0)[group])


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 1 or a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all():
        raise ValueError(f"need two equally long rows of finite numbers, got shapes {a.shape} and {b.shape}")
    return a, b
