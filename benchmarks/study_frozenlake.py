"""TRACE and its peers on FrozenLake at equal sampled tokens: effective ratio, held-out success, calibration, ages.

    python -m benchmarks.study_frozenlake [--methods grpo trace ...] [--seeds N] [--jobs 2] [--folder runs/study]
                                          [--out docs/results/frozenlake.json] [--plots docs/results] [--json]

Each run is `trace-async train` with the method's configuration and the settings of `COMMON`; afterwards the policies of
its checkpoints play the same held-out maps. Resumable: a run that has its result in the folder is not made again, one
that was cut short is made anew. Two thirds of the maps are so large that the start policy hardly ever reaches the
goal; independent chains spend their budget mostly there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.study_report import draw, interval, table
from trace_async.metrics import read_rows
from trace_async.run_folder import RunFolder

TOKENS = 24_000
"""Sampled tokens of every run, shared prefixes once."""

COMMON: dict[str, object] = {
    "environment.options.sizes": [3, 4, 5, 7, 7, 7, 7, 7, 7],
    "environment.options.min_moves_per_size": 1.0,
    "prompts.num_train": 1024,
    "prompts.num_heldout": 1024,
    "prompts.candidates_per_round": 256,
    "learner.max_sampled_tokens": TOKENS,
    "learner.max_steps": 1000,
    "learner.checkpoint_every_steps": 20,
    "learner.keep_checkpoints": 1000,
    "evaluation.num_prompts": 0,  # checkpoints are evaluated afterwards, on the same maps for every run
}

HELDOUT_MAPS = 1024

LEVEL = 0.08
"""The success level whose price in tokens is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of the study."""

    label: str
    config: str
    seeds: int = 3
    overrides: Mapping[str, object] = field(default_factory=dict)


CHAINS, TREES = 56, 24
"""Root rollouts of a step, of chains and of trees with two continuations each: about the same tokens, so that at equal
tokens every method makes about the same number of steps."""


def _chains(label: str, config: str, *, seeds: int = 3) -> Method:
    return Method(label=label, config=config, seeds=seeds, overrides={"tree.roots_per_step": CHAINS})


def _trees(label: str, config: str, *, seeds: int = 3, **overrides: object) -> Method:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return Method(label=label, config=config, seeds=seeds, overrides={"tree.roots_per_step": TREES, **named})


def _trace(label: str, *, seeds: int = 3, **overrides: object) -> Method:
    return _trees(label, "trace", seeds=seeds, **overrides)


METHODS: dict[str, Method] = {
    "grpo": _chains("GRPO", "grpo", seeds=5),
    "mopps": _chains("MoPPS", "mopps", seeds=5),
    "tree_grpo": _trees("Tree-GRPO", "tree_grpo", seeds=5),
    "treepo": _trees("TreePO", "treepo", seeds=5),
    "trace": _trace("TRACE", seeds=5),
    "trace_root": _trace("TRACE roots only", tree__allocator="random"),
    "trace_prefix": _trace("TRACE prefixes only", tree__root_allocator="even"),
    "random_tree": _trees(
        "random tree",
        "quickstart",
        tree__allocator="random",
        tree__root_allocator="even",
    ),
    "trace_beta": _trees("TRACE, beta", "quickstart"),
    "trace_joint": _trace("TRACE, joint", tree__options__mode="joint"),
    "trace_sibling": _trace("TRACE, plain sibling credit", learner__credit="sibling"),
    "trace_12_6": _trace("TRACE, M=12 N=6", tree__roots_per_step=12, tree__continuations_per_root=6),
    "trace_48_2": _trace("TRACE, M=48 N=2", tree__roots_per_step=48),
}


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The result of one run, made now unless it is there. Raises CalledProcessError when a process fails."""
    method = METHODS[name]
    where = RunFolder(folder / f"{name}-{seed}")
    finished = where.root / "result.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    shutil.rmtree(where.root, ignore_errors=True)
    where.root.parent.mkdir(parents=True, exist_ok=True)
    settings = {**COMMON, **method.overrides, "run.seed": seed, "run.name": name, "run.dir": str(where.root)}
    _call(
        ["trace_async", "train", f"configs/{method.config}.toml"]
        + [f"--set={key}={_toml(value)}" for key, value in settings.items()],
        log=folder / f"{name}-{seed}.log",
    )
    _call(
        ["benchmarks.checkpoint_curve", str(where.root), "--maps", str(HELDOUT_MAPS)],
        log=folder / f"{name}-{seed}.eval.log",
    )
    result = _result(name, seed, where)
    for part in (where.checkpoints, where.versions, where.policy):  # some 100 MB a run, and reproducible
        shutil.rmtree(part, ignore_errors=True)
    finished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def _call(module: Sequence[str], *, log: Path) -> None:
    """One thread for each process, or two runs side by side take each other's cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        subprocess.run([sys.executable, "-m", *module], check=True, stdout=out, stderr=out, env=environment)


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def _result(name: str, seed: int, where: RunFolder) -> dict[str, Any]:
    rows = read_rows(where.metrics)
    summary = json.loads(where.summary.read_text(encoding="utf-8"))
    curve = json.loads((where.root / "curve.json").read_text(encoding="utf-8"))["points"]
    groups = [sum(_number(row, f"groups/{verdict}") for verdict in ("trained", "flat", "stale")) for row in rows]
    mixed = [_number(row, "rollout/effective_ratio") * count for row, count in zip(rows, groups, strict=True)]
    return {
        "method": name,
        "seed": seed,
        "success": curve[-1]["success"],
        "curve": [[point["sampled_tokens"], round(point["success"], 4)] for point in curve],
        "effective_ratio": round(sum(mixed) / sum(groups), 4),
        "effective_curve": _binned(rows, mixed, groups),
        "sampled_tokens": int(_number(rows[-1], "rollout/sampled_tokens_total")),
        "tokens_to_level": tokens_to_level([(p["sampled_tokens"], p["success"]) for p in curve], LEVEL),
        "steps": len(rows),
        "age_mean": summary["mean_age_steps"],
        "age_max": summary["max_age_steps"],
        "wall_s": summary["wall_s"],
        "predictor": {key: _mean(rows, f"predictor/prompts/{key}") for key in CALIBRATION},
        "environment_steps": int(sum(_number(row, "rollout/turns") for row in rows)),
    }


CALIBRATION = ("brier", "log_loss", "ece", "spearman", "constant_brier")
"""Of the predicted success of prompts, before their outcomes were seen; mean of the steps."""


def _binned(rows: Sequence[Mapping[str, Any]], mixed: Sequence[float], groups: Sequence[float]) -> list[list[float]]:
    """(sampled tokens at its end, effective ratio) of each twentieth of the run's tokens."""
    bins: dict[int, list[float]] = {}
    for row, share, count in zip(rows, mixed, groups, strict=True):
        place = min(int(20 * _number(row, "rollout/sampled_tokens_total") / TOKENS), 19)
        cell = bins.setdefault(place, [0.0, 0.0])
        cell[0], cell[1] = cell[0] + share, cell[1] + count
    return [[(place + 1) * TOKENS / 20, round(m / n, 4)] for place, (m, n) in sorted(bins.items()) if n]


