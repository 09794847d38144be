"""Granting continuations at each end or after the last: what each gains, and how long it waits.

    python -m benchmarks.streaming_joint [--seeds 6] [--trees 20] [--out docs/results/streaming_joint] [--json]

Real trees (`acting.expansion.grow_tree`) grow in virtual time in a world whose states have known values
(`benchmarks.value_world`), so the schedules meet the same prompts and the same root rollouts.

    streaming    `trace` with hold_below = 0; `hold .5`, the default, with hold_below = 0.5, and so on
    joint        the paper's: after the last root rollout of the prompt
    depth joint  joint, and a tree's turns of one depth wait for the slowest of them: what scheduling by depth costs
    random       Tree-GRPO's places, the control

A tree is grown alone with as many engine slots as it has root rollouts; in `pool`, live trees share 32 slots and the
next begins when one is complete. Figures are means over the trees of a seed, then medians over seeds with the lowest
and the highest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.streaming_joint_figure import Spread, by_key, draw, line, spread
from benchmarks.value_world import (
    LATENCIES,
    MAX_TURNS,
    DepthEngine,
    SlottedEngine,
    ValueEnvironment,
    ValueRenderer,
    ValueScorer,
    value_after,
)
from tests import virtual_time
from trace_async.acting.expansion import GrowthParts, grow_tree
from trace_async.acting.story import Tally, TreeStory
from trace_async.acting.turns import TurnPlayer
from trace_async.core.tree import TurnTree
from trace_async.core.types import GrownBy, Lease, NodeState, Score, Task, TreeBudget
from trace_async.methods.allocators import Allocator, make_allocator
from trace_async.methods.growth_rules import bare_rollout
from trace_async.methods.trace_allocator import TraceOptions, known_anchors

NEVER_S = 1e9
POOL_SLOTS = 32
POOL_TREES = (4, 8, 16)
"""Live trees: half, all and twice the slots in root rollouts of the main setting."""
HOLDS = (0.2, 0.35, 0.5, 0.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who grants, and how turns are scheduled."""

    name: str
    allocator: str = "trace"
    options: Mapping[str, Any] = field(default_factory=dict)
    by_depth: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the trees of a cell have in common."""

    roots: int = 4
    per_root: int = 2
    noise: float = 1.0  # standard deviation of the predictor's error on the logit
    latency: str = "lognormal"


STREAMING = Schedule(name="streaming", options={"hold_below": 0.0})
JOINT = Schedule(name="joint", options={"mode": "joint"})
DEPTH_JOINT = Schedule(name="depth joint", options={"mode": "joint"}, by_depth=True)
RANDOM = Schedule(name="random", allocator="random")
HOLD = {hold: Schedule(name=f"hold {hold:g}", options={"hold_below": hold}) for hold in HOLDS}
FORMS = [
    *(Schedule(name=f"joint beta {s}", options={"mode": "joint", "form": "beta", "strength": s}) for s in (2, 8, 32)),
    Schedule(name="joint cost-aware", options={"mode": "joint", "cost_aware": True}),
]
FEW = [STREAMING, HOLD[0.5], JOINT, DEPTH_JOINT, RANDOM]
MAIN = Setting()
CELLS: list[tuple[Setting, list[Schedule]]] = [
    (MAIN, [STREAMING, *HOLD.values(), JOINT, DEPTH_JOINT, RANDOM, *FORMS]),
    (Setting(roots=8), FEW),
    (Setting(per_root=6), FEW),
    (Setting(noise=0.0), FEW),
    (Setting(noise=2.0), FEW),
    (Setting(latency="pareto"), FEW),
]
POOL = [STREAMING, HOLD[0.5], JOINT, DEPTH_JOINT]


def make_lease(setting: Setting, seed: int, number: int) -> Lease:
    """A prompt of middling difficulty, as root allocation prefers them."""
    value = min(max(Random(f"{seed}/{number}").betavariate(2.0, 2.0), 0.05), 0.95)
    task = Task(f"prompt-{number}", {"value": value})
    return Lease(
        lease_id=f"lease-{number}",
        prompt_id=task.task_id,
        task=task,
        budget=TreeBudget(roots=setting.roots, continuations=setting.roots * setting.per_root),
        seed=seed,
        round_index=0,
        attempt=0,
        issued_version=0,
        deadline_s=NEVER_S,
        root_score=Score(success=value, predictor_version=0),
    )


def make_engine(schedule: Schedule, setting: Setting, slots: int) -> SlottedEngine:
    return (DepthEngine if schedule.by_depth else SlottedEngine)(slots, LATENCIES[setting.latency])


def make_parts(schedule: Schedule, setting: Setting, engine: SlottedEngine) -> GrowthParts:
    def allocator(lease: Lease) -> Allocator:
        ties = np.random.default_rng([lease.seed, int(lease.prompt_id.rpartition("-")[2])])
        return make_allocator(schedule.allocator, schedule.options, ties)

    return GrowthParts(
        player=TurnPlayer(
            engine,
            ValueRenderer(),
            max_turn_tokens=4096,
            max_context_tokens=1_000_000,
            max_turns=MAX_TURNS,
            request_deadline_s=NEVER_S,
            step_deadline_s=NEVER_S,
            clock=now_s,
        ),
        make_environment=ValueEnvironment,
        make_allocator=allocator,
        scorer=ValueScorer(setting.noise),
        score_deadline_s=NEVER_S,
        max_turns=MAX_TURNS,
    )


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def grow(lease: Lease, parts: GrowthParts) -> tuple[TurnTree, float]:
    """The tree, and the seconds it took."""
    started_s = now_s()
    tree = await grow_tree(lease, parts=parts, story=TreeStory(lease, clock=now_s, tally=Tally()))
    return tree, now_s() - started_s


def measure(tree: TurnTree) -> dict[str, float]:
    """What a tree's continuations were worth: by the predictions, by the true values, and by what came of them."""
    clip = TraceOptions().clip
    worth = {"predicted_flips": 0.0, "expected_flips": 0.0, "flips": 0.0}
    for anchor in known_anchors(tree):
        node = tree.nodes[anchor.node_id]
        assert node.turn is not None, f"anchor {anchor.node_id} was played"
        for name, success in (("predicted_flips", anchor.success), ("expected_flips", value_after(node.turn))):
            kept = min(max(success, clip), 1.0 - clip)
            worth[name] += 1.0 - (kept if anchor.succeeded else 1.0 - kept) ** anchor.granted
        further = [child for child in node.children if tree.nodes[child].grown_by is not GrownBy.CHAIN]
        worth["flips"] += any(outcome_of(tree, child) != anchor.succeeded for child in further)
    turns = [node.turn for node in tree.nodes if node.turn is not None]
    outcomes = {node.turn.outcome for node in tree.nodes if node.state is NodeState.LEAF and node.turn is not None}
    return {
        **worth,
        "mixed": float(len(outcomes) > 1),
        "tokens": float(sum(turn.action_ids.size for turn in turns)),
    }


