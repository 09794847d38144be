"""Trees under chosen latencies and failures, in virtual time: nothing waits, leaks, or depends on order."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests import virtual_time
from tests.builders import make_lease
from tests.fakes import (
    CoinEnvironment,
    Fault,
    Latency,
    OneWayCoin,
    ReplayCoin,
    ScatterAllocator,
    ScriptedEngine,
    TableScorer,
    WordRenderer,
    World,
    at_once,
    loop_clock,
    no_fault,
    now_and_then,
    pareto,
    unit,
)
from trace_async.acting.expansion import GrowthParts, grow_tree
from trace_async.acting.story import Tally, TreeStory, Waiting
from trace_async.acting.turns import TurnPlayer
from trace_async.core.seeds import env_seed, node_seed
from trace_async.core.tree import TurnTree
from trace_async.core.types import Grant, GrownBy, Lease, NodeState
from trace_async.errors import EngineError, EnvironmentFailure, InvariantError, PredictorError
from trace_async.methods.allocators import Allocator, UniformAllocator, make_allocator

ENVIRONMENTS: dict[str, type[CoinEnvironment]] = {"fork": CoinEnvironment, "replay": ReplayCoin, "none": OneWayCoin}
MAX_TURNS = 6
FEW_AND_MANY = pytest.mark.parametrize("num_seeds", [30, pytest.param(600, marks=pytest.mark.slow)])


@dataclass(slots=True)
class RolloutEnds:
    """An allocator that counts how often each node was said to end a rollout."""

    inner: Allocator
    ends: Counter[int] = field(default_factory=Counter)

    def start(self, tree: TurnTree) -> list[Grant]:
        return self.inner.start(tree)

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        return self.inner.on_turn(tree, node_id)

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        self.ends[node_id] += 1
        return self.inner.on_rollout_end(tree, node_id)


@dataclass(slots=True, kw_only=True)
class Scene:
    """Everything one tree is grown with."""

    environment: type[CoinEnvironment] = CoinEnvironment
    allocator: Allocator = field(default_factory=lambda: ScatterAllocator(0))
    latency: Latency = at_once
    fault: Fault = no_fault
    world: World = field(default_factory=World)
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    scorer: TableScorer = field(default_factory=TableScorer)
    in_order: bool = False
    success_above: float = 0.5

    def __post_init__(self) -> None:
        for fake in (self.world, self.engine, self.scorer):
            if fake.latency is at_once:
                fake.latency = self.latency
            if fake.fault is no_fault:
                fake.fault = self.fault

    def parts(self) -> GrowthParts:
        return GrowthParts(
            player=TurnPlayer(
                self.engine,
                WordRenderer(),
                max_turn_tokens=3,
                max_context_tokens=90,
                max_turns=MAX_TURNS,
                request_deadline_s=60.0,
                step_deadline_s=30.0,
                clock=loop_clock,
            ),
            make_environment=lambda: self.environment(self.world),
            make_allocator=lambda lease: self.allocator,
            scorer=self.scorer,
            score_deadline_s=20.0,
            max_turns=MAX_TURNS,
            in_order=self.in_order,
            success_above=self.success_above,
        )

    async def grow(self, lease: Lease) -> TurnTree:
        return await grow_tree(lease, parts=self.parts(), story=TreeStory(lease, clock=loop_clock, tally=Tally()))


def lease_of(*, roots: int = 3, continuations: int = 6, seed: int = 7) -> Lease:
    return replace(make_lease(roots=roots, continuations=continuations), seed=seed)


def check_finished(tree: TurnTree, scene: Scene, ends: Counter[int] | None = None) -> None:
    tree.validate()
    assert tree.is_complete
    assert tree.roots_left == 0
    assert scene.world.open_episodes == set()
    assert scene.engine.in_flight == 0
    for node in tree.nodes[1:]:
        assert node.state in (NodeState.LEAF, NodeState.FAILED, NodeState.EXPANDED)
        assert (node.state is NodeState.EXPANDED) == bool(node.children), f"node {node.node_id} is left half-way"
    if ends is not None:
        over = {n.node_id for n in tree.nodes[1:] if n.state in (NodeState.LEAF, NodeState.FAILED)}
        assert ends == dict.fromkeys(over, 1)


def tokens_by_path(tree: TurnTree) -> dict[tuple[int, ...], tuple[list[int], list[int]]]:
    return {
        tree.path(node.node_id): (node.turn.action_ids.tolist(), node.turn.observation_ids.tolist())
        for node in tree.nodes
        if node.turn is not None
    }


def allocator_named(name: str, seed: int) -> Allocator:
    return ScatterAllocator(seed) if name == "scatter" else make_allocator(name, {}, np.random.default_rng(seed))


# ---- every order and every failure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(ENVIRONMENTS))
@pytest.mark.parametrize("method", ["scatter", "trace", "random", "arpo"])
@FEW_AND_MANY
def test_a_tree_is_complete_within_its_budget_whatever_fails_and_in_whatever_order(
    kind: str, method: str, num_seeds: int
) -> None:
    failed = late = 0
    for seed in range(num_seeds):
        errors = (lambda: RuntimeError("boom"), lambda: EngineError("lost"), lambda: PredictorError("no score"))
        counted = RolloutEnds(allocator_named(method, seed))
        scene = Scene(
            environment=ENVIRONMENTS[kind],
            allocator=counted,
            latency=pareto(seed),
            fault=now_and_then(seed, errors, probability=0.1),
            world=World(latency=pareto(seed, scale_s=3.0)),
        )
        try:
            tree = virtual_time.run(scene.grow(lease_of(seed=seed)))
        except EnvironmentFailure as error:  # only the prompt's own reset, and only by being late
            assert "prompt: reset took longer than 30 s" in str(error)  # noqa: PT017 - not the common case
            assert scene.world.open_episodes == set()
            continue
        check_finished(tree, scene, counted.ends)
        if method != "scatter" and kind != "none":
            assert tree.continuations_left == 0
        kinds = Counter(node.failure.kind for node in tree.nodes if node.failure is not None)
        failed += kinds.total()
        late += kinds["EnvironmentTimeout"]
    assert failed > num_seeds
    assert late > num_seeds // 20


@pytest.mark.parametrize("kind", sorted(ENVIRONMENTS))
@FEW_AND_MANY
def test_cancelling_at_any_moment_closes_every_environment_and_leaves_no_task(kind: str, num_seeds: int) -> None:
    interrupted = 0
    for seed in range(num_seeds):
        scene = Scene(environment=ENVIRONMENTS[kind], allocator=ScatterAllocator(seed), latency=pareto(seed))
        interrupted += virtual_time.run(cancel_after(scene, 30.0 * unit(seed, "cancel"), lease_of(seed=seed)))
        assert scene.world.open_episodes == set()
        assert scene.engine.in_flight == 0
    assert interrupted > num_seeds // 2


async def cancel_after(scene: Scene, seconds: float, lease: Lease) -> bool:
    """Whether the tree was still growing; twice cancelled, as by an impatient user."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(scene.grow(lease))
        await asyncio.sleep(seconds)
        growing = task.cancel()
        await asyncio.sleep(0.5)
        task.cancel()
    return growing


