"""Trees of FrozenLake prompts for judging predictors: grown once by the shipped policy, then kept in a file.

Every round visits some prompts for the first time and some again; no predictor has a say in which prompts are visited
or where trees branch (allocator `random`), so all predictors are judged on the same draws.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trace_async.acting.expansion import GrowthParts, grow_tree
from trace_async.acting.story import Tally, TreeStory
from trace_async.app import wiring
from trace_async.config import Config, EngineConfig, EnvironmentConfig, TreeConfig
from trace_async.core.group import cut_group
from trace_async.core.types import Group, Lease, Prefix, Score, Task, TreeBudget
from trace_async.rendering import Renderer, load_renderer
from trace_async.transport.wire import decode_group, encode_group

LIVE_TREES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is grown."""

    sizes: tuple[int, ...] = (3, 4, 5, 6, 7)
    rounds: int = 40
    new_prompts: int = 12  # per round
    seen_prompts: int = 6  # per round, from the second on
    roots: int = 4
    continuations: int = 4
    seed: int = 0


class UnknownScorer:
    """Knows nothing; the allocator `random` does not ask."""

    async def score(self, prefix: Prefix) -> Score:
        return Score(success=float("nan"), predictor_version=0)


def config_of(plan: Plan) -> Config:
    """FrozenLake with maps of every size of the plan, equally likely."""
    return Config(
        environment=EnvironmentConfig(options={"sizes": list(plan.sizes), "unreadable_ends": True}),
        tree=TreeConfig(allocator="random"),
        engine=EngineConfig(max_batch=128, device="cpu"),
    )


def schedule(plan: Plan) -> list[list[tuple[int, int]]]:
    """(task number, visit) of every tree, by round."""
    rng = np.random.default_rng(plan.seed)
    visits: list[int] = []
    rounds = []
    for _ in range(plan.rounds):
        again = rng.choice(len(visits), plan.seen_prompts, replace=False).tolist() if visits else []
        now = [*again, *range(len(visits), len(visits) + plan.new_prompts)]
        visits += [0] * plan.new_prompts
        rounds.append([(number, visits[number]) for number in now])
        for number in now:
            visits[number] += 1
    return rounds


def grow(plan: Plan) -> list[list[Group]]:
    """The groups of every round."""
    config = config_of(plan)
    kit = wiring.build_kit(config)
    engine, renderer = wiring.build_engine(config, wiring.policy_path(config.policy.path), version=0)
    parts = GrowthParts(
        player=wiring.build_player(config, engine=engine, renderer=renderer),
        make_environment=kit.make_environment,
        make_allocator=lambda lease: wiring.build_allocator(config, lease),
        scorer=UnknownScorer(),
        score_deadline_s=10.0,
        max_turns=config.tree.max_turns,
        success_above=config.environment.success_above,
    )
    todo = [
        _lease(plan, kit.tasks.task("train", number), visit, f"{index}-{number}")
        for index, trees in enumerate(schedule(plan))
        for number, visit in trees
    ]
    groups: dict[str, Group] = {}

    async def grow_some(leases: Iterator[Lease]) -> None:
        for lease in leases:
            tree = await grow_tree(lease, parts=parts, story=TreeStory(lease, clock=time.monotonic, tally=Tally()))
            groups[lease.lease_id] = cut_group(tree, lease=lease, actor_id="one", environment="frozenlake", epoch=1)

    async def grow_all() -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            async with asyncio.TaskGroup() as growing:
                leases = iter(todo)
                for _ in range(LIVE_TREES):
                    growing.create_task(grow_some(leases))
            running.cancel()

    asyncio.run(grow_all())
    return [[groups[f"{index}-{number}"] for number, _ in trees] for index, trees in enumerate(schedule(plan))]


def grown(plan: Plan, folder: Path) -> list[list[Group]]:
    """`grow`, or what it left in `folder` before."""
    file = folder / f"trees_{_name(plan)}.frames"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, [group for groups in grow(plan) for group in groups])
    groups = iter(_read(file))
    return [[next(groups) for _ in trees] for trees in schedule(plan)]


def make_renderer(plan: Plan) -> Renderer:
    """The renderer of the policy that grew the trees."""
    return load_renderer(wiring.policy_path(config_of(plan).policy.path))


def _lease(plan: Plan, task: Task, visit: int, name: str) -> Lease:
    return Lease(
        lease_id=name,
        prompt_id=task.task_id,
        task=task,
        budget=TreeBudget(roots=plan.roots, continuations=plan.continuations),
        seed=plan.seed,
        round_index=visit,
        attempt=0,
        issued_version=0,
        deadline_s=600.0,
        root_score=Score(success=float("nan"), predictor_version=0),
    )


def _name(plan: Plan) -> str:
    sizes = "".join(map(str, plan.sizes))
    return f"{sizes}_{plan.rounds}x{plan.new_prompts}+{plan.seen_prompts}_{plan.roots}+{plan.continuations}_{plan.seed}"


def _write(file: Path, groups: Sequence[Group]) -> None:
    aside = file.with_suffix(".tmp")
    with aside.open("wb") as out:
        for group in groups:
            frames = encode_group(group)
            out.write(struct.pack("<I", len(frames)) + b"".join(struct.pack("<I", len(f)) + f for f in frames))
    aside.rename(file)


def _read(file: Path) -> Iterator[Group]:
    data, place = file.read_bytes(), 0

    def take() -> int:
        nonlocal place
        (number,) = struct.unpack_from("<I", data, place)
        place += 4
        return int(number)

    while place < len(data):
        frames = []
        for _ in range(take()):
            size = take()
            frames.append(data[place : place + size])
            place += size
        yield decode_group(frames)