def outcome_of(tree: TurnTree, first: int) -> float:
    end = bare_rollout(tree, first)[-1].turn
    assert end is not None, f"nothing fails here, so the rollout from node {first} ended"
    return end.outcome


def run_alone(schedule: Schedule, setting: Setting, seed: int, trees: int) -> dict[str, float]:
    """Means over trees grown one by one, each with a slot for every root rollout."""
    rows: list[dict[str, float]] = []

    async def main() -> None:
        for number in range(trees):
            engine = make_engine(schedule, setting, setting.roots)
            tree, took_s = await grow(make_lease(setting, seed, number), make_parts(schedule, setting, engine))
            idle = 1.0 - engine.busy_s / (took_s * setting.roots)
            rows.append({**measure(tree), "took_s": took_s, "idle_slots": idle})

    virtual_time.run(main(), limit_s=NEVER_S)
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def run_pool(schedule: Schedule, setting: Setting, seed: int, trees: int, live: int) -> dict[str, float]:
    """`live` trees at a time share the slots; until the last tree begins, so that emptying is not measured."""
    engine = make_engine(schedule, setting, POOL_SLOTS)
    parts = make_parts(schedule, setting, engine)
    took: list[float] = []
    window: dict[str, float] = {}

    async def worker(todo: Iterator[int]) -> None:
        for number in todo:
            if number == trees - 1:
                window.update(seconds=now_s(), busy_s=engine.busy_s, done=len(took))
            _, took_s = await grow(make_lease(setting, seed, number), parts)
            took.append(took_s)

    async def main() -> None:
        todo = iter(range(trees))
        async with asyncio.TaskGroup() as group:
            for _ in range(live):
                group.create_task(worker(todo))

    virtual_time.run(main(), limit_s=NEVER_S)
    return {
        "trees_per_minute": 60.0 * window["done"] / window["seconds"],
        "idle_slots": 1.0 - window["busy_s"] / (POOL_SLOTS * window["seconds"]),
        "took_s": float(np.mean(took)),
    }