@pytest.mark.parametrize("kind", ["fork", "replay"])
@FEW_AND_MANY
def test_what_a_node_samples_depends_on_its_path_and_not_on_when_it_was_played(kind: str, num_seeds: int) -> None:
    for seed in range(num_seeds // 5):
        known: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        lease, met = lease_of(seed=seed), 0
        for order in range(4):
            scene = Scene(
                environment=ENVIRONMENTS[kind],
                allocator=ScatterAllocator(order),
                latency=pareto((seed, order), longest_s=15.0),
            )
            tree = virtual_time.run(scene.grow(replace(lease, lease_id=f"lease-{order}")))
            for path, tokens in tokens_by_path(tree).items():
                met += path in known
                assert known.setdefault(path, tokens) == tokens, f"seed {seed} path {path}"
        assert met > 10


@pytest.mark.parametrize("kind", sorted(ENVIRONMENTS))
@pytest.mark.parametrize("method", ["scatter", "trace", "random", "arpo"])
def test_in_order_the_same_tree_grows_whatever_takes_how_long(kind: str, method: str) -> None:
    def grown(seed: int, order: int, *, in_order: bool) -> list[object]:
        scene = Scene(
            environment=ENVIRONMENTS[kind],
            allocator=allocator_named(method, seed),
            latency=pareto((seed, order), longest_s=15.0),
            in_order=in_order,
        )
        tree = virtual_time.run(scene.grow(lease_of(seed=seed)))
        check_finished(tree, scene)
        return [
            (node.parent, node.grown_by, node.state, node.turn.action_ids.tolist() if node.turn is not None else None)
            for node in tree.nodes[1:]
        ]

    free = set()
    for seed in range(4):
        first, *others = [grown(seed, order, in_order=True) for order in range(3)]
        assert others == [first, first], f"seed {seed}"
        free |= {(seed, str(grown(seed, order, in_order=False))) for order in range(3)}
    assert len(free) > 4, "without it timing decides, or these latencies test nothing"


def test_sampling_and_environment_seeds_are_the_hashes_of_the_path() -> None:
    scene = Scene(allocator=ScatterAllocator(1))
    lease = lease_of()
    tree = virtual_time.run(scene.grow(lease))
    asked = {request.request_id: request.seed for request in scene.engine.requests}
    paths = {f"lease-0/{node.node_id}": tree.path(node.node_id) for node in tree.nodes[1:]}
    assert asked == {name: node_seed(7, "prompt-0", 0, path) for name, path in paths.items()}
    assert sorted(scene.world.seeds) == sorted(env_seed(7, "prompt-0", 0, path) for path in paths.values())


# ---- no barrier ----------------------------------------------------------------------------------------------------


def test_every_child_starts_the_moment_its_parents_score_arrives() -> None:
    for seed in range(30):
        scene = Scene(
            latency=pareto(seed, longest_s=15.0), allocator=make_allocator("trace", {}, np.random.default_rng(seed))
        )
        scene.world = World()  # environments at once: a child asks the engine when it starts
        started: dict[int, float] = {}
        ended: dict[int, float] = {}
        scene.engine.latency = timed(scene.latency, started, ended)
        tree = virtual_time.run(scene.grow(lease_of(seed=seed)))
        for node in tree.nodes[1:]:
            if node.grown_by is GrownBy.CHAIN:
                score_s = scene.latency(f"score:{tree.prefix_ids(node.parent).size}")
                assert started[node.node_id] == pytest.approx(ended[node.parent] + score_s, abs=1e-9)
            elif node.grown_by is GrownBy.ROOT:
                assert started[node.node_id] == 0.0
            else:  # granted by a root rollout's end, at that very moment
                assert any(started[node.node_id] == pytest.approx(end, abs=1e-9) for end in ended.values())


def timed(latency: Latency, started: dict[int, float], ended: dict[int, float]) -> Latency:
    """Notes the virtual time at which each node's call starts and will end."""

    def noting(call: str) -> float:
        node_id = int(call.rpartition("/")[2])
        started[node_id] = loop_clock()
        ended[node_id] = started[node_id] + latency(call)
        return latency(call)

    return noting


def test_a_tree_takes_as_long_as_its_longest_path() -> None:
    for seed in range(40):
        latency = pareto(seed, longest_s=15.0)
        scene = Scene(allocator=make_allocator("uniform", {}, np.random.default_rng(0)))
        scene.engine.latency = scene.scorer.latency = latency

        async def main(scene: Scene = scene, seed: int = seed) -> tuple[TurnTree, float]:
            return await scene.grow(lease_of(roots=4, continuations=0, seed=seed)), loop_clock()

        tree, makespan_s = virtual_time.run(main())
        arrived_s = {0: 0.0}
        for node in tree.nodes[1:]:
            arrived_s[node.node_id] = arrived_s[node.parent] + latency(f"lease-0/{node.node_id}")
            if node.children:
                arrived_s[node.node_id] += latency(f"score:{tree.prefix_ids(node.node_id).size}")
        assert makespan_s == pytest.approx(max(arrived_s.values()), rel=1e-12)


# ---- failures one by one -------------------------------------------------------------------------------------------


def test_what_counts_as_a_success_is_the_trees_from_the_start() -> None:
    seen: list[float] = []

    class Looking(UniformAllocator):
        def start(self, tree: TurnTree) -> list[Grant]:
            seen.append(tree.success_above)
            return super().start(tree)

    lease = lease_of(roots=1, continuations=0)
    trees = [virtual_time.run(Scene(allocator=Looking(), success_above=above).grow(lease)) for above in (-0.5, 0.25)]

    assert seen == [tree.success_above for tree in trees] == [-0.5, 0.25]


def test_a_failed_node_keeps_error_and_place_and_its_rollout_ends_there() -> None:
    counted = RolloutEnds(make_allocator("trace", {}, np.random.default_rng(0)))
    scene = Scene(allocator=counted)
    scene.world.end_probability = 0.0
    scene.engine.fault = lambda call: RuntimeError("cuda " + "x" * 900) if call == "lease-0/1" else None
    tree = virtual_time.run(scene.grow(lease_of(roots=2, continuations=2)))
    failure = tree.nodes[1].failure
    assert failure is not None
    assert (failure.node_id, failure.kind) == (1, "EngineError")
    assert failure.message.startswith("lease-0/1: engine failed: RuntimeError: cuda xxx")
    assert len(failure.message) == 500
    assert tree.nodes[1].state is NodeState.FAILED
    assert (tree.roots_left, tree.continuations_left) == (0, 0)
    check_finished(tree, scene, counted.ends)


def test_a_turn_that_cannot_be_scored_fails_and_is_not_trained_as_if_it_were() -> None:
    scene = Scene(allocator=ScatterAllocator(0), scorer=TableScorer(fault=lambda call: OSError("no predictor")))
    scene.world.end_probability = 0.0
    tree = virtual_time.run(scene.grow(lease_of(roots=1, continuations=0)))
    assert [(node.state, node.turn) for node in tree.nodes[1:]] == [(NodeState.FAILED, None)]
    failure = tree.nodes[1].failure
    assert failure is not None
    assert failure.message == "lease-0/1: score failed: OSError: no predictor"


@pytest.mark.parametrize(
    "break_it",
    [
        lambda scene: setattr(scene.engine, "fault", lambda call: InvariantError("ledger of the engine")),
        lambda scene: setattr(scene.scorer, "fault", lambda call: InvariantError("ledger of the predictor")),
        lambda scene: setattr(scene, "allocator", Spendthrift()),
    ],
)
def test_a_broken_promise_crosses_the_tree_and_nothing_is_left(break_it: Callable[[Scene], None]) -> None:
    scene = Scene(latency=pareto(3))
    scene.world.end_probability = 0.1
    break_it(scene)
    with pytest.raises(ExceptionGroup) as caught:
        virtual_time.run(scene.grow(lease_of(roots=4)))
    assert caught.group_contains(InvariantError)
    assert scene.world.open_episodes == set()
    assert scene.engine.in_flight == 0


class Spendthrift(ScatterAllocator):
    """Grants more than there is."""

    def __init__(self) -> None:
        super().__init__(0)

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        return [Grant(node_id=0, count=tree.continuations_left + 1, grown_by=GrownBy.CONTINUATION)]


def test_a_prompt_that_cannot_be_opened_is_an_environment_failure_and_its_episode_is_closed() -> None:
    scene = Scene()
    scene.world.fault = lambda call: ConnectionError("sandbox host is down")
    with pytest.raises(EnvironmentFailure, match="lease-0 prompt: reset failed: ConnectionError"):
        virtual_time.run(scene.grow(lease_of()))
    assert scene.world.opened == 1
    assert scene.world.open_episodes == set()


def test_an_opening_that_depends_on_the_seed_fails_the_rollouts_that_differ() -> None:
    class Moody(CoinEnvironment):
        async def reset(self, task, *, seed):  # type: ignore[no-untyped-def]
            (message,) = await super().reset(task, seed=seed)
            return (message._replace(content=f"{message.content} {seed}"),)

    scene = Scene(environment=Moody)
    tree = virtual_time.run(scene.grow(lease_of(roots=2, continuations=0)))
    failure = tree.nodes[2].failure
    assert tree.nodes[1].failure is None
    assert failure is not None
    assert "an opening may depend on the task only" in failure.message


def test_a_replay_that_is_answered_otherwise_fails_its_continuation_only() -> None:
    scene = Scene(environment=ReplayCoin, allocator=make_allocator("trace", {}, np.random.default_rng(0)))
    scene.world.end_probability, scene.world.forgetful = 0.0, True
    tree = virtual_time.run(scene.grow(lease_of(roots=2, continuations=4)))
    below = [n for n in tree.nodes[1:] if n.grown_by is GrownBy.CONTINUATION]
    assert len(below) == 4
    assert all("when it was recorded" in node.failure.message for node in below if node.failure is not None)
    assert [n.state is NodeState.FAILED for n in tree.nodes[1:]] == [n in below for n in tree.nodes[1:]]
    check_finished(tree, scene)


def test_an_environment_that_does_not_close_is_named_and_holds_the_tree_ten_seconds_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(allocator=ScatterAllocator(0))
    scene.world.latency = lambda call: math.inf if call.startswith("close") else 0.0
    scene.world.end_probability = 1.0

    async def main() -> float:
        await scene.grow(lease_of(roots=3, continuations=0))
        return loop_clock()

    with caplog.at_level(logging.WARNING):
        assert virtual_time.run(main()) == pytest.approx(10.0)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"environment coin was left open: lease-0/{node}: close took longer than 10 s" for node in (1, 2, 3)
    ]


