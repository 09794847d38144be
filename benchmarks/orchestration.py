"""Turns per second of one actor's growth path with an engine that costs nothing, against a bare loop of its awaits.

    python -m benchmarks.orchestration [--trees 16] [--repeats 15] [--json]

All sides run on uvloop in this process, in turns, and grow the same trees (four root rollouts and eight continuations,
FrozenLake, compact style). Seconds are CPU seconds of this process: on an idle machine the same as wall seconds, and on
a busy one not the neighbours' business.

    ours   lease, reset, TurnTree; per node: fork, engine, step, render, record, predict (beta), allocate (trace); until
           the tree is complete and its environments are closed
    bare   one TaskGroup per tree, one task per node and the same awaits, without any work: an environment call that
           does not suspend, an engine call that yields once, another environment call, and unless the node is an end a
           future that one callback of the loop resolves for all who wait; each under an `asyncio.timeout`
    lean   bare, with an `asyncio.timeout` only around the two calls that do suspend, as ours arms its timers
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np
import uvloop

from envs.frozenlake_map import MOVES
from envs.registry import load_environment
from trace_async.acting.expansion import GrowthParts, grow_tree
from trace_async.acting.story import Tally, TreeStory
from trace_async.acting.turns import TurnPlayer
from trace_async.core.types import (
    GenerateRequest,
    Generation,
    IntArray,
    Lease,
    Message,
    NodeState,
    Score,
    StopReason,
    TreeBudget,
)
from trace_async.environment import EnvironmentKit
from trace_async.methods.allocators import make_allocator
from trace_async.predictors.registry import make_predictor
from trace_async.scoring import BatchScorer

ROOTS, CONTINUATIONS = 4, 8
LIVE_TREES = 16
"""Trees that grow at a time on either side."""
DEADLINE_S = 60.0
STOP_ID = 0


class WordRenderer:
    """One token a word, whitespace between words; every move and every cell of a lake has its number."""

    stop_ids = (STOP_ID,)

    def __init__(self) -> None:
        self._words: list[str] = ["<stop>", *MOVES]
        self._ids = {word: number for number, word in enumerate(self._words)}

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        return self.reply_ids(messages, closed=True)

    def reply_ids(self, messages: Sequence[Message], *, closed: bool) -> IntArray:
        ids = [] if closed else [STOP_ID]
        for message in messages:
            ids += [self._id(word) for word in message.content.split()]
        return np.array(ids, dtype=np.int32)

    def text(self, action_ids: IntArray) -> str:
        return " ".join(self._words[token] for token in action_ids.tolist() if token != STOP_ID)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


class InstantEngine:
    """A random move and a stop token, after one turn of the loop."""

    def __init__(self) -> None:
        self._moves = [np.array([1 + move, STOP_ID], dtype=np.int32) for move in range(len(MOVES))]
        self._logprobs = np.array([-1.0, -0.25], dtype=np.float32)

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(0)
        return Generation(
            token_ids=self._moves[request.seed % len(MOVES)],
            logprobs=self._logprobs,
            version_min=0,
            version_max=0,
            kv_version_min=0,
            stop=StopReason.STOP,
            generate_s=0.0,
        )


class Shape(NamedTuple):
    """A tree as the bare loop needs it: the children of each node in the order of their making, and the ends."""

    children: tuple[tuple[int, ...], ...]
    ends: frozenset[int]


class Speeds(NamedTuple):
    """Turns per CPU second of one repeat."""

    ours: float
    bare: float
    lean: float


def make_lease(kit: EnvironmentKit, number: int) -> Lease:
    task = kit.tasks.task("train", number)
    return Lease(
        lease_id=f"lease-{number}",
        prompt_id=task.task_id,
        task=task,
        budget=TreeBudget(roots=ROOTS, continuations=CONTINUATIONS),
        seed=1,
        round_index=0,
        attempt=0,
        issued_version=0,
        deadline_s=120.0,
        root_score=Score(success=0.5, predictor_version=0),
    )


def make_parts(kit: EnvironmentKit) -> GrowthParts:
    return GrowthParts(
        player=TurnPlayer(
            InstantEngine(),
            WordRenderer(),
            max_turn_tokens=4,
            max_context_tokens=256,
            max_turns=64,
            request_deadline_s=DEADLINE_S,
            step_deadline_s=DEADLINE_S,
            clock=time.monotonic,
        ),
        make_environment=kit.make_environment,
        make_allocator=lambda lease: make_allocator("trace", {}, np.random.default_rng(0)),
        scorer=BatchScorer(make_predictor("beta", {}, seed=0, text_of=str), max_batch=256),
        score_deadline_s=DEADLINE_S,
        max_turns=64,
    )


async def run_ours(parts: GrowthParts, leases: Sequence[Lease]) -> list[Shape]:
    """Grow every lease's tree, LIVE_TREES at a time."""
    shapes: list[Shape] = []
    tally = Tally()
    todo = iter(leases)

    async def grow_all() -> None:
        for lease in todo:
            tree = await grow_tree(lease, parts=parts, story=TreeStory(lease, clock=time.monotonic, tally=tally))
            ends = frozenset(node.node_id for node in tree.nodes if node.state is not NodeState.EXPANDED)
            shapes.append(Shape(tuple(tuple(node.children) for node in tree.nodes), ends))

    async with asyncio.TaskGroup() as group:
        for _ in range(LIVE_TREES):
            group.create_task(grow_all())
    return shapes


