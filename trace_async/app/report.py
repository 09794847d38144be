"""What a finished run says about itself: summary.json, five lines of text, and a learning curve as PNG.

Reads the run folder only; a run that stopped early has a summary too, with null for what is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from trace_async.app.display import format_count, format_seconds, format_share, smooth
from trace_async.metrics import column, read_rows
from trace_async.run_folder import RunFolder, read_json, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTH_STEPS = 5
_SAMPLED, _GREEDY, _AGE, _EFFECTIVE = "#1f77b4", "#d62728", "#7f7f7f", "#2ca02c"


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
        policy=str(folder.policy) if folder.policy.is_dir() else None,
    )


def write_report(folder: RunFolder, *, name: str, wall_s: float) -> Summary:
    """Writes summary.json and curve.png."""
    summary = summarize(folder, name=name, wall_s=wall_s)
    write_json(folder.summary, asdict(summary))
    draw_curve(folder, summary)
    return summary


_NOTHING_LEARNED = (
    "; nothing was learned: every group's outcomes were equal. Can the policy read this environment, and its answers "
    "be read? rollout/invalid_share in metrics.jsonl tells"
)


def summary_lines(summary: Summary, folder: RunFolder) -> list[str]:
    """The five lines a run ends with."""
    interval = ""
    if summary.success_after_low is not None and summary.success_after_high is not None:
        low, high = format_share(summary.success_after_low), format_share(summary.success_after_high)
        interval = f" (95 %: {low} to {high})"
    oldest = "-" if summary.max_age_steps is None else str(summary.max_age_steps)
    return [
        f"success   sampled {_arrow(summary.success_before, summary.success_after)}{interval}   greedy "
        f"{_arrow(summary.greedy_before, summary.greedy_after)}   on {summary.heldout_tasks} held-out tasks",
        f"spent     {format_count(summary.sampled_tokens)} sampled tokens in {format_seconds(summary.wall_s)}",
        f"training  {summary.steps} steps, {summary.versions} versions, oldest turn {oldest} steps, "
        f"groups: {format_count(summary.groups_trained)} trained, {format_count(summary.groups_flat)} flat, "
        f"{format_count(summary.groups_rejected)} rejected{_NOTHING_LEARNED if summary.groups_trained == 0 else ''}",
        f"curve     {folder.curve}",
        f"policy    {summary.policy or 'none: the run ended before it was written'}",
    ]


def draw_curve(folder: RunFolder, summary: Summary) -> None:
    """Success over sampled tokens with the held-out points, and below it age and effective ratio."""
    # Agg without pyplot: no display is looked for and no global state is left behind
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(folder.metrics)
    tokens = column(rows, "rollout/sampled_tokens_total")
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _draw_success(top, tokens, rows, summary)
    _draw_pace(bottom, tokens, rows)
    figure.suptitle(f"{summary.name}: {summary.steps} steps in {format_seconds(summary.wall_s)}")
    figure.savefig(folder.curve, dpi=120)


def _draw_success(axes: Axes, tokens: Sequence[float], rows: Sequence[Mapping[str, object]], summary: Summary) -> None:
    success = column(rows, "rollout/success")
    axes.plot(tokens, success, color=_SAMPLED, alpha=0.25, linewidth=1)
    axes.plot(
        tokens,
        smooth(success, window=_SMOOTH_STEPS),
        color=_SAMPLED,
        label=f"training tasks (mean of {_SMOOTH_STEPS} steps)",
    )
    end = max([token for token in tokens if not math.isnan(token)], default=1.0)
    points = (
        ("held-out, sampled", summary.success_before, summary.success_after, _SAMPLED, -16),
        ("held-out, greedy", summary.greedy_before, summary.greedy_after, _GREEDY, 8),
    )
    for label, before, after, colour, rise in points:
        known = [(x, y) for x, y in ((0.0, before), (end, after)) if y is not None]
        if not known:
            continue
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, linestyle=":", color=colour, marker="o", markersize=8, label=label)
        for (x, y), side in zip(known, (1, -1), strict=False):
            axes.annotate(
                f"{100 * y:.0f} %",
                (x, y),
                xytext=(10 * side, rise),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                color=colour,
            )
    axes.set_ylim(0, 1)
    axes.set_ylabel("success")
    axes.yaxis.set_major_formatter(_percent)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_pace(axes: Axes, tokens: Sequence[float], rows: Sequence[Mapping[str, object]]) -> None:
    axes.plot(tokens, column(rows, "staleness/age_mean"), color=_AGE, label="age, mean")
    axes.plot(tokens, column(rows, "staleness/age_max"), color=_AGE, linestyle=":", label="age, oldest")
    axes.set_ylabel("age (steps)")
    axes.set_xlabel("sampled tokens")
    oldest = [age for age in column(rows, "staleness/age_max") if not math.isnan(age)]
    axes.set_ylim(0, 1.4 * max([*oldest, 1.0]))  # headroom for the legend
    axes.xaxis.set_major_formatter(_thousands)
    axes.grid(alpha=0.3)
    right = axes.twinx()
    ratio = smooth(column(rows, "rollout/effective_ratio"), window=_SMOOTH_STEPS)
    right.plot(tokens, ratio, color=_EFFECTIVE, label="effective ratio (right)")
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(_percent)
    lines = [*axes.get_lines(), *right.get_lines()]
    right.legend(lines, [str(line.get_label()) for line in lines], loc="upper right", ncols=3)


def _percent(value: float, _: float) -> str:
    return f"{100 * value:.0f} %"


def _thousands(value: float, _: float) -> str:
    return f"{value / 1000:,.0f}k" if value else "0"


def _arrow(before: float | None, after: float | None) -> str:
    shares = [math.nan if value is None else value for value in (before, after)]
    return " -> ".join(format_share(share) for share in shares)


def _find(result: Mapping[str, object], mode: str, key: str) -> float | None:
    part = result.get(mode)
    value = part.get(key) if isinstance(part, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _last_count(rows: Sequence[Mapping[str, object]], key: str) -> int:
    value = column(rows[-1:], key)[0] if rows else math.nan
    return 0 if math.isnan(value) else int(value)
