"""Tables and pictures of a study of methods, from its results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.quickstart_seeds import T_975
from benchmarks.quickstart_seeds import interval as interval_of_seeds

Result = Mapping[str, Any]

CURVES = ("grpo", "mopps", "tree_grpo", "treepo", "trace")
COLOURS = {
    **{"grpo": "#7f7f7f", "mopps": "#1f77b4", "tree_grpo": "#9467bd", "treepo": "#8c564b", "trace": "#d62728"},
    **{"trace_beta": "#ff7f0e"},
}
FACTORIAL = (("random_tree", "trace_prefix"), ("trace_root", "trace"))
"""Roots even or by TRACE, down; prefixes at random or by TRACE, across."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval (Student's t over seeds); NaN for fewer than three seeds."""
    if len(values) < 3:
        return round(statistics.mean(values), 4), math.nan
    mean, half = interval_of_seeds(values)
    return round(mean, 4), round(half, 4)


def table(results: Sequence[Result], labels: Mapping[str, str], *, also: Sequence[str] = ()) -> list[str]:
    """One Markdown line a method; `also`: splits with a column of their own."""
    columns = ["method", "seeds", "held-out success", *also, "effective ratio", "tokens to level", "Brier (constant)"]
    lines = [f"| {' | '.join([*columns, 'age mean, max'])} |", "|---" * (len(columns) + 1) + "|"]
    for name, own in _by_method(results, labels):
        reached = [found["tokens_to_level"] for found in own if found["tokens_to_level"] is not None]
        price = f"{statistics.mean(reached):,.0f} ({len(reached)} of {len(own)})" if reached else "-"
        brier = _shown(found["predictor"]["brier"] for found in own)
        constant = _shown(found["predictor"]["constant_brier"] for found in own)
        ages = f"{statistics.mean(found['age_mean'] for found in own):.2f}, {max(found['age_max'] for found in own)}"
        shares = [_percent(own, key) for key in ("success", *also, "effective_ratio")]
        cells = [labels[name], str(len(own)), *shares, price, f"{brier} ({constant})", ages]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(results: Sequence[Result], labels: Mapping[str, str], folder: Path, *, stem: str, title: str) -> None:
    """STEM.png: curves of success and effective ratio; STEM_ablation.png, where the study has the rows for it: every
    row, and the two stages of TRACE against each other."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for name, own in _by_method(results, labels):
        if name in CURVES:
            _band(left, [found["curve"] for found in own], labels[name], COLOURS[name])
            _band(right, [found["effective_curve"] for found in own], labels[name], COLOURS[name])
    left.set(xlabel="sampled tokens", ylabel=title, title="success at equal sampled tokens")
    right.set(xlabel="sampled tokens", ylabel="effective ratio", title="prompts with mixed outcomes", ylim=(0, 1))
    for axes in (left, right):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}k" if value else "0")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(folder / f"{stem}.png", dpi=110)
    pyplot.close(figure)
    if {name for names in FACTORIAL for name in names} <= set(labels):
        _draw_rows(results, labels, folder / f"{stem}_ablation.png")


def _band(axes: Axes, curves: Sequence[Sequence[Sequence[float]]], label: str, colour: str) -> None:
    """Mean over seeds and its 95 % interval, each curve interpolated to common places."""
    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = np.linspace(start, end, 60)
    values = np.array([np.interp(places, *np.array(curve).T[:2]) for curve in curves])
    mean = values.mean(axis=0)
    axes.plot(places, mean, color=colour, label=label)
    if len(curves) > 2:
        half = T_975[len(curves)] * values.std(axis=0, ddof=1) / math.sqrt(len(curves))
        axes.fill_between(places, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)


def _draw_rows(results: Sequence[Result], labels: Mapping[str, str], path: Path) -> None:
    rows = list(_by_method(results, labels))
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(14, 1.6 + 0.32 * len(rows)), layout="constrained", width_ratios=[2, 2, 1.4]
    )
    for axes, key, title in ((left, "success", "held-out success"), (middle, "effective_ratio", "effective ratio")):
        for place, (name, own) in enumerate(rows):
            colour = COLOURS.get(name, "#444444")
            mean, half = interval([found[key] for found in own])
            axes.errorbar(mean, -place, xerr=None if math.isnan(half) else half, fmt="o", color=colour, capsize=3)
            axes.plot([found[key] for found in own], [-place] * len(own), "|", color=colour, alpha=0.5)
        axes.set_yticks([-place for place in range(len(rows))], [labels[name] for name, _ in rows])
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_title(f"{title} (mean, 95 %)")
        axes.grid(alpha=0.3)
    middle.set_yticklabels([])
    _draw_factorial(right, dict(rows))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_factorial(axes: Axes, own: Mapping[str, Sequence[Result]]) -> None:
    """Success and effective ratio of the four combinations of the two stages."""
    axes.set_title("success / effective ratio")
    axes.set_xticks([0, 1], ["random prefixes", "TRACE prefixes"])
    axes.set_yticks([0, 1], ["TRACE\nroots", "even\nroots"])
    shown = np.full((2, 2), math.nan)
    for down, names in enumerate(FACTORIAL):
        for across, name in enumerate(names):
            if name in own:
                success, effective = (
                    statistics.mean(found[key] for found in own[name]) for key in ("success", "effective_ratio")
                )
                shown[1 - down, across] = success
                axes.text(across, 1 - down, f"{success:.1%}\n{effective:.0%}", ha="center", va="center")
    axes.imshow(shown, cmap="YlGn", alpha=0.5, origin="lower")


def _by_method(results: Sequence[Result], labels: Mapping[str, str]) -> list[tuple[str, list[Result]]]:
    found = [(name, [result for result in results if result["method"] == name]) for name in labels]
    return [(name, own) for name, own in found if own]


def _percent(own: Sequence[Result], key: str) -> str:
    mean, half = interval([found[key] for found in own])
    return f"{100 * mean:.1f} %" if math.isnan(half) else f"{100 * mean:.1f} ± {100 * half:.1f} %"


def _shown(values: Any) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.3f}" if known else "-"