def test_an_ended_episode_is_closed_while_others_still_run() -> None:
    scene = Scene(allocator=make_allocator("uniform", {}, np.random.default_rng(0)))
    scene.engine.latency = lambda call: 100.0 if call == "lease-0/2" else 1.0
    scene.world.end_probability = 1.0
    held: list[int] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.grow(lease_of(roots=3, continuations=0)))
            await asyncio.sleep(50.0)
            held.append(len(scene.world.open_episodes))

    virtual_time.run(main())
    assert held == [1]


def test_a_story_tells_what_each_node_waits_for_and_since_when() -> None:
    scene = Scene(allocator=make_allocator("uniform", {}, np.random.default_rng(0)))
    scene.world.end_probability = 0.0
    scene.engine.latency = lambda call: 30.0 if call == "lease-0/1" else 1.0
    scene.scorer.latency = lambda call: 15.0
    lease = lease_of(roots=2, continuations=0)

    async def main() -> list[Waiting]:
        async with asyncio.TaskGroup() as group:
            story = TreeStory(lease, clock=loop_clock, tally=Tally())
            task = group.create_task(grow_tree(lease, parts=scene.parts(), story=story))
            await asyncio.sleep(5.0)
            seen = story.waiting()
            task.cancel()
        return seen

    assert virtual_time.run(main()) == [(1, "generate", 0.0), (2, "score", 1.0)]