def collect(num_seeds: int, trees: int) -> dict[str, Any]:
    """Every cell with the numbers of each seed."""
    alone = []
    for setting, schedules in CELLS:
        for schedule in schedules:
            runs = [run_alone(schedule, setting, seed, trees) for seed in range(num_seeds)]
            alone.append({"setting": asdict(setting), "schedule": schedule.name, **by_key(runs)})
            print(line(alone[-1]), flush=True)  # noqa: T201
    pool = []
    for live in POOL_TREES:
        for schedule in POOL:
            runs = [run_pool(schedule, MAIN, seed, 2 * trees + live, live) for seed in range(num_seeds)]
            pool.append({"live_trees": live, "schedule": schedule.name, **by_key(runs)})
            print(line(pool[-1]), flush=True)  # noqa: T201
    return {"seeds": num_seeds, "trees": trees, "pool_slots": POOL_SLOTS, "alone": alone, "pool": pool}


def against_joint(result: Mapping[str, Any], setting: Setting, schedule: str, key: str) -> Spread:
    """This schedule's number divided by joint's of the same seed."""
    cells = {cell["schedule"]: cell for cell in result["alone"] if cell["setting"] == asdict(setting)}
    return spread([a / b for a, b in zip(cells[schedule][key], cells["joint"][key], strict=True)])


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Against joint on the same prompts: objective, what came of it, and time."""
    return {
        f"{schedule.name}/{'/'.join(map(str, asdict(setting).values()))}": {
            key: against_joint(result, setting, schedule.name, key) for key in ("expected_flips", "flips", "took_s")
        }
        for setting, schedules in CELLS
        for schedule in schedules
        if schedule.name != "joint"
    }


def picture(result: Mapping[str, Any], path: Path) -> None:
    """Of the main setting and the pool."""
    names = [schedule.name for schedule in CELLS[0][1] if schedule not in FORMS]
    relative = {
        name: (against_joint(result, MAIN, name, "took_s"), against_joint(result, MAIN, name, "expected_flips"))
        for name in names
    }
    idle = {cell["schedule"]: cell["idle_slots"] for cell in result["alone"] if cell["setting"] == asdict(MAIN)}
    draw(relative, {name: idle[name] for name in names}, result["pool"], path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="worlds, at least 3")
    parser.add_argument("--trees", type=int, default=20, help="prompts per world")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.png")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    result = collect(max(3, args.seeds), args.trees)
    if args.out is not None:
        args.out.with_suffix(".json").write_text(json.dumps(result) + "\n", encoding="utf-8")
        picture(result, args.out.with_suffix(".png"))
    for name, ratios in summary(result).items():
        print(f"{name:44s} {ratios}")  # noqa: T201
    if args.json:
        print(json.dumps(summary(result)))  # noqa: T201


if __name__ == "__main__":
    main()
