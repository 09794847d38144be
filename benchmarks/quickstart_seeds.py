"""The quickstart, several seeds: success on held-out maps before and after, and the learning curves.

    python -m benchmarks.quickstart_seeds [--seeds 5] [--folder runs/seeds] [--out docs/results/quickstart_seeds.json]
                                          [--plot docs/quickstart.png] [--json]

Runs `trace-async train configs/quickstart.toml` once per seed, one after the other, and keeps the raw numbers small
enough to commit. Runs that are finished in the folder are not repeated. The mean's interval is Student's over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from trace_async.metrics import read_rows
from trace_async.run_folder import RunFolder

CONFIG = "configs/quickstart.toml"
KEPT = (
    *("success_before", "success_after", "success_after_low", "success_after_high", "greedy_before", "greedy_after"),
    *("heldout_tasks", "wall_s", "sampled_tokens", "versions", "max_age_steps", "mean_age_steps"),
    *("groups_trained", "groups_flat", "groups_rejected"),
)
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantiles of Student's t for that many seeds."""


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One finished run's summary and curve."""
    where = RunFolder(folder / f"seed{seed}")
    if not (where.root / "summary.json").exists():
        command = [sys.executable, "-m", "trace_async", "train", CONFIG]
        command += ["--set", f"run.seed={seed}", "--set", f"run.dir={where.root}"]
        subprocess.run(command, check=True)
    summary = json.loads((where.root / "summary.json").read_text(encoding="utf-8"))
    rows = read_rows(where.metrics)
    curve = [[row["rollout/sampled_tokens_total"], row["rollout/success"]] for row in rows]
    return {"seed": seed, **{key: summary[key] for key in KEPT}, "curve": curve}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval."""
    half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean of each value and those before it, `width` at most."""
    return [statistics.mean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Every seed's training curve, and the held-out success before and after."""
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for found in runs:
        tokens = [point[0] for point in found["curve"]]
        axes.plot(tokens, smooth([point[1] for point in found["curve"]]), color="tab:blue", alpha=0.35, linewidth=1)
        ends = (0, tokens[-1])
        axes.plot(ends, (found["success_before"], found["success_after"]), "o", color="tab:blue", markersize=6)
        axes.plot(ends, (found["greedy_before"], found["greedy_after"]), "o", color="tab:red", markersize=6)
    axes.plot([], [], color="tab:blue", alpha=0.5, label="training prompts, sampled (mean of 5 steps)")
    axes.plot([], [], "o", color="tab:blue", label="held-out maps, sampled")
    axes.plot([], [], "o", color="tab:red", label="held-out maps, greedy")
    axes.set(xlabel="sampled tokens", ylabel="success", ylim=(0, 1), title=f"quickstart, {len(runs)} seeds")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/quickstart_seeds.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/quickstart.png"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    runs = [run(seed, args.folder) for seed in range(args.seeds)]
    gain, half = interval([found["success_after"] - found["success_before"] for found in runs])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"config": CONFIG, "runs": runs}) + "\n", encoding="utf-8")
    plot(runs, args.plot)
    for found in runs:
        print(  # noqa: T201
            f"seed {found['seed']}: sampled {found['success_before']:.1%} -> {found['success_after']:.1%}, "
            f"greedy {found['greedy_before']:.1%} -> {found['greedy_after']:.1%}, {found['wall_s']:.0f} s"
        )
    print(f"gain {gain:.1%} +- {half:.1%}")  # noqa: T201
    if args.json:
        least = min(found["success_after"] - found["success_before"] for found in runs)
        print(json.dumps({"gain": round(gain, 4), "half_width": round(half, 4), "least_gain": round(least, 4)}))  # noqa: T201


if __name__ == "__main__":
    main()
