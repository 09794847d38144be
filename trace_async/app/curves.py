"""The pictures of a run, as PNG: its learning curve, and how far its predictions came true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.app.display import smooth
from trace_async.app.totals import Figures, Rows, or_nan, reliability_table, run_calibration
from trace_async.metrics import column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMOOTH_STEPS = 5
_SAMPLED, _GREEDY, _AGE, _EFFECTIVE = "#1f77b4", "#d62728", "#7f7f7f", "#2ca02c"


class Heldout(NamedTuple):
    """Success on the held-out tasks, before and after training."""

    label: str
    before: float | None
    after: float | None


def draw_curve(rows: Rows, path: Path, *, title: str, heldout: Sequence[Heldout]) -> None:
    """Success over sampled tokens with the held-out points, and below it age and effective ratio."""
    tokens = column(rows, "rollout/sampled_tokens_total")
    figure = _new_figure(8, 6.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _draw_success(top, tokens, rows, heldout)
    _draw_pace(bottom, tokens, rows)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_reliability(rows: Rows, path: Path, *, title: str) -> None:
    """Predicted against observed success, for prompts and prefixes, with the number of outcomes of each bin below.

    On the dotted line success comes as often as predicted; larger dots stand for more outcomes.
    """
    figure = _new_figure(9, 5.6)
    panels = figure.subplots(2, 2, sharex=True, height_ratios=[3, 1])
    totals = run_calibration(rows)
    for place, kind in enumerate(("prompts", "prefixes")):
        table = reliability_table(rows, kind)
        _draw_reliability(panels[0][place], table)
        _draw_histogram(panels[1][place], table)
        panels[0][place].set_title(_describe(kind, totals[kind]), fontsize=10)
    panels[0][0].set_ylabel("observed success")
    panels[1][0].set_ylabel("outcomes")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _new_figure(width: float, height: float) -> Figure:
    # Agg without pyplot: no display is looked for and no global state is left behind
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_reliability(axes: Axes, table: NDArray[np.float64]) -> None:
    outcomes, predicted, happened = table[table[:, 0] > 0].T
    axes.plot([0, 1], [0, 1], color=_AGE, linestyle=":")
    if outcomes.size:
        size = 12 + 200 * outcomes / outcomes.max()
        axes.scatter(predicted / outcomes, happened / outcomes, s=size, color=_SAMPLED, alpha=0.7, clip_on=False)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_percent)
    axes.grid(alpha=0.3)


def _describe(kind: str, figures: Figures) -> str:
    brier, constant, ece = (or_nan(figures[name]) for name in ("brier", "constant_brier", "ece"))
    if math.isnan(brier):
        return f"{kind}: no outcomes"
    return f"{kind}: Brier {brier:.3f} (a constant's {constant:.3f}), ECE {ece:.3f}"


def _draw_histogram(axes: Axes, table: NDArray[np.float64]) -> None:
    width = 1 / len(table)
    axes.bar((np.arange(len(table)) + 0.5) * width, table[:, 0], width=0.9 * width, color=_SAMPLED, alpha=0.7)
    axes.set_xlabel("predicted success")
    axes.grid(alpha=0.3, axis="y")


def _draw_success(axes: Axes, tokens: Sequence[float], rows: Rows, heldout: Sequence[Heldout]) -> None:
    success = column(rows, "rollout/success")
    axes.plot(tokens, success, color=_SAMPLED, alpha=0.25, linewidth=1)
    axes.plot(
        tokens,
        smooth(success, window=_SMOOTH_STEPS),
        color=_SAMPLED,
        label=f"training tasks (mean of {_SMOOTH_STEPS} steps)",
    )
    end = max([token for token in tokens if not math.isnan(token)], default=1.0)
    for (label, before, after), (colour, rise) in zip(heldout, ((_SAMPLED, -16), (_GREEDY, 8)), strict=True):
        known = [(x, y) for x, y in ((0.0, before), (end, after)) if y is not None]
        if not known:
            continue
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, linestyle=":", color=colour, marker="o", markersize=8, label=f"held-out, {label}")
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


def _draw_pace(axes: Axes, tokens: Sequence[float], rows: Rows) -> None:
    axes.plot(tokens, column(rows, "staleness/age_mean"), color=_AGE, label="age, mean")
    axes.plot(tokens, column(rows, "staleness/age_max"), color=_AGE, linestyle=":", label="age, oldest")
    axes.set_ylabel("age (steps)")
    axes.set_xlabel("sampled tokens")
    oldest = [age for age in column(rows, "staleness/age_max") if not math.isnan(age)]
    axes.set_ylim(0, 1.1 * max([*oldest, 1.0]))
    axes.xaxis.set_major_formatter(_thousands)
    axes.grid(alpha=0.3)
    right = axes.twinx()
    ratio = smooth(column(rows, "rollout/effective_ratio"), window=_SMOOTH_STEPS)
    right.plot(tokens, ratio, color=_EFFECTIVE, label="effective ratio (right)")
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(_percent)
    lines = [*axes.get_lines(), *right.get_lines()]
    labels = [str(line.get_label()) for line in lines]
    right.legend(lines, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)  # above the curves


def _percent(value: float, _: float) -> str:
    return f"{100 * value:.0f} %"


def _thousands(value: float, _: float) -> str:
    return f"{value / 1000:,.0f}k" if value else "0"
