"""The figure of `benchmarks.streaming_joint`, and how its numbers over seeds are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Of one number over seeds."""

    low: float
    middle: float  # median
    high: float

    @property
    def bars(self) -> list[list[float]]:
        """Lengths of the error bars, as matplotlib wants them."""
        return [[self.middle - self.low], [self.high - self.middle]]


def spread(values: Sequence[float]) -> Spread:
    """To three digits behind the point."""
    return Spread(round(min(values), 3), round(median(values), 3), round(max(values), 3))


def by_key(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The numbers of each seed under their names, to five digits."""
    return {key: [float(f"{run[key]:.5g}") for run in runs] for key in runs[0]}


def line(cell: Mapping[str, Any]) -> str:
    """A cell's medians."""
    where = cell.get("setting", {"live_trees": cell.get("live_trees")})
    figures = {key: round(median(values), 3) for key, values in cell.items() if isinstance(values, list)}
    return f"{' '.join(map(str, where.values())):22s} {cell['schedule']:18s} {figures}"


def draw(
    relative: Mapping[str, tuple[Spread, Spread]],
    idle: Mapping[str, Sequence[float]],
    pool: Sequence[Mapping[str, Any]],
    path: Path,
) -> None:
    """Left: worth against time, both relative to joint. Middle: idle slots. Right: trees of a pool."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name, (took, worth) in relative.items():
        left.errorbar(took.middle, worth.middle, xerr=took.bars, yerr=worth.bars, fmt="o", capsize=2, label=name)
    left.set(xlabel="seconds per tree, joint = 1", ylabel="expected flips per tree, joint = 1", title="worth and time")
    left.legend(fontsize=8, loc="lower right")
    shares = [spread(values) for values in idle.values()]
    bars = [[share.bars[side][0] for share in shares] for side in (0, 1)]
    middle.barh(list(idle), [share.middle for share in shares], xerr=bars, capsize=2, color="tab:gray")
    middle.set(xlabel="share of a tree's own slots", title="idle slots")
    middle.invert_yaxis()
    for name in dict.fromkeys(cell["schedule"] for cell in pool):
        cells = [cell for cell in pool if cell["schedule"] == name]
        speeds = [spread(cell["trees_per_minute"]) for cell in cells]
        right.errorbar(
            [cell["live_trees"] for cell in cells],
            [speed.middle for speed in speeds],
            yerr=[[speed.bars[side][0] for speed in speeds] for side in (0, 1)],
            marker="o",
            capsize=2,
            label=name,
        )
    right.set(xlabel="live trees", ylabel="trees per minute", title="shared slots")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
