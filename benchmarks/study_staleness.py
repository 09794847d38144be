"""What old data costs: the quickstart task at fixed ages, with and without corrections.

    python -m benchmarks.study_staleness [--ages 0 8 ...] [--methods none default ...] [--seeds 5] [--jobs 1]
                                         [--lines runs/staleness.jsonl] [--out docs/results] [--quick] [--json]

Every turn is trained exactly `age` versions after the one that sampled it (`staleness_run.py`). Runs are cut to the
size of one CPU core: fewer roots a step than the quickstart, more steps. Each finished run is a line of `--lines`, and
what stands there is not run again, so an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.staleness_report import headline, table, write_report
from benchmarks.staleness_run import MAIN, METHODS, Cell, Run, Sizes
from trace_async.app import wiring
from trace_async.core.types import Group

AGES = (0, 8, 32, 2, 4, 16, 1)
"""In the order in which they are run: what is complete first says most."""

ON_POLICY = ("none", "lpo")
"""Run at age 0. There every ratio is 1, no cap, clip or mask acts, and all but LPO make the steps of `none`."""

QUICK = Sizes(steps=4, roots=2, sampled_tasks=8, greedy_tasks=8, between_tasks=4, between=(2,))


def cells(ages: Sequence[int], methods: Sequence[str], seeds: int) -> list[Cell]:
    """Ages outermost, so that an interrupted study has whole columns; then seeds, then methods."""
    return [
        Cell(method=method, age=age, seed=seed)
        for age in ages
        for seed in range(seeds)
        for method in methods
        if age > 0 or method in ON_POLICY
    ]


_start_rounds: dict[tuple[int, int], list[Group]] = {}
"""Of this process: what the start policy sampled."""


def run(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """One run's result, with its sizes."""
    wiring.hide_progress_bars()
    return {**Run(cell, sizes, start_rounds=_start_rounds).play(), "sizes": asdict(sizes)}


def read_lines(path: Path, sizes: Sizes) -> dict[Cell, dict[str, Any]]:
    """Finished runs of these sizes; a line torn by an interruption counts as none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result["sizes"] == json.loads(json.dumps(asdict(sizes))):
            found[Cell(method=result["method"], age=result["age"], seed=result["seed"])] = result
    return found


def finished(todo: Sequence[Cell], sizes: Sizes, jobs: int) -> Iterator[dict[str, Any]]:
    """Results as they come; in this process unless several jobs are wanted."""
    if jobs == 1:
        yield from (run(cell, sizes) for cell in todo)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(run, cell, sizes) for cell in todo]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ages", type=int, nargs="+", default=AGES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=MAIN)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=Sizes().learning_rate)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--lines", type=Path, default=Path("runs/staleness.jsonl"))
    parser.add_argument("--out", type=Path, help="docs/results; with --quick, beside the lines")
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny rounds: does it run at all?")
    parser.add_argument("--report-only", action="store_true", help="draw what is finished, run nothing")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes(learning_rate=args.learning_rate)
    out = args.out or (args.lines.parent / "staleness_quick" if args.quick else Path("docs/results"))
    labels = {name: method.label for name, method in METHODS.items()}
    wanted = cells(args.ages, args.methods, args.seeds)
    known = read_lines(args.lines, sizes)
    todo = [] if args.report_only else [cell for cell in wanted if cell not in known]
    args.lines.parent.mkdir(parents=True, exist_ok=True)
    with Progress() as progress, args.lines.open("a", encoding="utf-8") as lines:
        bar = progress.add_task("staleness", total=len(wanted), completed=len(wanted) - len(todo))
        for result in finished(todo, sizes, args.jobs):
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            known[Cell(method=result["method"], age=result["age"], seed=result["seed"])] = result
            progress.advance(bar)
    results = [known[cell] for cell in wanted if cell in known]
    write_report(results, labels, out)
    print("\n".join(table(results, labels)))  # noqa: T201
    if args.json:
        print(json.dumps(headline(results)))  # noqa: T201


if __name__ == "__main__":
    main()
