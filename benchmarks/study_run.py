"""What a study of methods at equal sampled tokens is: its rows, one run of a row, and the command that makes them all.

Each run is `trace-async train` with the method's configuration and the study's settings; afterwards the policies of its
checkpoints play the same held-out tasks with the same draws. Resumable: a run that has its result in the folder is not
made again, one that was cut short is made anew.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of a study."""

    label: str
    config: str
    seeds: int = 3
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Rows that are compared, and what all of them share."""

    stem: str  # of the files in docs/results
    title: str  # of what is held out, in the figure
    methods: Mapping[str, Method]
    common: Mapping[str, object]  # settings of every run
    tokens: int  # sampled tokens of every run, shared prefixes once
    level: float  # success whose price in tokens is reported
    heldout: int  # tasks of the first and the last point of a curve
    between: int  # tasks of the points between
    also: tuple[str, ...] = ()  # further splits that the start and the end policy play


CALIBRATION = ("brier", "log_loss", "ece", "spearman", "constant_brier")
"""Of the predicted success of prompts, before their outcomes were seen; mean of the steps."""


def run(study: Study, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The result of one run, made now unless it is there. Raises CalledProcessError when a process fails."""
    method = study.methods[name]
    where = RunFolder(folder / f"{name}-{seed}")
    finished = where.root / "result.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    shutil.rmtree(where.root, ignore_errors=True)
    where.root.parent.mkdir(parents=True, exist_ok=True)
    own = {"run.seed": seed, "run.name": name, "run.dir": str(where.root)}
    _call(
        ["trace_async", "train", f"configs/{method.config}.toml", *overrides(study, name, **own)],
        log=folder / f"{name}-{seed}.log",
    )
    _call(
        ["benchmarks.checkpoint_curve", str(where.root), "--tasks", str(study.heldout), "--between", str(study.between)]
        + [f"--also={split}" for split in study.also],
        log=folder / f"{name}-{seed}.eval.log",
    )
    result = _result(study, name, seed, where)
    for part in (where.checkpoints, where.versions, where.policy):  # some 100 MB a run, and reproducible
        shutil.rmtree(part, ignore_errors=True)
    finished.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def overrides(study: Study, name: str, **more: object) -> list[str]:
    """`--set` options of a row: the study's settings, then the method's, then `more`."""
    settings = {**study.common, **study.methods[name].overrides, **more}
    return [f"--set={key}={toml(value)}" for key, value in settings.items()]


def toml(value: object) -> str:
    """A value as it stands behind the equals sign of an override."""
    return json.dumps(value) if isinstance(value, list) else str(value)


def _call(module: Sequence[str], *, log: Path) -> None:
    """One thread for each process, or two runs side by side take each other's cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as out:
        subprocess.run([sys.executable, "-m", *module], check=True, stdout=out, stderr=out, env=environment)


def _result(study: Study, name: str, seed: int, where: RunFolder) -> dict[str, Any]:
    rows = read_rows(where.metrics)
    summary = json.loads(where.summary.read_text(encoding="utf-8"))
    curve = json.loads((where.root / "curve.json").read_text(encoding="utf-8"))["points"]
    groups = [sum(_number(row, f"groups/{verdict}") for verdict in ("trained", "flat", "stale")) for row in rows]
    mixed = [_number(row, "rollout/effective_ratio") * count for row, count in zip(rows, groups, strict=True)]
    return {
        "method": name,
        "seed": seed,
        "success": curve[-1]["success"],
        **{split: curve[-1]["also"][split] for split in study.also},
        "curve": [[point["sampled_tokens"], round(point["success"], 4)] for point in curve],
        "effective_ratio": round(sum(mixed) / sum(groups), 4),
        "effective_curve": _binned(rows, mixed, groups, tokens=study.tokens),
        "sampled_tokens": int(_number(rows[-1], "rollout/sampled_tokens_total")),
        "tokens_to_level": tokens_to_level([(p["sampled_tokens"], p["success"]) for p in curve], study.level),
        "steps": len(rows),
        "age_mean": summary["mean_age_steps"],
        "age_max": summary["max_age_steps"],
        "wall_s": summary["wall_s"],
        "predictor": {key: _mean(rows, f"predictor/prompts/{key}") for key in CALIBRATION},
        "environment_steps": int(sum(_number(row, "rollout/turns") for row in rows)),
    }


def _binned(
    rows: Sequence[Mapping[str, Any]], mixed: Sequence[float], groups: Sequence[float], *, tokens: int
) -> list[list[float]]:
    """(sampled tokens at its end, effective ratio) of each twentieth of the run's tokens."""
    bins: dict[int, list[float]] = {}
    for row, share, count in zip(rows, mixed, groups, strict=True):
        place = min(int(20 * _number(row, "rollout/sampled_tokens_total") / tokens), 19)
        cell = bins.setdefault(place, [0.0, 0.0])
        cell[0], cell[1] = cell[0] + share, cell[1] + count
    return [[(place + 1) * tokens / 20, round(m / n, 4)] for place, (m, n) in sorted(bins.items()) if n]


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


def main_of(study: Study, description: str) -> None:
    """The study's command: makes the runs that are missing, then tables, figures and raw numbers."""
    args = _parse(study, description)
    # seeds outermost, so that an interrupted study has every method
    seeds = range(max(args.seeds or study.methods[name].seeds for name in args.methods))
    wanted = [
        (name, seed) for seed in seeds for name in args.methods if seed < (args.seeds or study.methods[name].seeds)
    ]
    results = []
    with Progress() as progress, ThreadPoolExecutor(args.jobs) as pool:
        bar = progress.add_task("study", total=len(wanted))
        for done in as_completed([pool.submit(run, study, name, seed, args.folder) for name, seed in wanted]):
            results.append(done.result())
            progress.advance(bar)
    results.sort(key=lambda result: (list(study.methods).index(result["method"]), result["seed"]))
    settings = {"tokens": study.tokens, "level": study.level, "heldout_tasks": study.heldout, **study.common}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(result) for result in results)
    args.out.write_text(f'{{"settings": {json.dumps(settings)},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    labels = {name: study.methods[name].label for name in args.methods}
    draw(results, labels, args.plots, stem=study.stem, title=study.title)
    print("\n".join(table(results, labels, also=study.also)))  # noqa: T201
    if args.json:
        print(json.dumps(_headline(results)))  # noqa: T201


def _parse(study: Study, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=study.methods, default=list(study.methods))
    parser.add_argument("--seeds", type=int, help="of every method, instead of each row's own number")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; each has two processes of one thread")
    parser.add_argument("--folder", type=Path, default=Path(f"runs/study_{study.stem}"))
    parser.add_argument("--out", type=Path, default=Path(f"docs/results/{study.stem}.json"))
    parser.add_argument("--plots", type=Path, default=Path("docs/results"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args()


def _headline(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and half-width of success and effective ratio of each method."""
    line: dict[str, Any] = {}
    for name in dict.fromkeys(result["method"] for result in results):
        own = [result for result in results if result["method"] == name]
        success, effective = (interval([result[key] for result in own]) for key in ("success", "effective_ratio"))
        line[name] = {"success": success, "effective_ratio": effective}
    return line
