"""How long it takes to divide a round's roots among a pool, and a tree's continuations among its prefixes.

    python -m benchmarks.allocation [--repeats 9] [--json]

Milliseconds of CPU time of this process, medians over the repeats; each repeat has a pool of its own, v ~ Beta(.5, .5)
and at most 8 roots a prompt.

    exact, heap   both solvers on the same pools, and the most that the heap lost, in mixed groups
    roots         each root allocator as the planner calls it: 1,024 prompts, beliefs of 9 rollouts each, 2,048 roots
    prefixes      16 continuations over 64 anchors, what eight root rollouts of nine turns ask for at once

Target: 1,024 prompts and 2,048 roots in well under 100 ms. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from trace_async.methods import allocation
from trace_async.methods.allocation import Counts, Floats, allocate_prefixes, allocate_prefixes_beta, root_values
from trace_async.methods.root_allocators import ROOT_ALLOCATORS, make_root_allocator

MAX_ROOTS = 8
POOLS = ((128, 64), (256, 512), (1024, 2048), (4096, 8192))
"""(prompts, roots): the default configuration, then up to well above the paper's 1,024 roots."""
LARGE = (1024, 2048)
ANCHORS, CONTINUATIONS = 64, 16


class Belief(NamedTuple):
    """Beta(alpha, beta)."""

    alpha: float
    beta: float


def timed(work: Callable[[], Counts]) -> tuple[float, Counts]:
    """CPU milliseconds of one call, and its answer."""
    started_s = time.process_time()
    counts = work()
    return 1e3 * (time.process_time() - started_s), counts


def measure_solvers(num_prompts: int, budget: int, *, repeats: int) -> dict[str, float]:
    """Both solvers on the same pools."""
    least = np.zeros(num_prompts, np.int64)
    exact_ms, heap_ms, losses = [], [], []
    for seed in range(repeats):
        table = root_values(np.random.default_rng(seed).beta(0.5, 0.5, num_prompts), MAX_ROOTS)
        exact_spent, exact = timed(partial(allocation._exact, table, least, budget))
        heap_spent, heap = timed(partial(allocation._opening_heap, table, least, budget))
        exact_ms.append(exact_spent)
        heap_ms.append(heap_spent)
        losses.append(_worth(table, exact) - _worth(table, heap))
    return {
        "exact_ms": round(statistics.median(exact_ms), 3),
        "heap_ms": round(statistics.median(heap_ms), 3),
        "heap_lost_groups_max": round(max(losses), 6),
    }


def measure_roots(*, repeats: int) -> dict[str, float]:
    """Every root allocator, from beliefs to counts."""
    num_prompts, budget = LARGE
    spent_ms: dict[str, list[float]] = {name: [] for name in sorted(ROOT_ALLOCATORS)}
    for seed in range(repeats):
        v = np.random.default_rng(seed).beta(0.5, 0.5, num_prompts)
        beliefs = [Belief(0.5 + 8.0 * success, 8.5 - 8.0 * success) for success in v.tolist()]
        for name, times in spent_ms.items():
            allocator, rng = make_root_allocator(name, {}), np.random.default_rng(seed)
            spent, _ = timed(partial(allocator.allocate, beliefs, budget=budget, max_roots=MAX_ROOTS, rng=rng))
            times.append(spent)
    return {f"{name}_ms": round(statistics.median(times), 3) for name, times in spent_ms.items()}


def measure_prefixes(*, repeats: int) -> dict[str, float]:
    """Both forms; a hundred calls a repeat, since one is shorter than the clock can tell."""
    point_ms, beta_ms = [], []
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        q = rng.uniform(0.02, 0.98, ANCHORS)
        calls = range(100)
        started_s = time.process_time()
        for _ in calls:
            allocate_prefixes(q, budget=CONTINUATIONS, rng=rng)
        point_s = time.process_time()
        for _ in calls:
            allocate_prefixes_beta(8 * q, 8 * (1 - q), budget=CONTINUATIONS, rng=rng)
        point_ms.append(1e3 * (point_s - started_s) / len(calls))
        beta_ms.append(1e3 * (time.process_time() - point_s) / len(calls))
    return {"point_ms": round(statistics.median(point_ms), 4), "beta_ms": round(statistics.median(beta_ms), 4)}


def _worth(table: Floats, counts: Counts) -> float:
    return float(table[np.arange(len(table)), counts].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="at least 3")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    repeats = max(3, args.repeats)
    solvers = {}
    for num_prompts, budget in POOLS:
        row = solvers[f"{num_prompts}x{budget}"] = measure_solvers(num_prompts, budget, repeats=repeats)
        cells = num_prompts * (budget + 1) * (MAX_ROOTS + 1)
        chosen = "exact" if cells <= allocation.EXACT_CELLS else "heap"
        print(  # noqa: T201
            f"{num_prompts:5} prompts, {budget:5} roots: exact {row['exact_ms']:8.2f} ms   heap {row['heap_ms']:6.2f} "
            f"ms, which loses at most {row['heap_lost_groups_max']:.1e} mixed groups   used: {chosen}"
        )
    roots = measure_roots(repeats=repeats)
    told = "   ".join(f"{name.removesuffix('_ms')} {spent:.2f}" for name, spent in roots.items())
    print(f"root allocators, {LARGE[0]} prompts, {LARGE[1]} roots, ms: {told}   (target: well under 100)")  # noqa: T201
    prefixes = measure_prefixes(repeats=repeats)
    print(  # noqa: T201
        f"{CONTINUATIONS} continuations over {ANCHORS} prefixes: point {prefixes['point_ms']:.3f} ms   "
        f"beta {prefixes['beta_ms']:.3f} ms"
    )
    if args.json:
        print(json.dumps({"solvers": solvers, "roots": roots, "prefixes": prefixes}))  # noqa: T201


if __name__ == "__main__":
    main()
