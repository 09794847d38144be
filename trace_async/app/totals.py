"""Figures of a whole run, from the rows of its steps: costs, honesty of the predictor, promises of the allocation.

A step that a resumed run made again has one row here, its last. None stands for what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trace_async.learning.honesty import KINDS, RELIABILITY_BINS
from trace_async.methods.calibration import ece_of
from trace_async.metrics import column

Rows: TypeAlias = Sequence[Mapping[str, object]]
Figures: TypeAlias = dict[str, float | None]

COSTS = (
    *("sampled_tokens", "environment_steps", "rollout_equivalents", "nominal_rollouts"),
    *("wall_s", "generate_s", "environment_s"),
)

_ECE_BINS = 10  # as in a row
_DIGITS = 4


def run_costs(rows: Rows) -> Figures:
    """The last totals of every unit; see `learning/costs.py` for what they are."""
    keys = {name: "rollout" if name == "sampled_tokens" else "cost" for name in COSTS}
    return {name: _last(column(rows, f"{stage}/{name}_total")) for name, stage in keys.items()}


def run_calibration(rows: Rows) -> dict[str, Figures]:
    """By kind of prediction: means over all outcomes of the run, ECE of the pooled bins, mean Spearman of the steps."""
    return {kind: _calibration(rows, kind) for kind in KINDS}


def run_allocation(rows: Rows) -> Figures:
    """Sums of what allocations promised and brought, and the mean effective ratio of the steps."""
    names = [f"{what}_{part}" for what in ("mixed", "flips") for part in ("places", "expected", "realised")]
    sums = {name: _rounded(sum(_known(column(rows, f"allocation/{name}")))) for name in names}
    return {"effective_ratio": _mean(column(rows, "rollout/effective_ratio")), **sums}


def reliability_table(rows: Rows, kind: str) -> NDArray[np.float64]:
    """[bins, 3] outcomes, summed predictions, summed successes over the run."""
    table = np.zeros((RELIABILITY_BINS, 3))
    for row in rows:
        bins = row.get(f"predictor/{kind}/bins")
        for number, *sums in bins if isinstance(bins, list) else []:
            table[int(number)] += sums
    return table


def or_nan(value: float | None) -> float:
    """NaN for None."""
    return math.nan if value is None else value


def _calibration(rows: Rows, kind: str) -> Figures:
    outcomes = column(rows, f"predictor/{kind}/outcomes")
    table = reliability_table(rows, kind)
    return {
        "outcomes": sum(_known(outcomes)),
        **{
            name: _mean(column(rows, f"predictor/{kind}/{name}"), weights=outcomes)
            for name in ("brier", "constant_brier", "log_loss")
        },
        "ece": _rounded(ece_of(table.reshape(_ECE_BINS, -1, 3).sum(axis=1))),
        "spearman": _mean(column(rows, f"predictor/{kind}/spearman")),
    }


def _mean(values: Sequence[float], *, weights: Sequence[float] | None = None) -> float | None:
    """Mean of the known values; None without any."""
    pairs = [
        (value, weight)
        for value, weight in zip(values, weights or [1.0] * len(values), strict=True)
        if not math.isnan(value) and weight > 0
    ]
    total = sum(weight for _, weight in pairs)
    return _rounded(sum(value * weight for value, weight in pairs) / total) if pairs else None


def _last(values: Sequence[float]) -> float | None:
    return _rounded(values[-1]) if values else None


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)
