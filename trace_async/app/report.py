"""What a finished run says about itself: summary.json, six lines of text, and two pictures.

Reads the run folder only; a run that stopped early has a summary too, with null for what is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from trace_async.app.curves import Heldout, draw_curve, draw_reliability
from trace_async.app.display import format_count, format_digits, format_seconds, format_share
from trace_async.app.totals import Figures, or_nan, run_allocation, run_calibration, run_costs
from trace_async.metrics import column, read_rows
from trace_async.run_folder import RunFolder, read_json, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run; shares in [0, 1]; None = not measured."""

    name: str
    success_before: float | None  # sampled play on held-out tasks
    success_after: float | None
    success_after_low: float | None  # 95 % interval
    success_after_high: float | None
    greedy_before: float | None  # the same tasks with the most likely tokens
    greedy_after: float | None
    heldout_tasks: int
    wall_s: float  # from start to summary, evaluations included; of a resumed run, its last session
    sampled_tokens: int  # by actors, in groups that were consumed; shared prefixes once
    versions: int  # published after version 0
    steps: int
    max_age_steps: int | None  # oldest turn that was trained on
    mean_age_steps: float | None
    groups_trained: int  # with a gradient
    groups_flat: int  # consumed, but every outcome was equal
    groups_rejected: int  # given up after too many attempts
    costs: Figures  # by unit; all starts of a resumed run together
    calibration: dict[str, Figures]  # by kind of prediction
    allocation: Figures  # what it promised and what it brought
    policy: str | None  # a transformers folder


def summarize(folder: RunFolder, *, name: str, wall_s: float) -> Summary:
    """The summary of what lies in the folder now."""
    rows = read_rows(folder.metrics)
    before, after = (read_json(folder.evaluation(label)) or {} for label in ("before", "after"))
    ages = [age for age in column(rows, "staleness/age_max") if not math.isnan(age)]
    mean_ages = [age for age in column(rows, "staleness/age_mean") if not math.isnan(age)]
    return Summary(
        name=name,
        success_before=_find(before, "sampled", "success"),
        success_after=_find(after, "sampled", "success"),
        success_after_low=_find(after, "sampled", "success_low"),
        success_after_high=_find(after, "sampled", "success_high"),
        greedy_before=_find(before, "greedy", "success"),
        greedy_after=_find(after, "greedy", "success"),
        heldout_tasks=int(_find(after, "sampled", "num_played") or _find(after, "greedy", "num_played") or 0),
        wall_s=round(wall_s, 1),
        sampled_tokens=_last_count(rows, "rollout/sampled_tokens_total"),
        versions=_last_count(rows, "training/version"),
        steps=_last_count(rows, "training/global_step"),
        max_age_steps=int(max(ages)) if ages else None,
        mean_age_steps=round(sum(mean_ages) / len(mean_ages), 3) if mean_ages else None,
        groups_trained=_last_count(rows, "groups/trained_total"),
        groups_flat=_last_count(rows, "groups/flat_total"),
        groups_rejected=_last_count(rows, "groups/rejected_total"),
        costs=run_costs(rows),
        calibration=run_calibration(rows),
        allocation=run_allocation(rows),
        policy=str(folder.policy) if folder.policy.is_dir() else None,
    )


def write_report(folder: RunFolder, *, name: str, wall_s: float) -> Summary:
    """Writes summary.json, curve.png and reliability.png."""
    summary = summarize(folder, name=name, wall_s=wall_s)
    write_json(folder.summary, asdict(summary))
    rows = read_rows(folder.metrics)
    draw_curve(
        rows,
        folder.curve,
        title=f"{name}: {summary.steps} steps in {format_seconds(wall_s)}",
        heldout=(
            Heldout("sampled", summary.success_before, summary.success_after),
            Heldout("greedy", summary.greedy_before, summary.greedy_after),
        ),
    )
    draw_reliability(rows, folder.reliability, title=f"{name}: predictions before their outcomes")
    return summary


_NOTHING_LEARNED = (
    "; nothing was learned: every group's outcomes were equal. Can the policy read this environment, and its answers "
    "be read? rollout/invalid_share in metrics.jsonl tells"
)


def summary_lines(summary: Summary, folder: RunFolder) -> list[str]:
    """The six lines a run ends with."""
    interval = ""
    if summary.success_after_low is not None and summary.success_after_high is not None:
        low, high = format_share(summary.success_after_low), format_share(summary.success_after_high)
        interval = f" (95 %: {low} to {high})"
    oldest = "-" if summary.max_age_steps is None else str(summary.max_age_steps)
    return [
        f"success   sampled {_arrow(summary.success_before, summary.success_after)}{interval}   greedy "
        f"{_arrow(summary.greedy_before, summary.greedy_after)}   on {summary.heldout_tasks} held-out tasks",
        f"spent     {format_count(summary.sampled_tokens)} sampled tokens "
        f"({format_count(or_nan(summary.costs['rollout_equivalents']))} root rollouts' worth), "
        f"{format_count(or_nan(summary.costs['environment_steps']))} environment steps, in "
        f"{format_seconds(summary.wall_s)}",
        f"training  {summary.steps} steps, {summary.versions} versions, oldest turn {oldest} steps, "
        f"groups: {format_count(summary.groups_trained)} trained, {format_count(summary.groups_flat)} flat, "
        f"{format_count(summary.groups_rejected)} rejected{_NOTHING_LEARNED if summary.groups_trained == 0 else ''}",
        f"predictor Brier score (a constant's): {_brier(summary, 'prompts')} prompts, "
        f"{_brier(summary, 'new_prompts')} prompts never seen before, {_brier(summary, 'prefixes')} prefixes",
        f"pictures  {folder.curve}  {folder.reliability.name}",
        f"policy    {summary.policy or 'none: the run ended before it was written'}",
    ]


def _brier(summary: Summary, kind: str) -> str:
    figures = summary.calibration[kind]
    return f"{format_digits(or_nan(figures['brier']))} ({format_digits(or_nan(figures['constant_brier']))})"


def _arrow(before: float | None, after: float | None) -> str:
    shares = [or_nan(value) for value in (before, after)]
    return " -> ".join(format_share(share) for share in shares)


def _find(result: Mapping[str, object], mode: str, key: str) -> float | None:
    part = result.get(mode)
    value = part.get(key) if isinstance(part, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _last_count(rows: Sequence[Mapping[str, object]], key: str) -> int:
    value = column(rows[-1:], key)[0] if rows else math.nan
    return 0 if math.isnan(value) else int(value)