class LeanLoop:
    """The same awaits for the same trees, and nothing else."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def run(self, shapes: Sequence[Shape]) -> None:
        todo = iter(shapes)

        async def grow_all() -> None:
            for shape in todo:
                async with asyncio.TaskGroup() as group:
                    for child in shape.children[0]:
                        group.create_task(self._node(shape, child, group))

        async with asyncio.TaskGroup() as group:
            for _ in range(LIVE_TREES):
                group.create_task(grow_all())

    async def _node(self, shape: Shape, node: int, group: asyncio.TaskGroup) -> None:
        await self._environment()  # reset or fork
        async with asyncio.timeout(DEADLINE_S):
            await self._engine()
        await self._environment()  # step
        if node not in shape.ends:
            async with asyncio.timeout(DEADLINE_S):
                await self._score()
        for child in shape.children[node]:
            group.create_task(self._node(shape, child, group))

    async def _environment(self) -> None:
        return

    async def _engine(self) -> None:
        await asyncio.sleep(0)

    async def _score(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(future)
        await future

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)


class BareLoop(LeanLoop):
    """With a deadline for the environment too, though it answers at once."""

    async def _environment(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await super()._environment()


def timed(work: Callable[[], Coroutine[Any, Any, object]], turns: int) -> float:
    """Turns per CPU second of one run on a fresh loop, whose making and closing are not timed."""
    loop = uvloop.new_event_loop()
    try:
        started_s = time.process_time()
        loop.run_until_complete(work())
        return turns / (time.process_time() - started_s)
    finally:
        loop.close()


def measure(num_trees: int, repeats: int) -> list[Speeds]:
    """Every side once per repeat, each repeat beginning with another."""
    kit = load_environment("frozenlake", {})
    leases = [make_lease(kit, number) for number in range(num_trees)]
    parts = make_parts(kit)
    with asyncio.Runner() as runner:
        shapes = runner.run(run_ours(parts, leases))  # tells the trees' shapes, and warms up
    turns = sum(len(shape.children) - 1 for shape in shapes)
    works: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: run_ours(parts, leases),
        lambda: BareLoop().run(shapes),
        lambda: LeanLoop().run(shapes),
    ]
    rows = []
    for repeat in range(repeats):
        order = [(repeat + shift) % len(works) for shift in range(len(works))]
        speeds = {side: timed(works[side], turns) for side in order}
        rows.append(Speeds(speeds[0], speeds[1], speeds[2]))
    return rows


def report(rows: Sequence[Speeds]) -> dict[str, float]:
    """Medians over the repeats; a ratio is the median of the repeats' own ratios."""
    return {
        "turns_per_s": round(statistics.median(row.ours for row in rows), 1),
        "bare_turns_per_s": round(statistics.median(row.bare for row in rows), 1),
        "ratio": round(statistics.median(row.ours / row.bare for row in rows), 4),
        "lean_turns_per_s": round(statistics.median(row.lean for row in rows), 1),
        "lean_ratio": round(statistics.median(row.ours / row.lean for row in rows), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=16, help="trees per repeat")
    parser.add_argument("--repeats", type=int, default=15, help="at least 5")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    rows = measure(args.trees, max(5, args.repeats))
    result = report(rows)
    for row in rows:
        line = f"ours {row.ours:8.0f}   bare {row.bare:8.0f}   lean {row.lean:8.0f} turns/s"
        print(f"{line}   ratio {row.ours / row.bare:.3f}")  # noqa: T201
    print(f"median: {result['turns_per_s']:.0f} turns/s, {1e6 / result['turns_per_s']:.0f} us a turn")  # noqa: T201
    print(f"median ratio to bare {result['ratio']:.3f} (target 0.5), to lean {result['lean_ratio']:.3f}")  # noqa: T201
    if args.json:
        print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
