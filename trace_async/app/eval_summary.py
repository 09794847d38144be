"""What episodes came to: mean and 95 % interval of every measure, over all tasks and over those of each label.

A task is what is resampled: the intervals tell what other tasks of the same kind would have given, with this policy.
Means and shares get a percentile bootstrap (B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13); success, a plain proportion, keeps Wilson's interval. Invariants: the same rows give the same numbers in
whatever order they were played; a failed task counts nowhere but in `num_failed`; unknown is NaN and left out.

Pure: no files, no text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trace_async.app.eval_records import Row
from trace_async.app.evaluate import wilson_interval
from trace_async.core.outcomes import is_success
from trace_async.core.types import SUCCESS_ABOVE

NUM_RESAMPLES = 4000
_BOOTSTRAP_SEED = 0
_CHUNK_DRAWS = 4_000_000  # indices drawn at a time; bounds memory, not results

_Values: TypeAlias = NDArray[np.float64]


class Measure(NamedTuple):
    """One measure over some tasks."""

    mean: float
    low: float  # 95 % interval; NaN for fewer than two tasks
    high: float
    num: int  # tasks that have it


class Part(NamedTuple):
    """The tasks of one label, or all."""

    num_played: int
    num_failed: int
    measures: Mapping[str, Measure]  # by name, in the order in which they are to be read


class ModeSummary(NamedTuple):
    """All of one mode."""

    overall: Part
    by_label: Mapping[str, Mapping[str, Part]]  # criterion -> its value -> part


def summarize_mode(rows: Iterable[Row], *, success_above: float = SUCCESS_ABOVE) -> ModeSummary:
    """Every measure of one mode's rows, overall and by each label; outcomes above the threshold are successes."""
    ordered = sorted(rows, key=lambda row: row.task_index)
    names = _metric_names(ordered)
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in ordered:
        for criterion, value in row.labels.items():
            groups.setdefault(criterion, {}).setdefault(value, []).append(row)
    by_label = {
        criterion: {value: _part(found[value], names, success_above) for value in sorted(found, key=natural)}
        for criterion, found in sorted(groups.items())
    }
    return ModeSummary(_part(ordered, names, success_above), by_label)


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "2" before "10" and words by letters."""
    pieces: list[tuple[int, int, str]] = []
    digits = ""
    for letter in [*text, ""]:
        if letter.isascii() and letter.isdigit():
            digits += letter
            continue
        if digits:
            pieces.append((0, int(digits), ""))
            digits = ""
        pieces.append((1, 0, letter))
    return tuple(pieces)


def bootstrap_interval(numerator: _Values, denominator: _Values, *, seed: int = _BOOTSTRAP_SEED) -> _Values:
    """95 % percentile intervals [2, M] of the ratios of sums over tasks; both arguments [n tasks, M measures].

    A mean has ones below it, a share of turns the turns; zeros in both leave a task out. NaN for fewer than two tasks;
    resamples without any task that has a measure are left out.
    """
    num_tasks, num_measures = numerator.shape
    if num_tasks < 2:
        return np.full((2, num_measures), np.nan)
    rng = np.random.default_rng(seed)
    ratios = np.full((NUM_RESAMPLES, num_measures), np.nan)
    chunk = max(1, _CHUNK_DRAWS // num_tasks)
    for start in range(0, NUM_RESAMPLES, chunk):
        size = min(chunk, NUM_RESAMPLES - start)
        drawn = rng.integers(num_tasks, size=(size, num_tasks)) + num_tasks * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * num_tasks).reshape(size, num_tasks).astype(np.float64)
        below = times @ denominator
        np.divide(times @ numerator, below, out=ratios[start : start + size], where=below > 0.0)
    interval = np.full((2, num_measures), np.nan)
    for measure in range(num_measures):
        known = ratios[~np.isnan(ratios[:, measure]), measure]
        if known.size:
            interval[:, measure] = np.quantile(known, (0.025, 0.975))
    return interval


def _part(rows: Sequence[Row], metric_names: Mapping[str, str], success_above: float) -> Part:
    played = [row for row in rows if not row.failed]
    columns = _columns(played, metric_names, success_above)
    numerator = np.array([above for above, _ in columns.values()]).T.reshape(len(played), len(columns))
    denominator = np.array([below for _, below in columns.values()]).T.reshape(len(played), len(columns))
    intervals = bootstrap_interval(numerator, denominator)
    measures = {}
    for place, name in enumerate(columns):
        above, below = float(numerator[:, place].sum()), float(denominator[:, place].sum())
        low, high = (float(end) for end in intervals[:, place])
        num = int(np.count_nonzero(denominator[:, place]))
        if name == "success":
            low, high = wilson_interval(round(above), num)
        if num < 2 and name != "success":
            low = high = math.nan
        measures[name] = Measure(above / below if below else math.nan, low, high, num)
    return Part(len(played), len(rows) - len(played), measures)


def _columns(
    rows: Sequence[Row], metric_names: Mapping[str, str], success_above: float
) -> dict[str, tuple[list[float], list[float]]]:
    """For each measure what is summed above and below, task by task."""
    ones, outcomes = [1.0] * len(rows), [row.outcome for row in rows]
    columns: dict[str, tuple[list[float], list[float]]] = {
        "success": (is_success(outcomes, success_above).astype(float).tolist(), ones),
        "outcome": (outcomes, ones),
    }
    for shown, name in metric_names.items():
        values = [row.metrics.get(name, math.nan) for row in rows]
        known = [float(math.isfinite(value)) for value in values]
        columns[shown] = ([value if math.isfinite(value) else 0.0 for value in values], known)
    turns = [float(row.num_turns) for row in rows]
    columns["turns"] = (turns, ones)
    columns["invalid_share"] = ([float(row.num_invalid) for row in rows], turns)
    columns["sampled_tokens"] = ([float(row.sampled_tokens) for row in rows], ones)
    columns["prompt_tokens"] = ([float(row.prompt_tokens) for row in rows], ones)
    columns["context_tokens"] = ([float(row.context_tokens) for row in rows], ones)
    return columns


OWN_MEASURES = ("success", "outcome", "turns", "invalid_share", "sampled_tokens", "prompt_tokens", "context_tokens")
"""What is measured in every environment; a metric of the same name is shown as `environment/NAME`."""


def _metric_names(rows: Sequence[Row]) -> dict[str, str]:
    """The environment's metrics, as shown and as it calls them, in the order of their first appearance by task."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return {f"environment/{name}" if name in OWN_MEASURES else name: name for name in names}