def tokens_to_level(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """Sampled tokens at which a curve first reaches `level`, linear between its points; None when it never does."""
    before = curve[0]
    if before[1] >= level:
        return before[0]
    for after in curve[1:]:
        if after[1] >= level:
            return round(before[0] + (after[0] - before[0]) * (level - before[1]) / (after[1] - before[1]))
        before = after
    return None


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    return math.nan if value is None else float(value)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [value for row in rows if not math.isnan(value := _number(row, key))]
    return round(sum(known) / len(known), 4) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, help="of every method, instead of 5 for the main rows and 3 for the rest")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; each has two processes of one thread")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/frozenlake.json"))
    parser.add_argument("--plots", type=Path, default=Path("docs/results"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    # seeds outermost, so that an interrupted study has every method
    seeds = range(max(args.seeds or METHODS[name].seeds for name in args.methods))
    wanted = [(name, seed) for seed in seeds for name in args.methods if seed < (args.seeds or METHODS[name].seeds)]
    results = []
    with Progress() as progress, ThreadPoolExecutor(args.jobs) as pool:
        bar = progress.add_task("study", total=len(wanted))
        for done in as_completed([pool.submit(run, name, seed, args.folder) for name, seed in wanted]):
            results.append(done.result())
            progress.advance(bar)
    results.sort(key=lambda result: (list(METHODS).index(result["method"]), result["seed"]))
    settings = {"tokens": TOKENS, "level": LEVEL, "heldout_maps": HELDOUT_MAPS, **COMMON}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(result) for result in results)
    args.out.write_text(f'{{"settings": {json.dumps(settings)},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    labels = {name: METHODS[name].label for name in args.methods}
    draw(results, labels, args.plots)
    print("\n".join(table(results, labels)))  # noqa: T201
    if args.json:
        print(json.dumps(_headline(results)))  # noqa: T201


def _headline(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and half-width of success and effective ratio of each method."""
    line: dict[str, Any] = {}
    for name in dict.fromkeys(result["method"] for result in results):
        own = [result for result in results if result["method"] == name]
        success, effective = (interval([result[key] for result in own]) for key in ("success", "effective_ratio"))
        line[name] = {"success": success, "effective_ratio": effective}
    return line


if __name__ == "__main__":
    main()
