"""Table, figure and raw numbers of the staleness study, from its results alone."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.study_report import interval

Result = Mapping[str, Any]

COLOURS = {
    **{"none": "#7f7f7f", "tis": "#1f77b4", "unbraked": "#d62728", "decoupled": "#9467bd"},
    **{"m2po": "#ff7f0e", "lpo": "#2ca02c", "default": "#000000", "ppo": "#17becf"},
    **{"no_veto": "#8c564b", "no_soft": "#e377c2", "no_mask": "#bcbd22"},
}
ABLATIONS = ("no_veto", "no_soft", "no_mask")
"""Not drawn."""

SEEDS = 5
"""Means of fewer say of how many."""

TABLES = {
    "sampled success": "success",
    "change against age 0": "change",
    "greedy success": "greedy",
    "sampled success half-way": "half_way",
}
"""Titles, and what `_cell` shows."""

FORM_AT_AGE_0 = {"lpo": "lpo"}
"""Whose runs stand for a method at age 0: its own, or those of `none`, with which it coincides there."""


class Results:
    """Runs by method, age and seed."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._runs = {(found["method"], found["age"], found["seed"]): found for found in results}
        self.ages = sorted({age for _, age, _ in self._runs})
        self.methods = [name for name in COLOURS if any(method == name for method, _, _ in self._runs)]

    def runs(self, method: str, age: int) -> dict[int, Result]:
        """By seed."""
        name = FORM_AT_AGE_0.get(method, "none") if age == 0 else method
        return {seed: run for (one, years, seed), run in sorted(self._runs.items()) if (one, years) == (name, age)}

    def values(self, method: str, age: int, key: str) -> list[float]:
        """One number of each seed; unknown ones left out."""
        return [run[key] for run in self.runs(method, age).values() if run[key] is not None]

    def change(self, method: str, age: int, key: str = "success") -> list[float]:
        """Against age 0, seed by seed."""
        before, after = self.runs(method, 0), self.runs(method, age)
        return [after[seed][key] - before[seed][key] for seed in after if seed in before]


def headline(results: Sequence[Result]) -> dict[str, Any]:
    """By method and age: success and its change against age 0, each as mean and half-width of the 95 % interval."""
    found = Results(results)
    return {
        method: {
            str(age): {
                "success": _pair(found.values(method, age, "success")),
                "greedy": _pair(found.values(method, age, "greedy")),
                "change": _pair(found.change(method, age)),
                "seeds": len(found.runs(method, age)),
            }
            for age in found.ages
            if found.runs(method, age)
        }
        for method in found.methods
    }


