"""Measures the credit rules by exact enumeration and writes what it finds: `python -m tools.credit_bias`, a minute.

docs/results/credit_bias.json gets the numbers, docs/credit.md the tables between its markers, docs/credit_bias.png the
picture. Nothing is sampled, so a second run writes the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tools.credit_cases import BRANCHINGS, ESTIMATORS, WORLDS
from tools.credit_world import Floats, World, measure

DOCS = Path(__file__).parent.parent / "docs"
PAGE, NUMBERS, PICTURE = DOCS / "credit.md", DOCS / "results" / "credit_bias.json", DOCS / "credit_bias.png"
BEGIN, END = "<!-- written by tools/credit_bias.py -->\n", "<!-- end -->\n"

TURNS = 10_000
"""Sampled turns over which estimates are averaged: some ten optimizer steps of a small run."""

EXACT = 1e-5
"""Below this a bias is rounding: credit is float32."""

DIGITS = 5
"""Decimals that are kept of a number."""

Numbers: TypeAlias = dict[str, Any]


def study(worlds: Sequence[World] = WORLDS, branchings: Sequence[str] = tuple(BRANCHINGS)) -> list[Numbers]:
    """One entry per world and way of branching: turns and trees, and by estimator the numbers of `summary`."""
    cases = []
    for world in worlds:
        for name in branchings:
            branching, roots = BRANCHINGS[name]
            found = measure(world, branching, ESTIMATORS, roots=roots)
            rules = {
                rule: summary(world.gradient(), mean, float(square), turns=found.turns)
                for rule, mean, square in zip(ESTIMATORS, found.mean, found.square, strict=True)
            }
            tree = {"turns": round(found.turns, DIGITS), "trees": found.trees}
            cases.append({"world": world.name, "branching": name, **tree, "rules": rules})
    return cases


def summary(gradient: Floats, mean: Floats, square: float, *, turns: float) -> dict[str, float]:
    """What the moments of an estimate G say about it, next to the true gradient g.

    bias         ||E G - g|| / ||g||
    tilt         what of that no factor mends: min over c of ||c E G - g|| / ||g||, the sine of the angle
    least, most  smallest and largest factor E G / g over the states
    noise        trace of the covariance of the scaled G x turns of a tree, over ||g||^2
    error        root mean square of ||c mean of G - g|| / ||g|| over TURNS sampled turns, for the best c
    """
    size, along = float(gradient @ gradient), float(mean @ gradient)
    variance = max(square - float(mean @ mean), 0.0)
    visited = np.abs(gradient) > 1e-12
    factors = mean[visited] / gradient[visited]
    numbers = {
        "bias": math.sqrt(float((mean - gradient) @ (mean - gradient)) / size),
        "tilt": math.sqrt(max(1.0 - along**2 / size / float(mean @ mean), 0.0)),
        "least": float(factors.min()),
        "most": float(factors.max()),
        "noise": variance * turns * size / along**2,
        "error": math.sqrt(max(1.0 - along**2 / size / (float(mean @ mean) + variance * turns / TURNS), 0.0)),
    }
    return {name: round(0.0 if abs(value) < EXACT else value, DIGITS) for name, value in numbers.items()}


def render(cases: Sequence[Numbers]) -> str:
    """The tables of docs/credit.md."""
    parts = []
    for world in dict.fromkeys(case["world"] for case in cases):
        own = [case for case in cases if case["world"] == world]
        parts.append(
            f"\n**World `{world}`, bias (and what is left of it after the best scale)**\n\n{_table(own, _bias)}"
        )
        parts.append(f"\n**World `{world}`, error of the mean over {TURNS:,} sampled turns**\n\n{_table(own, _error)}")
    return "".join(parts) + "\n"


def _table(cases: Sequence[Numbers], cell: Callable[[Mapping[str, float]], str]) -> str:
    head = ["rule", *(case["branching"] for case in cases)]
    rows = [[_name(rule), *(cell(case["rules"][rule]) for case in cases)] for rule in cases[0]["rules"]]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"


def _name(rule: str) -> str:
    return f"*{rule}*" if " " in rule else f"`{rule}`"


def _bias(numbers: Mapping[str, float]) -> str:
    if numbers["bias"] == 0:
        return "0"
    wrong_way = "!" if numbers["least"] < 0 else ""
    return f"{numbers['bias']:.2f} ({numbers['tilt']:.2f}){wrong_way}"


def _error(numbers: Mapping[str, float]) -> str:
    return f"{numbers['error']:.3f}"


def write_page(tables: str) -> None:
    """Put the tables between the markers of docs/credit.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + tables + END + after, encoding="utf-8")


def draw(cases: Sequence[Numbers]) -> None:
    """A heat map per world: tilt of every rule under every way of branching."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    worlds = list(dict.fromkeys(case["world"] for case in cases))
    figure, axes = plt.subplots(1, len(worlds), figsize=(13.5, 4.8), sharey=True, layout="constrained")
    for axis, world in zip(axes, worlds, strict=True):
        own = [case for case in cases if case["world"] == world]
        tilt = np.array([[case["rules"][rule]["tilt"] for case in own] for rule in ESTIMATORS])
        image = axis.imshow(tilt, cmap="Blues", vmin=0.0, vmax=0.5, aspect="auto")
        axis.set_title(f"world {world}")
        axis.set_xticks(range(len(own)), [case["branching"] for case in own], rotation=40, ha="right")
        axis.set_yticks(range(len(ESTIMATORS)), list(ESTIMATORS))
        for (row, column), value in np.ndenumerate(tilt):
            wrong_way = own[column]["rules"][list(ESTIMATORS)[row]]["least"] < 0
            label = f"{value:.2f}{'!' if wrong_way else ''}" if value else "0"
            axis.text(column, row, label, ha="center", va="center", fontsize=8, color="w" if value > 0.3 else "k")
    figure.colorbar(image, ax=axes, label="bias left after the best scale", shrink=0.8)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def main() -> None:
    """Measure and write everything."""
    cases = study()
    worlds = {
        world.name: {
            "logits": world.logits,
            "outcomes": world.outcomes,
            "misjudged": world.misjudged,
            "success": round(float(world.values()[0]), DIGITS),
            "gradient": [round(float(g), DIGITS) for g in world.gradient()],
        }
        for world in WORLDS
    }
    content = {"command": "python -m tools.credit_bias", "turns": TURNS, "worlds": worlds, "cases": cases}
    NUMBERS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_page(render(cases))
    draw(cases)


if __name__ == "__main__":
    main()