def table(results: Sequence[Result], labels: Mapping[str, str]) -> list[str]:
    """Markdown: success by method and age, the change against age 0, and what the steps looked like."""
    found = Results(results)
    ages = " | ".join(f"age {age}" for age in found.ages)
    rule = "---|" * (len(found.ages) + 1)
    lines: list[str] = []
    for title, key in TABLES.items():
        lines += [f"| {title} | {ages} |", f"|{rule}"]
        lines += [
            f"| {labels[method]} | " + " | ".join(_cell(found, method, age, key) for age in found.ages) + " |"
            for method in found.methods
        ]
        lines.append("")
    lines += [
        "| method | age | seeds | ESS | KL (k3) | vetoed turns | touched tokens | max log R | skipped | sampled |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for age in found.ages:
        own = [method for method in found.methods if age > 0 or method in ("none", "lpo")]
        lines += [_steps_line(found, method, age, labels) for method in own if found.runs(method, age)]
    return lines


def write_report(results: Sequence[Result], labels: Mapping[str, str], folder: Path) -> None:
    """staleness.json: one line a run; staleness.png: the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [{key: value for key, value in run.items() if key not in ("sizes", "cpu_s")} for run in results]
    settings = json.dumps({**(results[0]["sizes"] if results else {}), "labels": dict(labels)})
    lines = ",\n".join(json.dumps(run) for run in runs)
    text = f'{{"settings": {settings},\n"runs": [\n{lines}\n]}}\n'
    (folder / "staleness.json").write_text(text, encoding="utf-8")
    draw(results, labels, folder / "staleness.png")


def draw(results: Sequence[Result], labels: Mapping[str, str], path: Path) -> None:
    """Success, greedy success, effective sample size, KL, vetoed turns and touched tokens against age."""
    found = Results(results)
    figure, grid = pyplot.subplots(2, 3, figsize=(14, 8), layout="constrained")
    panels = (
        ("success", "held-out success, sampled"),
        ("greedy", "held-out success, greedy"),
        ("ess_ratio", "effective sample size, share of turns"),
        ("kl_k3", "KL(sampler || trained), nats a token"),
        ("vetoed_share", "vetoed turns"),
        ("capped_share", "capped, clipped or masked tokens"),
    )
    for axes, (key, title) in zip(grid.flat, panels, strict=True):
        for place, method in enumerate(name for name in found.methods if name not in ABLATIONS):
            _line(axes, found, method, key, label=labels[method], shift=0.05 * (place - 3.5))
        axes.set_title(title)
        axes.set_xticks(range(len(found.ages)), [str(age) for age in found.ages])
        axes.set_xlabel("age of what is trained, versions")
        axes.grid(alpha=0.3)
        if key == "kl_k3":
            axes.set_yscale("symlog", linthresh=1e-3)
        else:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_ylim(bottom=0)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8)  # hides no run
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axes: Axes, found: Results, method: str, key: str, *, label: str, shift: float) -> None:
    """Mean over seeds with its 95 % interval, and each seed as a dot."""
    places = [place for place, age in enumerate(found.ages) if found.values(method, age, key)]
    values = [found.values(method, found.ages[place], key) for place in places]
    where = [place + shift for place in places]
    halves = [0.0 if math.isnan(half := interval(own)[1]) else half for own in values]
    means = [statistics.mean(own) for own in values]
    axes.errorbar(where, means, yerr=halves, fmt="o-", color=COLOURS[method], label=label, capsize=2, markersize=4)
    for at, own in zip(where, values, strict=True):
        axes.plot([at] * len(own), own, ".", color=COLOURS[method], alpha=0.35, markersize=4)


def _cell(found: Results, method: str, age: int, key: str) -> str:
    if key == "change":
        return _percent(found.change(method, age), signed=True) if age else ""
    if key == "half_way":
        return _percent([run["points"][0][1] for run in found.runs(method, age).values()])
    return _percent(found.values(method, age, key))


def _steps_line(found: Results, method: str, age: int, labels: Mapping[str, str]) -> str:
    def mean(key: str, form: str) -> str:
        known = found.values(method, age, key)
        return format(statistics.mean(known), form) if known else "-"

    skipped = sum(run["skipped_steps"] for run in found.runs(method, age).values())
    return (
        f"| {labels[method]} | {age} | {len(found.runs(method, age))} | {mean('ess_ratio', '.3f')} "
        f"| {mean('kl_k3', '.2g')} | {mean('vetoed_share', '.1%')} | {mean('capped_share', '.1%')} "
        f"| {mean('max_abs_log_ratio', '.1f')} | {skipped} | {mean('sampled_tokens', ',.0f')} |"
    )


def _pair(values: Sequence[float]) -> list[float | None]:
    mean, half = interval(values) if values else (math.nan, math.nan)
    return [None if math.isnan(number) else number for number in (mean, half)]


def _percent(values: Sequence[float], *, signed: bool = False) -> str:
    if not values:
        return "-"
    mean, half = interval(values)
    shown = f"{100 * mean:+.1f}" if signed else f"{100 * mean:.1f}"
    few = f" ({len(values)})" if len(values) < SEEDS else ""
    return f"{shown}{few}" if math.isnan(half) else f"{shown} ± {100 * half:.1f}{few}"
